"""The part of moving live blocks that runs in each of vLLM's workers, called by the engine core over `collective_rpc`.

Calls come between two steps and in order with them, so what a step that is still on the device reads and writes is
ordered by the device's own stream. Every function returns something that the engine core compares over all ranks.

The engine core calls `carry_out` alone, which does not raise: vLLM reads the answers of the ranks in turn and stops at
one that failed, and the answers behind it would be taken for those of the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Pairs = Sequence[tuple[int, int]]

RUNNERS = {
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
}
_ASIDE = "_kvatlas_aside"


def carry_out(worker: Any, name: str, *arguments: Any) -> tuple[Any, str]:
    """What the function of this name returns, and "", or None and what went wrong."""
    try:
        return globals()[name](worker, *arguments), ""
    except Exception as error:  # noqa: BLE001 - see above
        return None, f"{type(error).__name__}: {error}"


def ask(executor: Any, name: str, *arguments: Any) -> list[Any]:
    """What the function of this name returns in each rank, for the engine core. Waits for all of them, however long the
    steps before it take, as vLLM does. RuntimeError where one failed."""
    answers = executor.collective_rpc(carry_out, args=(name, *arguments))
    if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]:
        raise RuntimeError("; ".join(failed))
    return [answer for answer, _ in answers]


def probe(worker: Any) -> str:
    """Why blocks of this worker cannot be moved, "" where they can. Touches nothing."""
    runner: Any = getattr(worker, "model_runner", None)
    name = f"{type(runner).__module__}.{type(runner).__qualname__}"
    if name not in RUNNERS:
        return f"its runner is {name}, and moves are proven for {', '.join(sorted(RUNNERS))} alone"
    missing = [
        part
        for part in ("kv_caches", "kv_cache_config", "requests", "input_batch", "synchronize_input_prep")
        if not hasattr(runner, part)
    ]
    if missing:
        return f"its runner has no {', '.join(missing)}"
    tables = getattr(runner.input_batch.block_table, "block_tables", None)
    if tables is None or any(not hasattr(table, "block_table") for table in tables):
        return "its block tables are of an unknown kind"
    sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
    if [table.block_size for table in tables] != sizes:
        return "its block tables count in other blocks than the scheduler"
    return _unknown_layout(runner)


def _unknown_layout(runner: Any) -> str:
    blocks = runner.kv_cache_config.num_blocks
    seen: dict[tuple[str, int], tuple[int, ...]] = {}
    for cache in runner.kv_caches:
        if not hasattr(cache, "data_ptr"):
            return "its KV cache holds something else than tensors"
        if cache.shape[0] % blocks:
            return f"a KV tensor has {cache.shape[0]} rows, which {blocks} blocks do not divide"
        shape = seen.setdefault((str(cache.device), cache.data_ptr()), tuple(cache.shape))
        if shape != tuple(cache.shape):
            return "KV tensors of different shapes share their memory"
    return "" if seen else "it has no KV tensors"


def copy_blocks(worker: Any, moves: Pairs, aside: Sequence[int]) -> int:
    """Set the contents of blocks aside, then copy along `moves`; how many were copied. Sources keep their contents."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    runner = worker.model_runner
    saved = [rows[list(aside)] for rows in _rows(runner)] if aside else []
    setattr(runner, _ASIDE, saved)
    copy_kv_cache_blocks_inplace(
        runner.kv_caches, runner.kv_cache_config.num_blocks, [KVCacheBlockCopy(*pair) for pair in moves]
    )
    return len(moves)


def settle_blocks(worker: Any, renamed: Mapping[int, int], put_back: Sequence[int]) -> int:
    """Let this worker's tables name the new blocks, and write what was set aside to `put_back`; how often a block was
    renamed in the requests it knows."""
    runner = worker.model_runner
    saved = getattr(runner, _ASIDE, [])
    setattr(runner, _ASIDE, [])
    if put_back:
        for rows, contents in zip(_rows(runner), saved, strict=True):
            rows[list(put_back)] = contents
    count = 0
    sources = np.fromiter(renamed, np.int64, len(renamed))
    order = np.argsort(sources)
    sources, destinations = sources[order], np.fromiter(renamed.values(), np.int64, len(renamed))[order]
    with runner.synchronize_input_prep():
        for state in runner.requests.values():
            for table in state.block_ids:
                if not renamed.keys().isdisjoint(table):
                    count += sum(block in renamed for block in table)
                    table[:] = [renamed.get(block, block) for block in table]
        for table in runner.input_batch.block_table.block_tables if renamed else ():
            rows = table.block_table.np
            place = np.searchsorted(sources, rows).clip(max=len(sources) - 1)
            named = np.arange(rows.shape[1]) < table.num_blocks_per_row[: rows.shape[0], None]
            named &= sources[place] == rows
            rows[named] = destinations[place[named]]
    return count


def digests(worker: Any, blocks: Sequence[int]) -> list[bytes]:
    """A digest of each block's contents over all layers of this rank."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    as_bytes = STR_DTYPE_TO_TORCH_DTYPE["fp8"]  # which vLLM keeps as plain bytes
    hashes = [hashlib.blake2b(digest_size=16) for _ in blocks]
    for rows in _rows(worker.model_runner):
        for place, row in enumerate(rows[list(blocks)].cpu()):
            hashes[place].update(row.contiguous().view(-1).view(as_bytes).numpy().tobytes())
    return [one.digest() for one in hashes]


def _rows(runner: Any) -> Iterator[Any]:
    """Each layer's KV tensor once, with the scheduler's blocks as its first dimension."""
    blocks = runner.kv_cache_config.num_blocks
    seen: set[tuple[str, int]] = set()
    for cache in runner.kv_caches:
        key = (str(cache.device), cache.data_ptr())
        if key not in seen:
            seen.add(key)
            yield cache.unflatten(0, (blocks, cache.shape[0] // blocks))
