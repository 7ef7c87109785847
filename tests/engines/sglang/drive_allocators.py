"""Serves a recorded trace over SGLang's real allocators and radix cache and compares each map with them at every step.

    python drive_allocators.py WORK_FOLDER

Prints one line, `RESULT {...}`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from real_sglang import Driver, make  # type: ignore[import-not-found]

from engine_shim import MapReader
from engine_shim.adapters import sglang as adapter
from engine_shim.adapters.sglang.slot_pool import SlotPool

STEPS = 150
SIZE = 6_000
FREE, CACHED, USED, RESERVED = 0, 1, 2, 4


class Lines(logging.Handler):
    """What our logger said since it was asked."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logging.getLogger("kvatlas.shim").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return [line for line in lines if "not in memory" not in line]


LOG = Lines()


def truth(tree: Any) -> list[np.ndarray]:
    """States of every page of every pool, by SGLang's own objects: the free list, the tree, and what is in neither."""
    allocator = tree.token_to_kv_pool_allocator
    parts = [getattr(allocator, name, None) for name in ("full_attn_allocator", "swa_attn_allocator")]
    pools: list[Any] = [allocator] if parts[0] is None else parts
    found = []
    for number, pool in enumerate(pools):
        page = int(pool.page_size)
        states = np.full(int(pool.size) // page + 1, USED, np.uint8)
        stack = [*tree.root_node.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.lock_ref == 0:
                slots = node.value if number == 0 else allocator.full_to_swa_index_mapping[node.value]
                states[slots.numpy() // page] = CACHED
        states[pool.get_all_free_pages().numpy()] = FREE
        states[0] = RESERVED
        found.append(states)
    return found


def follow(kind: str, *, late: int = 0, attach_after: int = 0) -> dict[str, Any]:
    """`late`: slot numbers reach the host this many steps after they were asked for, as from a device."""
    tree = make(kind, SIZE)
    driver = Driver(tree, prompt_share=0.06, concurrent=6)
    for _ in range(attach_after):
        driver.step()
    step = 0

    def copier(slots: Any) -> tuple[Any, Any]:
        due = step + late
        return slots.clone(), lambda: step >= due

    one = adapter.attach(tree, copier=copier if late else None)
    assert one is not None
    readers = [MapReader(pool.map.path) for pool in one.pools]
    wanted: deque[list[np.ndarray]] = deque()
    differences = compared = 0
    seen = {FREE: 0, CACHED: 0, USED: 0}
    for step in range(STEPS):  # noqa: B007 - the copier reads it
        driver.step()
        one.step(len(driver.running), 0)
        wanted.append(truth(tree))
        if len(wanted) > late:
            for reader, states in zip(readers, wanted.popleft(), strict=True):
                snapshot = reader.read()
                differences += int(np.count_nonzero(snapshot.states != states))
                compared += len(states)
                for state in seen:
                    seen[state] = max(seen[state], int(snapshot.state_counts[state]))
    protected, evictable = int(tree.protected_size()), int(tree.evictable_size())
    driver.drain()
    for _ in range(late + 1):
        step += 1
        one.step(0, 0)
    snapshots = [reader.read() for reader in readers]
    at_rest = [int(snapshot.state_counts[USED]) for snapshot in snapshots]
    cached = int(snapshots[0].state_counts[CACHED]) * int(tree.page_size)
    report = {
        "differences": differences,
        "compared": compared,
        "most": list(seen.values()),
        "protected_and_evictable_before_rest": [protected, evictable],
        "used_at_rest": at_rest,
        "cached_is_evictable": cached == int(tree.evictable_size()),
        "served": driver.served,
        "hits": driver.hits,
        "evicted": driver.evicted,
        "pools": [snapshot.identity.pool for snapshot in snapshots],
        "identity": [snapshots[0].identity.kind, snapshots[0].identity.version, snapshots[0].identity.runner],
        "block_tokens": snapshots[0].identity.block_tokens,
        "counters": dict(snapshots[0].counters),
        "reason": one.reason,
    }
    one.stop("the next one begins")
    return report | {"log": LOG.take(), "hooks_left": len(one.hooks)}


def slots_of(tree: Any, steps: int) -> list[int]:
    """Which slots a run hands out, to be compared."""
    driver = Driver(tree, prompt_share=0.06, concurrent=6)
    for _ in range(steps):
        driver.step()
    return [int(slot) for one in driver.running for slot in one["slots"]]


def faults() -> dict[str, Any]:
    """Ours fails; SGLang hands out the same slots."""
    expected = slots_of(make("token", SIZE), 60)
    reports: dict[str, Any] = {}
    stock = SlotPool.note

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    tree = make("token", SIZE)
    one = adapter.attach(tree)
    SlotPool.note = broken  # type: ignore[method-assign]
    try:
        reports["raising"] = {"same": slots_of(tree, 60) == expected}
    finally:
        SlotPool.note = stock  # type: ignore[method-assign]
    assert one is not None
    reports["raising"] |= {"hooks_left": len(one.hooks), "reason": one.reason, "log": LOG.take()}

    tree = make("token", SIZE)
    one = adapter.attach(tree)
    assert one is not None
    adapter.turn_off("the operator said so")
    one.step(0, 0)
    reports["turned off"] = {"same": slots_of(tree, 60) == expected, "hooks_left": len(one.hooks), "log": LOG.take()}

    tree = make("token", SIZE)
    tree.inc_lock_ref = lambda renamed: None
    reports["unknown shape"] = {"attached": adapter.attach(tree) is not None, "log": LOG.take()}
    reports["disabled"] = {"attached": adapter.attach(make("token", SIZE), {"KVATLAS_DISABLE": "1"}) is not None}
    return reports


def large() -> dict[str, Any]:
    """A pool of a million one-token slots."""
    tree = make("token", 1_000_000)
    one = adapter.attach(tree)
    assert one is not None
    path = one.pools[0].map.path
    driver = Driver(tree, prompt_share=0.5, concurrent=16)
    for _ in range(20):
        driver.step()
        one.step(len(driver.running), 0)
    snapshot = MapReader(path).read()
    same = bool((snapshot.states == truth(tree)[0]).all())
    size = os.stat(path).st_size
    one.stop("done")
    return {"same": same, "file_bytes": size, "used": int(snapshot.state_counts[USED])}


def registered() -> dict[str, Any]:
    """Through SGLang's own way of finding plugins, as its processes do; without the variable nothing is hooked."""
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins, load_plugins_by_group

    load_plugins()
    found = "kvatlas" in load_plugins_by_group(GENERAL_PLUGINS_GROUP)
    idle = len(adapter.attachments())
    make("token", SIZE)
    unasked = len(adapter.attachments())
    os.environ["KVATLAS_SGLANG"] = "1"
    adapter.register()
    tree = make("token", SIZE)
    asked = len(adapter.attachments())
    for one in adapter.attachments():
        one.stop("done")
    return {"idle": idle, "unasked": unasked, "asked": asked, "found": found, "page": tree.page_size, "log": LOG.take()}


if __name__ == "__main__":
    results = {
        "token": follow("token"),
        "paged": follow("paged"),
        "sliding": follow("sliding"),
        "late": follow("token", late=3),
        "in use already": follow("paged", attach_after=30),
        "faults": faults(),
        "large": large(),
        "registered": registered(),
    }
    print("RESULT " + json.dumps(results), flush=True)
