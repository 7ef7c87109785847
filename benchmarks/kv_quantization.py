"""What a quantised KV cache costs a real model on real text: perplexity, and how far next-token distributions move.

SmolLM2-135M-Instruct reads windows of text in the reference engine's own decoder. All keys and values go into a paged
cache of each format and are read back from it through a scattered block table, in pieces that end within blocks.
Weights and arithmetic are float32 throughout, so that nothing but the cache differs. Windows are spread evenly over the
text.

    python benchmarks/kv_quantization.py [--tokens 20480] [--window 1024] [--formats NAME ...] [--jobs 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_shim.reference.checkpoint import load_llama
from engine_shim.reference.content import Work
from engine_shim.reference.decoder import PagedMemory, Weights, hidden_states, project
from engine_shim.reference.geometry import Geometry
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.sequence import Sequence

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._model_text import losses_by_transformers, model_folder, python_reference  # noqa: E402 - the path above

BASELINE = "float16"
FORMATS = (BASELINE, "bfloat16", "fp8", "fp8_per_token_head", "int8", "int4", "int4_group32")
BLOCK_TOKENS = 16
PIECE = 518  # tokens of a step: no whole number of blocks, and no small rest of a window
ROWS = 256  # positions whose logits are computed at once
COMPARED = 256  # tokens of the first window on which Transformers is asked too
SCHEMA = "kvatlas.benchmark.kv-quantization/v1"


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one format, one element for each predicted token; losses and divergences are in nats."""

    losses: NDArray[np.float64]
    divergences: NDArray[np.float64]
    agreed: NDArray[np.bool_]

    @staticmethod
    def joined(parts: Iterable[Scores]) -> Scores:
        """One after the other."""
        columns = zip(*((one.losses, one.divergences, one.agreed) for one in parts), strict=True)
        return Scores(*map(np.concatenate, columns))


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one format. Changes are against the baseline; of a single window there is no standard error, 0."""

    format: str
    bytes_per_token: int
    perplexity: float
    perplexity_change_percent: float
    perplexity_change_standard_error_percent: float
    kl_mean_nats: float
    kl_standard_error_nats: float
    kl_p99_nats: float
    same_best_token_percent: float


def read_window(weights: Weights, cache: KVCache, tokens: Tensor, seed: int) -> Tensor:
    """Hidden states of a window whose keys and values lie in blocks of a random order."""
    count = len(tokens)
    blocks = np.random.default_rng(seed).permutation(cache.num_blocks)[: -(-count // BLOCK_TOKENS)]
    sequence = Sequence("window", tokens.numpy(), count, count, [], table=array("q", blocks.tolist()))
    pieces = []
    for start in range(0, count, PIECE):
        stop = min(start + PIECE, count)
        memory = PagedMemory(cache, [Work(sequence, start, stop)])
        pieces.append(hidden_states(weights, cache.geometry, tokens[start:stop], [(start, stop)], memory))
    return torch.cat(pieces)


def log_probabilities(weights: Weights, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Of some positions at a time: all of a window's at once take 200 MB."""
    for start in range(0, len(hidden), ROWS):
        where = slice(start, start + ROWS)
        yield where, project(weights, hidden[where]).log_softmax(-1)


def measure(
    weights: Weights, geometry: Geometry, window: Tensor, seed: int, formats: tuple[str, ...]
) -> dict[str, Scores]:
    """Read one window with each format, the baseline first."""
    tokens, targets = window[:-1], window[1:]
    plain, best = torch.empty((len(tokens), geometry.vocabulary)), torch.empty(0)
    shares = torch.empty(0)
    scores = {}
    for name in formats:
        parts = []
        hidden = read_window(weights, make_cache(geometry, tokens, name), tokens, seed)
        for where, logs in log_probabilities(weights, hidden):
            if name == BASELINE:
                plain[where] = logs
            else:
                moved = (shares[where] * (plain[where] - logs)).sum(-1)
                parts.append((-logs.gather(-1, targets[where, None])[:, 0], moved, logs.argmax(-1) == best[where]))
        if name == BASELINE:
            shares, best = plain.exp(), plain.argmax(-1)
            parts = [(-plain.gather(-1, targets[:, None])[:, 0], torch.zeros(len(tokens)), best == best)]
        losses, divergences, agreed = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
        scores[name] = Scores(losses.astype(np.float64), divergences.astype(np.float64), agreed)
    return scores


def make_cache(geometry: Geometry, tokens: Tensor, name: str) -> KVCache:
    """With twice the blocks that the tokens need, so that their order can be any."""
    return KVCache(geometry, 2 * -(-len(tokens) // BLOCK_TOKENS), block_tokens=BLOCK_TOKENS, dtype=name)


def difference_to_transformers(folder: Path, weights: Weights, geometry: Geometry, window: Tensor) -> float:
    """The most that the loss of a token differs between this decoder with a float32 cache and Transformers."""
    tokens, targets = window[:-1], window[1:]
    hidden = read_window(weights, make_cache(geometry, tokens, "float32"), tokens, 0)
    ours = torch.nn.functional.cross_entropy(project(weights, hidden), targets, reduction="none")
    return float((ours - torch.tensor(losses_by_transformers(folder, window.tolist()))).abs().max())


def summary(name: str, windows: list[dict[str, Scores]], geometry: Geometry) -> Result:
    """The figures of one format; standard errors are over windows, for tokens of one window depend on each other."""
    all_, plain = (Scores.joined(window[one] for window in windows) for one in (name, BASELINE))
    more = all_.losses - plain.losses
    cache = make_cache(geometry, torch.zeros(1), name)
    return Result(
        format=name,
        bytes_per_token=cache.nbytes // (cache.num_blocks * BLOCK_TOKENS),
        perplexity=math.exp(all_.losses.mean()),
        perplexity_change_percent=100 * math.expm1(more.mean()),
        perplexity_change_standard_error_percent=100 * _standard_error(more, len(windows)),
        kl_mean_nats=float(all_.divergences.mean()),
        kl_standard_error_nats=_standard_error(all_.divergences, len(windows)),
        kl_p99_nats=float(np.quantile(all_.divergences, 0.99)),
        same_best_token_percent=100 * float(all_.agreed.mean()),
    )


def _standard_error(values: NDArray[np.float64], windows: int) -> float:
    means = values.reshape(windows, -1).mean(1)
    return float(means.std(ddof=1) / math.sqrt(windows)) if windows > 1 else 0.0


def table(results: list[Result]) -> str:
    """For people, and for the docs."""
    lines = [
        "| cache | bytes a token | of FP16 | perplexity | change | KL, mean (nats) | 99 % below | same best token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{one.format}` | {one.bytes_per_token:,} | {one.bytes_per_token / results[0].bytes_per_token:.1%} "
        f"| {one.perplexity:.4f} "
        f"| {one.perplexity_change_percent:+.3f} ± {one.perplexity_change_standard_error_percent:.3f} % "
        f"| {one.kl_mean_nats:.2e} | {one.kl_p99_nats:.2e} | {one.same_best_token_percent:.2f} % |"
        for one in results
    ]
    return "\n".join(lines)


def measure_all(
    folder: Path, windows: list[Tensor], formats: tuple[str, ...], jobs: int, *, compare: Tensor
) -> Iterator[tuple[float, Geometry, list[dict[str, Scores]]]]:
    """After each window, in order: the difference to Transformers on `compare`, and all windows so far."""
    geometry, weights = load_llama(folder)
    difference = difference_to_transformers(folder, weights, geometry, compare)
    print(f"losses of {len(compare) - 1} tokens differ from Transformers' by {difference:.1e} nats at most", flush=True)
    done: list[dict[str, Scores]] = []
    work = [(weights, geometry, window, seed, formats) for seed, window in enumerate(windows, 1)]
    if jobs == 1:
        for arguments in work:
            done.append(measure(*arguments))
            yield difference, geometry, done
        return
    global _work  # what forked processes find here need not be sent to them
    _work = work
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        for scores in pool.map(_measure_one, range(len(work))):
            done.append(scores)
            yield difference, geometry, done


_work: list[tuple[Weights, Geometry, Tensor, int, tuple[str, ...]]] = []


@torch.inference_mode()
def _measure_one(index: int) -> dict[str, Scores]:
    return measure(*_work[index])


@torch.inference_mode()
def main() -> None:
    """Print the table after the last window; with --json the file grows with every window."""
    parser = argparse.ArgumentParser(description="Measure what quantised KV caches cost.")
    parser.add_argument("--tokens", type=int, default=20_480, help="predicted, at least")
    parser.add_argument("--window", type=int, default=1024, help="tokens that a prediction can look back at, at most")
    parser.add_argument("--formats", nargs="+", choices=FORMATS[1:], default=FORMATS[1:], help="beside float16")
    parser.add_argument("--jobs", type=int, default=1, help="windows at once; each takes a core and 0.8 GB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tokens < 1 or not 2 <= options.window <= 8192 or options.jobs < 1:
        parser.error("--tokens and --jobs must be 1 or more, and --window 2 to 8,192")
    torch.set_num_threads(1)
    folder = model_folder()
    text = python_reference(folder)
    count = -(-options.tokens // options.window)
    tokens = torch.tensor(text.tokens)
    if count * options.window >= len(tokens):
        parser.error(f"the text has {len(tokens):,} tokens")
    starts = [index * (len(tokens) - options.window - 1) // max(1, count - 1) for index in range(count)]
    windows = [tokens[start : start + options.window + 1] for start in starts]
    print(f"{text.source}: {count} windows of {options.window:,} of its {len(tokens):,} tokens", flush=True)
    results: list[Result] = []
    formats = (BASELINE, *options.formats)
    began = time.monotonic()
    compared = windows[0][: COMPARED + 1]
    for difference, geometry, done in measure_all(folder, windows, formats, options.jobs, compare=compared):
        results = [summary(name, done, geometry) for name in formats]
        print(f"window {len(done)} of {count}: {time.monotonic() - began:.0f} s", flush=True)
        if options.json:
            facts = {
                "schema": SCHEMA,
                "model": "SmolLM2-135M-Instruct; its weights were Q4_1, written anew as bfloat16, computed in float32",
                "text": text.source,
                "text_sha256": text.sha256,
                "predicted_tokens": len(done) * options.window,
                "window": options.window,
                "losses_differ_from_transformers_nats": difference,
                "formats": [asdict(one) for one in results],
            }
            options.json.write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
