"""Runs what was recorded once more, under other policies and in other pools: the same allocations, hits and releases.

What is exact and what is inferred stands in docs/recording.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agent.recording.chunks import ChunkKind, RecordingError
from agent.recording.contents import NO_FACTS
from agent.recording.reading import Recording
from agent.recording.replica import Replica
from agent.recording.retold import Passed, Release, Retelling, Seed, Take
from agent.sampling.model import NANOSECONDS
from engine_shim.errors import PoolExhausted, SettingsError
from engine_shim.layout import BlockState
from engine_shim.pool.block_pool import MAX_POOL_BLOCKS, BlockPool
from engine_shim.pool.policies import POLICIES
from engine_shim.runs import count_runs
from engine_shim.simulator import STEP_SECONDS, Meter, PolicyResult, SimulationReport, Steps

_STEP_NS = round(STEP_SECONDS * NANOSECONDS)
_ANYBODY = 0  # holder of references whose holder is not recorded


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recorded engine itself counted between the first and the last sample."""

    seconds: float
    policy: str
    prefix_query_tokens: int
    prefix_hit_tokens: int
    evictions: int
    allocated_blocks: int
    preemptions: int


def recorded_figures(recording: Recording) -> Recorded:
    """From the engine's own counters, exact. Raises RecordingError."""
    cursor = recording.cursor()
    cursor.seek(recording.start_ns)
    first = cursor.state().snapshot
    cursor.seek(recording.end_ns)
    last = cursor.state().snapshot

    def counted(name: str) -> int:
        return max(0, last.counters.get(name, 0) - first.counters.get(name, 0))

    return Recorded(
        seconds=(recording.end_ns - recording.start_ns) / NANOSECONDS,
        policy=last.identity.policy,
        prefix_query_tokens=counted("prefix_query_tokens"),
        prefix_hit_tokens=counted("prefix_hit_tokens"),
        evictions=counted("blocks_evicted"),
        allocated_blocks=counted("blocks_allocated"),
        preemptions=counted("preemptions"),
    )


def most_used_blocks(recording: Recording) -> int:
    """The most blocks that were in use, pinned or reserved at a sample. Raises RecordingError."""
    replica = Replica(recording.header.identity.total_blocks, recording.header.columns, 0)
    facts, most = NO_FACTS, 0
    for place in recording.places():
        if place.kind in (ChunkKind.SAMPLE, ChunkKind.BASE):
            facts = recording.sample_at(place, facts, replica.columns)
            counts = facts.values["state_counts"]
            most = max(most, sum(counts) - sum(counts[: BlockState.USED]))
    return most


def rerun(
    recording: Recording,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    blocks: int | None = None,
    prefix_cache: bool = True,
) -> SimulationReport:
    """Run the recorded allocations once for each policy, in a pool of the recorded size or of another one.

    SettingsError on values that make no sense, RecordingError where the recording is damaged or holds no events.
    """
    identity = recording.header.identity
    size = identity.total_blocks if blocks is None else blocks
    if not 1 <= size <= MAX_POOL_BLOCKS:
        raise SettingsError(f"blocks={size}: the simulated pool has 1 to {MAX_POOL_BLOCKS:,} blocks")
    if not policies:
        raise SettingsError(f"no policy to simulate; choose from {', '.join(POLICIES)}")
    if not recording.events:
        raise RecordingError(
            f"{recording.path}: holds no events, so there is nothing to run once more. An engine that stands still "
            "makes none, and SGLang's maps publish none: record while requests are served, or simulate a trace"
        )
    retelling = Retelling(recording)
    for _ in retelling.deeds():  # to know beforehand which contents will be looked for again
        pass
    queried = recorded_figures(recording).prefix_query_tokens
    results: dict[str, PolicyResult] = {}
    runs: list[_Run] = []
    for policy in policies:
        run = _Run(policy, size, identity.block_tokens, prefix_cache, retelling.findable)
        for deed in retelling.deeds():
            match deed:
                case Take():
                    run.take(deed)
                case Release():
                    run.release(deed)
                case Passed():
                    run.come_to(deed.time_ns)
                case Seed():
                    run.seed(deed)
        results[policy] = run.result(queried)
        runs.append(run)
    return SimulationReport(
        trace=recording.path.name,
        requests=runs[0].requests,
        rejected_requests=0,
        skipped_rows=0,
        blocks=size,
        block_tokens=identity.block_tokens,
        headroom=identity.headroom_blocks / max(1, identity.total_blocks),
        max_sequences=runs[0].most_at_once,
        prefix_cache=prefix_cache,
        policies=results,
    )


@dataclass(slots=True)
class _Totals:
    """Of the pools before the present one: there is more than one only where the recording has gaps."""

    allocated: int = 0
    evictions: int = 0
    copies: int = 0


@dataclass(slots=True)
class _Run:
    """One policy's pool, and who holds which contents where in it."""

    policy: str
    blocks: int
    block_tokens: int
    prefix_cache: bool
    findable: bytearray
    requests: int = 0
    most_at_once: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    prompt_blocks: int = 0
    prompt_runs: int = 0
    used_steps: int = 0
    usable: int = 0
    _pool: BlockPool = field(init=False)
    _meter: Meter = field(init=False)
    _steps: Steps = field(default_factory=Steps)
    _rate: float | None = None
    _start_ns: int | None = None
    _last_arrival_ns: int = 0
    _seeded: _Totals = field(default_factory=_Totals)  # that the seeding of the present pool took
    _before: _Totals = field(default_factory=_Totals)
    _tables: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # blocks by owner and contents
    _holders: dict[int, list[int]] = field(default_factory=dict)  # owners by contents
    _dropped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._make_pool(())

    def _make_pool(self, reserved: Sequence[int]) -> None:
        self._meter = Meter(self.blocks)
        self._pool = BlockPool(
            self.blocks,
            policy=self.policy,
            block_tokens=self.block_tokens,
            headroom=0.0,  # whom it kept waiting, waited in the recording
            prefix_cache=self.prefix_cache,
            reserved=reserved,
            observer=self._meter,
        )
        self._meter.allocatable[list(reserved)] = False
        self.usable = self._pool.usable_blocks

    # Time

    def come_to(self, time_ns: int) -> None:
        """Sample F at the end of each step up to a time."""
        if self._start_ns is None:
            return
        due = (time_ns - self._start_ns) // _STEP_NS - self._steps.count
        if due <= 0:
            return
        if self._meter.changed:
            self._rate = self._meter.fragmentation_rate()
            self._meter.changed = False
        self._steps.add(self._rate, due)
        self.used_steps += due * self._pool.num_used

    # What happened

    def seed(self, seed: Seed) -> None:
        """Begin with the pool as it was: at the same places, where it is as large."""
        if self._start_ns is None:
            self._start_ns = self._last_arrival_ns = seed.time_ns
        self._before.allocated += self._meter.allocated_blocks - self._seeded.allocated
        self._before.evictions += self._meter.evictions - self._seeded.evictions
        self._before.copies += self._meter.copies - self._seeded.copies
        self._tables.clear()
        self._holders.clear()
        self._dropped.clear()
        if len(seed.state) == self.blocks:
            self._seed_in_place(seed)
        else:
            self._seed_anew(seed)
        meter = self._meter
        self._seeded = _Totals(meter.allocated_blocks, meter.evictions, meter.copies)
        self.requests += sum(owner != _ANYBODY for owner in self._tables)
        self.most_at_once = max(self.most_at_once, len(self._tables))

    def _seed_in_place(self, seed: Seed) -> None:
        self._make_pool(np.flatnonzero(seed.state == BlockState.RESERVED).tolist())
        self._pool.allocate(self._pool.usable_blocks)  # then each block is in hand, and can be let go in any order
        free = seed.state == BlockState.FREE
        cached = seed.state == BlockState.CACHED
        held = np.flatnonzero(~free & ~cached & (seed.state != BlockState.RESERVED))
        findable = [block for block in held.tolist() if self.findable[seed.first + block]]
        by_age = np.argsort(-seed.age_ms.astype(np.int64), kind="stable")  # the oldest first
        kept = by_age[cached[by_age]].tolist()
        self._register(kept + findable, [seed.first + block for block in kept + findable])
        # Of the free ones the last that was freed is taken first, and what was never used by its address.
        latest_first = np.argsort(seed.age_ms, kind="stable")
        self._pool.release(latest_first[free[latest_first]].tolist())
        self._pool.release(kept)
        for block in held.tolist():
            self._hold(int(seed.owner[block]), seed.first + block, block)
            for _ in range(int(seed.references[block]) - 1):
                self._pool.fork([block])
                self._hold(_ANYBODY, seed.first + block, block)

    def _seed_anew(self, seed: Seed) -> None:
        self._make_pool(())
        held = np.flatnonzero((seed.state == BlockState.USED) | (seed.state == BlockState.PINNED)).tolist()
        by_age = np.argsort(-seed.age_ms.astype(np.int64), kind="stable")  # the oldest first
        for block in by_age[seed.state[by_age] == BlockState.CACHED].tolist():
            placed = self._pool.allocate(1).blocks
            self._register(placed, [seed.first + block])
            self._pool.release(placed)
        for block in held:
            number, owner = seed.first + block, int(seed.owner[block])
            if not self._give(owner, [number]):
                continue
            for _ in range(int(seed.references[block]) - 1):
                at = self._tables[owner][number][0]
                self._pool.fork([at])
                self._hold(_ANYBODY, number, at)

    def take(self, deed: Take) -> None:
        self.come_to(deed.time_ns)
        owner = deed.owner
        if owner in self._dropped:
            if deed.position and not deed.hits:
                return
            self._dropped.discard(owner)  # its number was given to another sequence
        arrives = owner not in self._tables
        found = self._pool.find_prefix(deed.hits)
        found = self._pool.pull(found).blocks
        self._pool.acquire(found)
        for number, block in zip(deed.hits, found, strict=False):
            self._hold(owner, number, block)
        blocks = self._give(owner, deed.hits[len(found) :] + deed.fresh)
        self.hit_tokens += len(found) * self.block_tokens
        if arrives and owner != _ANYBODY:
            self.requests += 1
            self._last_arrival_ns = deed.time_ns
            self.asked_tokens += (len(deed.hits) + len(deed.fresh)) * self.block_tokens
            self.prompt_blocks += len(blocks)
            self.prompt_runs += count_runs(blocks)
            self.most_at_once = max(self.most_at_once, len(self._tables))

    def _give(self, owner: int, contents: Sequence[int]) -> list[int]:
        """New blocks for these contents; where there are too few, the sequence is given up."""
        if not contents:
            return []
        try:
            blocks = self._pool.allocate(len(contents)).blocks
        except PoolExhausted:
            self.preemptions += 1
            self._dropped.add(owner)
            for number in list(self._tables.get(owner, ())):
                while self._let_go(owner, number) is not None:
                    pass
            return []
        findable = [(block, number) for block, number in zip(blocks, contents, strict=True) if self.findable[number]]
        self._register([block for block, _ in findable], [number for _, number in findable])
        for block, number in zip(blocks, contents, strict=True):
            self._hold(owner, number, block)
        return blocks

    def release(self, deed: Release) -> None:
        self.come_to(deed.time_ns)
        blocks = [block for number in deed.contents if (block := self._forget(deed.owner, number)) is not None]
        if blocks:
            self._pool.release(blocks)

    # Who holds what

    def _register(self, blocks: list[int], contents: list[int]) -> None:
        if blocks:
            self._pool.register_blocks(blocks, contents)

    def _hold(self, owner: int, number: int, block: int) -> None:
        self._tables.setdefault(owner, {}).setdefault(number, []).append(block)
        self._holders.setdefault(number, []).append(owner)

    def _let_go(self, owner: int, number: int) -> int | None:
        block = self._forget(owner, number, alone=True)
        if block is not None:
            self._pool.release([block])
        return block

    def _forget(self, owner: int, number: int, *, alone: bool = False) -> int | None:
        """Take a hold off; of whoever's there is where that owner has none. None where nobody has one."""
        holders = self._holders.get(number)
        if not holders:
            return None
        if owner not in holders:
            if alone or owner in self._dropped:
                return None
            owner = _ANYBODY if _ANYBODY in holders else holders[0]
        holders.remove(owner)
        if not holders:
            del self._holders[number]
        table = self._tables[owner]
        block = table[number].pop()
        if not table[number]:
            del table[number]
            if not table:
                del self._tables[owner]
        return block

    # What came of it

    def result(self, queried_tokens: int) -> PolicyResult:
        """`queried_tokens` as the engine counted them, 0 where it did not."""
        meter, steps, before = self._meter, self._steps, self._before
        allocated = before.allocated + meter.allocated_blocks - self._seeded.allocated
        copies = before.copies + meter.copies - self._seeded.copies
        arriving = int((self._last_arrival_ns - (self._start_ns or 0)) // _STEP_NS) + 1
        return PolicyResult(
            fragmentation_rate=steps.quantiles(0, steps.count),
            settled_fragmentation_rate=steps.quantiles(arriving // 5, arriving),
            undefined_share=_ratio(steps.undefined, steps.count),
            live_share_mean=_ratio(self.used_steps, steps.count * self.usable),
            prefix_query_tokens=(queried_tokens or self.asked_tokens) if self.prefix_cache else 0,
            prefix_hit_tokens=self.hit_tokens,
            preemptions=self.preemptions,
            evictions=before.evictions + meter.evictions - self._seeded.evictions,
            allocated_blocks=allocated,
            copies_per_allocated_block=_ratio(copies, allocated),
            descriptors_per_block=_ratio(self.prompt_runs, self.prompt_blocks),
            steps=steps.count,
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
