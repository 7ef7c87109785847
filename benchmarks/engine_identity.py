"""Does the engine under `relocating` hit and evict what it does under `vllm`? Request by request, on recorded traffic.

Each trace is served twice by the whole reference engine, in virtual time and in pattern mode, with KV tensors that are
real and small (256 bytes a block). Of every admission is kept which request it was, the names of the blocks that it
hit, and the names of all that were evicted before it, in order. The two lists must be equal. Contents are verified on
the way and at the end.

    python benchmarks/engine_identity.py [--traces FOLDER] [--only TEXT] [--seconds 60] [--json FILE]

FOLDER holds more traces than the bundled ones, under their sources' names; `--seconds 0` serves whole traces, which
takes half an hour for all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_shim.observer import NullObserver
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.prefix import HASH_BYTES, PrefixIndex
from engine_shim.reference.build import EngineSettings, arrivals
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.content import PatternContent
from engine_shim.reference.engine import Engine, Pace
from engine_shim.reference.geometry import Geometry
from engine_shim.reference.kv_cache import KVCache
from engine_shim.workload import Workload, load_workload

POLICIES = ("vllm", "relocating")
SMALLEST = Geometry("one-head", 1, 1, 4, 1, 4, 4, 16, "ours, for this benchmark: 16 bytes a token")
HEADROOM = 0.02
# Pool sizes, and whether prefixes are cached; those of docs/policies.md.
TRACES: tuple[tuple[str, int, bool], ...] = (
    ("mooncake-conversation", 60_000, True),
    ("mooncake-conversation", 120_000, True),
    ("mooncake-conversation", 240_000, True),
    ("mooncake_synthetic_0-1899.jsonl.gz", 40_000, True),
    ("azure-conv", 5_000, True),
    ("azure-conv", 8_000, True),
    ("azure-conv", 8_000, False),
    ("azure2023_code_0-3999.csv.gz", 8_000, True),
    ("arxiv_summarization_lengths_0-2999.csv.gz", 8_000, True),
    ("burstgpt1_0-249.csv.gz", 500, True),
    ("servegen_deepseek-r1_MODELLED_t28800.csv.gz", 120_000, True),
)


@dataclass(frozen=True, slots=True)
class Admission:
    """One sequence that got its blocks. The digests are of block names, in order."""

    request_id: str
    hits: int
    hit_digest: bytes
    evictions: int  # of all so far
    eviction_digest: bytes  # of all so far


class RecordedPrefixes(PrefixIndex):
    """Follows the names of all that is evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.evictions = 0
        self.digest = blake2b(digest_size=16)

    def forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.digest.update(self.hash_of[block].to_bytes(HASH_BYTES, "little"))
        self.evictions += len(blocks)
        super().forget(blocks)


class Owners(NullObserver):
    """Gives each sequence a number, and keeps its name."""

    def __init__(self) -> None:
        self.names = [""]

    def open_owner(self, request_id: str, lora: str = "", cache_salt: str = "") -> int:
        self.names.append(request_id)
        return len(self.names) - 1


class RecordedPool(BlockPool):
    """Keeps an `Admission` for each sequence that the scheduler admits."""

    def __init__(self, num_blocks: int, owners: Owners, **settings: Any) -> None:
        super().__init__(num_blocks, observer=owners, **settings)
        self._prefixes: RecordedPrefixes = RecordedPrefixes()
        self._owners = owners
        self.admissions: list[Admission] = []

    def acquire(self, blocks: Sequence[int], *, owner: int = 0, position: int = 0) -> None:
        names, prefixes = self._prefixes.hash_of, self._prefixes
        hit = blake2b(b"".join(names[block].to_bytes(HASH_BYTES, "little") for block in blocks), digest_size=16)
        self.admissions.append(
            Admission(
                self._owners.names[owner], len(blocks), hit.digest(), prefixes.evictions, prefixes.digest.digest()
            )
        )
        super().acquire(blocks, owner=owner, position=position)


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine did with one trace."""

    admissions: list[Admission]
    last: tuple[int, bytes]  # evictions up to the end
    facts: dict[str, Any]


def serve(workload: Workload, blocks: int, policy: str, *, prefix_cache: bool = True, seconds: float = 0.0) -> Served:
    """Serve a trace, or what of it arrives and runs in the first `seconds` of its time."""
    owners = Owners()
    pool = RecordedPool(blocks, owners, policy=policy, headroom=HEADROOM, prefix_cache=prefix_cache, reserved=(0,))
    cache = KVCache(SMALLEST, blocks)
    clock = VirtualClock()
    engine = Engine(pool, cache, PatternContent(cache), observer=owners, clock=clock, verify_every=256)
    began = time.monotonic()
    engine.serve(
        arrivals(workload, EngineSettings(engine_id="trace")),
        Pace(),
        stop=lambda: 0 < seconds <= clock.now(),
        until_idle=True,
    )
    engine.verify_all()
    report = engine.report()
    facts = {
        "served": report.served_requests,
        "rejected": report.rejected_requests,
        "preemptions": report.preemptions,
        "hit_share": report.prefix_hit_tokens / max(1, report.prefix_query_tokens),
        "live_share_p50": report.live_share_p50,
        "fragmentation_p50": report.fragmentation_p50,
        "relocation_copies": report.relocation_copies,
        "verified_tokens": report.verified_tokens,
        "mismatched_blocks": report.mismatched_blocks,
        "seconds": time.monotonic() - began,
    }
    return Served(pool.admissions, (pool._prefixes.evictions, pool._prefixes.digest.digest()), facts)


def difference(stock: Served, other: Served) -> str:
    """The first admission in which two engines differ, "" where none does."""
    for number, (one, another) in enumerate(zip(stock.admissions, other.admissions, strict=False)):
        if one != another:
            return f"admission {number}: {one} and {another}"
    if len(stock.admissions) != len(other.admissions):
        return f"{len(stock.admissions)} and {len(other.admissions)} admissions"
    return "" if stock.last == other.last else f"{stock.last} and {other.last} at the end"


def compare(workload: Workload, blocks: int, prefix_cache: bool, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    stock, relocating = (
        serve(workload, blocks, policy, prefix_cache=prefix_cache, seconds=seconds) for policy in POLICIES
    )
    return {
        "trace": Path(workload.name).name,
        "blocks": blocks,
        "prefix_cache": prefix_cache,
        "admissions": len(stock.admissions),
        "evictions": stock.last[0],
        "difference": difference(stock, relocating),
        "vllm": stock.facts,
        "relocating": relocating.facts,
    }


def line(row: dict[str, Any]) -> str:
    stock, relocating = row["vllm"], row["relocating"]
    wrong = stock["mismatched_blocks"] + relocating["mismatched_blocks"]
    verified = (stock["verified_tokens"] + relocating["verified_tokens"]) / 1e6
    name = row["trace"][:36] + ("" if row["prefix_cache"] else ", no cache")
    return (
        f"{name:36} {row['blocks']:8,} {row['admissions']:10,} {stock['preemptions']:9,} {stock['hit_share']:6.3f} "
        f"{row['evictions']:10,}  {'equal' if not row['difference'] else 'DIFFER':6} {stock['live_share_p50']:5.2f} "
        f"{_rate(stock)} {_rate(relocating)} {relocating['relocation_copies']:10,} {verified:9.1f} {wrong:6} "
        f"{stock['seconds'] + relocating['seconds']:6.0f}"
    )


def _rate(facts: dict[str, Any]) -> str:
    rate = facts["fragmentation_p50"]
    return "    -" if rate is None else f"{rate:5.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with traces that are not bundled")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each trace; 0 for all of it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'trace':36}   blocks admissions preempted   hits  evictions  lists   live  F vllm  F rel.    copies "
          "verified M  wrong      s")  # fmt: skip
    rows = []
    for name, blocks, prefix_cache in TRACES:
        bundled = "." not in name
        if options.only not in name or not (bundled or options.traces):
            continue
        workload = load_workload(name if bundled else options.traces / name)
        rows.append(compare(workload, blocks, prefix_cache, options.seconds))
        print(line(rows[-1]), flush=True)
        if rows[-1]["difference"]:
            print(f"  {rows[-1]['difference']}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": options.seconds, "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row["difference"] or any(row[p]["mismatched_blocks"] for p in POLICIES)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
