"""Asks real vLLM how it would cut the caches of many small models into blocks. No forward pass is run.

    python drive_specs.py WORK_FOLDER

The configs come from planned_models.json beside this file. For each, vLLM's own executor makes the model with random
weights and tells its layers' cache specs; vLLM's own get_kv_cache_configs turns them and a number of bytes into blocks.
Prints one line, `RESULT {...}`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

WORK = Path(sys.argv[1])
MODELS = Path(__file__).with_name("planned_models.json")
KEPT: list[Any] = []  # an executor that is collected takes the process's communication groups with it


def layer_number(name: str) -> int:
    """The decoder layer of a cache's name, such as model.layers.3.self_attn.attn."""
    return next(int(part) for part in name.split(".") if part.isdigit())


@contextlib.contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """While a model is made, its layers believe that they are one of so many tensor-parallel ranks.

    The other ranks do not run: layers only divide their heads and say what they keep, and nobody computes with them.
    """
    load = CPUModelRunner.load_model

    def divided(runner: Any, *args: Any, **kwargs: Any) -> Any:
        group = parallel_state.get_tp_group()
        alone, group.world_size = group.world_size, ranks
        try:
            return load(runner, *args, **kwargs)
        finally:
            group.world_size = alone

    CPUModelRunner.load_model = divided
    try:
        yield
    finally:
        CPUModelRunner.load_model = load


def examine(name: str, case: dict[str, Any]) -> dict[str, Any]:
    folder = WORK / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case["config"]))
    arguments = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": case["pool_bytes"],
    }
    config = EngineArgs(**(arguments | case.get("arguments", {}))).create_engine_config()
    register_all_kvcache_specs(config)
    with one_of(case.get("ranks", 1)):
        executor = UniProcExecutor(config)
    KEPT.append(executor)
    specs = executor.get_kv_cache_specs()
    layout = resolve_kv_cache_layout(
        config, executor.get_supported_kv_cache_layouts(), [one for worker in specs for one in worker.values()]
    )
    executor.set_kv_cache_layout(layout.name)
    stages = case.get("stages")
    if stages:
        # Pipeline stages are processes of their own; what each would report is its part of the layers.
        whole, specs, first = specs[0], [], 0
        for count in stages:
            specs.append({key: one for key, one in whole.items() if first <= layer_number(key) < first + count})
            first += count
    found = get_kv_cache_configs(config, specs, [case["pool_bytes"]] * len(specs))
    tokens, concurrency = get_kv_cache_capacity(config, found[0])
    groups = []
    for group in found[0].kv_cache_groups:
        one = next(iter(iter_layer_specs(group.kv_cache_spec)))
        groups.append([type(one).__name__, one.block_size, len(group.layer_names)])
    states = [one for worker in specs for one in worker.values() if isinstance(one, MambaSpec)]
    return {
        "num_blocks": found[0].num_blocks,
        "block_bytes": [one.kv_cache_tensors[0].size // one.num_blocks for one in found],
        "groups": groups,
        "layout": layout.name,
        "block_size": config.cache_config.block_size,
        "tokens": tokens,
        "concurrency": concurrency,
        "state_bytes": sum(one.real_page_size_bytes for one in states),
        "max_model_len": config.model_config.max_model_len,
    }


def main() -> None:
    models = json.loads(MODELS.read_text())
    results = {}
    for name, case in models.items():
        try:
            results[name] = examine(name, case)
        except Exception as error:  # noqa: BLE001 - one model that this build cannot make; the test names it
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
