"""Steps of one of vLLM's block pools, stored in compiled code and with NumPy: both maps are the pool, and the same.

    python drive_compiled.py WORK_FOLDER

No engine runs. Prints one line, `RESULT {...}`.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool

from engine_shim import MapObserver, MapReader, MapSpec
from engine_shim.adapters.hooks import Hooks
from engine_shim.adapters.vllm.audit import Audit
from engine_shim.adapters.vllm.compiled import compile_store
from engine_shim.adapters.vllm.pins import PinBook
from engine_shim.adapters.vllm.pool_tap import Place, PoolTap

BLOCKS = 9_000  # three segments of the map
STEPS = 150
WORK = Path(sys.argv[1])


class Watched:
    """A pool, its map and everything that happens to it, from the same dice as every other one's."""

    def __init__(self, name: str) -> None:
        self._now_ns = 1_700_000_000_000_000_000
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
        spec = MapSpec(
            engine_id=name,
            kind="vllm",
            model="none",
            pool="kv",
            total_blocks=BLOCKS,
            block_tokens=16,
            block_bytes=1,
            dtype="none",
            events_per_second=20_000,  # few enough that the ring goes round
        )
        self.observer = MapObserver.create(
            spec, WORK, clock_ns=lambda: self._now_ns
        )  # the map's heartbeat reads it, too
        self.faults: list[str] = []
        self.audit = Audit(self.pool, self.observer, PinBook(self.pool, self.observer), blocks_a_turn=BLOCKS)
        self.audit.adopt()
        self.observer.publish()
        tap = PoolTap(self.pool, self.observer, Place(), lambda error: self.faults.append(repr(error)))
        tap.install(Hooks())
        self.dice = random.Random(3)
        self.held: list[Any] = []
        self.names = iter(range(1 << 40))
        self.wrong = 0

    def step(self) -> None:
        """Some requests come and go, hit each other's prefixes and lose them; then the map is held against the pool."""
        pool, dice, observer = self.pool, self.dice, self.observer
        for _ in range(dice.randrange(1, 20)):
            self._now_ns += 999_999
            what = dice.random()
            if what < 0.45 and pool.get_num_free_blocks() > 200:
                self.held += pool.get_new_blocks(dice.randrange(1, 150))
            elif what < 0.85 and self.held:
                first = dice.randrange(len(self.held))
                some = self.held[first : first + dice.randrange(1, 150)]
                del self.held[first : first + len(some)]
                named = dice.choice(("none", "some", "all"))
                for block in some:
                    if block.block_hash is None and (named == "all" or (named == "some" and dice.random() < 0.5)):
                        key: Any = next(self.names)
                        block.set_block_hash(key, 16)
                        pool.cached_block_hash_to_block.insert(key, block)
                pool.free_blocks(iter(some) if dice.random() < 0.5 else some)
            else:
                cached = [block for block in pool.blocks[1:] if block.block_hash is not None]
                hits = dice.sample(cached, min(len(cached), 20))
                pool.touch(hits)
                self.held += hits
                if dice.random() < 0.3:
                    pool.evict_blocks({block.block_id for block in dice.sample(cached, min(len(cached), 10))})
        some = dice.sample(self.held, min(len(self.held), 30))
        counts = [dice.choice((0, 7, 16, 70_000)) for _ in some]
        observer.wrote([block.block_id for block in some], counts, len(some))
        observer.step_ended(1, 0)
        truth = np.array([self.audit.truth(block) for block in pool.blocks], np.int64)
        self.wrong += int(np.count_nonzero(observer.columns["state"] != truth[:, 0]))
        self.wrong += int(np.count_nonzero(observer.columns["references"] != truth[:, 1]))

    def told(self) -> dict[str, Any]:
        """All that a reader sees, apart from how events are cut into runs."""
        assert self.observer.path is not None, self.observer.reason
        reader = MapReader(self.observer.path)
        snapshot, events = reader.read(), reader.events(0)
        reader.close()
        counters = {
            name: value for name, value in snapshot.counters.items() if name not in ("shim_cpu_ns", "events_dropped")
        }
        happened = [
            (int(e["kind"]), int(e["block"]) + (-i if e["descending"] else i), int(e["time_ns"]))
            for e in events.events
            for i in range(int(e["count"]))
        ]
        return {
            **{name: column.tolist() for name, column in self.observer.columns.items()},
            "counts": list(snapshot.state_counts),
            "counters": counters,
            "histograms": {name: list(one.counts) for name, one in snapshot.histograms.items()},
            "events": happened[-5_000:],
        }


def main() -> None:
    bulk, compiled = Watched("bulk"), Watched("compiled")
    report: dict[str, Any] = {"alone": compile_store(compiled.observer, {})}
    importlib.import_module("numba")  # as in an engine core's own process
    report["switched_off"] = compile_store(compiled.observer, {"KVATLAS_VLLM_COMPILED": "0"})
    report["compiled"] = compile_store(compiled.observer, {})
    for _ in range(STEPS):
        bulk.step()
        compiled.step()
    one, other = bulk.told(), compiled.told()
    report["differences"] = [name for name in one if one[name] != other[name]]
    report["wrong"] = [bulk.wrong, compiled.wrong]
    report["counters"] = other["counters"]
    report["faults"] = [*bulk.faults, *compiled.faults, bulk.observer.reason, compiled.observer.reason]
    before = compiled.observer.columns["state"].copy()
    compiled.observer.freed([5, BLOCKS])
    compiled.observer.step_ended(1, 0)
    report["outside"] = compiled.observer.reason
    report["untouched"] = bool((compiled.observer.columns["state"] == before).all())
    for watched in (bulk, compiled):
        watched.observer.close()
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
