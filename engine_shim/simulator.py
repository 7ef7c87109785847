"""A fixed service model that replays a trace against bare block pools, to compare allocation policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engine_shim.errors import PoolExhausted, SettingsError
from engine_shim.observer import NullObserver
from engine_shim.pool.block_pool import MAX_POOL_BLOCKS, BlockPool
from engine_shim.pool.policies import POLICIES
from engine_shim.runs import count_runs, find_runs
from engine_shim.workload import TraceRequest, Workload, request_block_hashes

STEP_SECONDS = 0.5
DECODE_TOKENS_PER_STEP = 15  # 30 tokens a second and sequence
DEFAULT_BLOCKS = 60_000
DEFAULT_BLOCK_TOKENS = 16
DEFAULT_HEADROOM = 0.10
DEFAULT_MAX_SEQUENCES = 256
SCHEMA = "kvatlas.simulate/v1"


@dataclass(frozen=True, slots=True)
class FragmentationQuantiles:
    """F = 1 - largest allocatable run / allocatable blocks, over the steps where it is defined; None without any."""

    p10: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one policy did with one trace. Shares are 0 to 1; a mean or rate is None where nothing was counted."""

    fragmentation_rate: FragmentationQuantiles  # from the first arrival to the last end
    settled_fragmentation_rate: FragmentationQuantiles  # the same without the pool's first filling and last draining:
    # from a fifth of the way to the last arrival, up to it
    undefined_share: float | None  # of the sampled steps: no block was allocatable
    live_share_mean: float | None  # referenced blocks of all, over the sampled steps
    prefix_query_tokens: int  # prompt tokens of admitted requests; readmissions are not counted again
    prefix_hit_tokens: int
    preemptions: int
    evictions: int  # blocks that lost a cached prefix
    allocated_blocks: int
    copies_per_allocated_block: float | None
    descriptors_per_block: float | None  # contiguous runs per newly allocated block of a prompt; 1 is the worst
    steps: int


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One trace under several policies, with what it was run with."""

    trace: str
    requests: int  # all of the trace's, the rejected among them
    rejected_requests: int  # could not fit even into an empty pool
    skipped_rows: int  # failed requests in the trace
    blocks: int
    block_tokens: int
    headroom: float
    max_sequences: int
    prefix_cache: bool
    policies: Mapping[str, PolicyResult]

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values under the schema `kvatlas.simulate/v1`."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "policies"}
        return {
            "schema": SCHEMA,
            **fields,
            "policies": {name: asdict(result) for name, result in self.policies.items()},
        }


def simulate(
    workload: Workload,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    blocks: int = DEFAULT_BLOCKS,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    headroom: float = DEFAULT_HEADROOM,
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
    prefix_cache: bool = True,
) -> SimulationReport:
    """Replay the workload once for each policy, each time on a fresh pool. Deterministic.

    Every 0.5 s, in this order: waiting requests are admitted first come, first served, their prompts at once; then
    each running sequence decodes up to 15 tokens and, when finished, releases its table from the end; where the pool
    is exhausted the sequence admitted last is preempted (its blocks are released, it starts again with what it had).
    F is sampled after that, from the first arrival to the last end.
    SettingsError on values that make no sense.
    """
    if not 1 <= blocks <= MAX_POOL_BLOCKS:
        raise SettingsError(f"blocks={blocks}: the simulated pool has 1 to {MAX_POOL_BLOCKS:,} blocks")
    if max_sequences < 1:
        raise SettingsError(f"max_sequences={max_sequences}: at least one sequence must be able to run")
    if not policies:
        raise SettingsError(f"no policy to simulate; choose from {', '.join(POLICIES)}")
    results: dict[str, PolicyResult] = {}
    rejected = 0
    for policy in policies:
        meter = Meter(blocks)
        pool = BlockPool(
            blocks,
            policy=policy,
            block_tokens=block_tokens,
            headroom=headroom,
            prefix_cache=prefix_cache,
            observer=meter,
        )
        accepted = [request for request in workload.requests if _fits(request, pool)]
        rejected = len(workload.requests) - len(accepted)
        results[policy] = _Service(pool, meter, accepted, max_sequences).run()
    return SimulationReport(
        trace=workload.name,
        requests=len(workload.requests),
        rejected_requests=rejected,
        skipped_rows=workload.skipped,
        blocks=blocks,
        block_tokens=block_tokens,
        headroom=headroom,
        max_sequences=max_sequences,
        prefix_cache=prefix_cache,
        policies=results,
    )


def _fits(request: TraceRequest, pool: BlockPool) -> bool:
    """Whether an empty pool could admit the prompt beside the headroom, and then hold the whole sequence."""
    prompt_blocks = -(-request.prompt_tokens // pool.block_tokens)
    all_blocks = -(-(request.prompt_tokens + request.output_tokens) // pool.block_tokens)
    return prompt_blocks <= pool.usable_blocks - pool.headroom_blocks and all_blocks <= pool.usable_blocks


class Meter(NullObserver):
    """Follows which blocks are allocatable, and counts what the pool alone knows."""

    def __init__(self, blocks: int) -> None:
        self.allocatable = np.ones(blocks, dtype=np.bool_)
        self.changed = True
        self.allocated_blocks = self.evictions = self.copies = 0

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self.allocated_blocks += len(blocks)
        self._mark(blocks, False)

    def reused(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self._mark(blocks, False)

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._mark(blocks, True)

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._mark(blocks, True)

    def evicted(self, blocks: Sequence[int]) -> None:
        self.evictions += len(blocks)

    def moved(self, sources: Sequence[int], destinations: Sequence[int], *, live: bool) -> None:
        self.copies += len(sources)

    def _mark(self, blocks: Sequence[int], allocatable: bool) -> None:
        if len(blocks) == 1:
            self.allocatable[blocks[0]] = allocatable
        else:
            self.allocatable[np.array(blocks, dtype=np.int64)] = allocatable
        self.changed = True

    def fragmentation_rate(self) -> float | None:
        """F over free and cached blocks; None where there are none."""
        _, lengths = find_runs(self.allocatable)
        if lengths.size == 0:
            return None
        return 1.0 - int(lengths.max()) / int(lengths.sum())


@dataclass(slots=True)
class _Sequence:
    request: TraceRequest
    hashes: list[int]  # of its full blocks, prompt and answer
    generated: int = 0
    admissions: int = 0
    table: list[int] = field(default_factory=list)
    registered: int = 0  # leading blocks of the table that have their hash


class _Service:
    def __init__(self, pool: BlockPool, meter: Meter, requests: Sequence[TraceRequest], max_sequences: int) -> None:
        self._pool = pool
        self._meter = meter
        self._arrivals = deque(requests)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in order of admission
        self._max_sequences = max_sequences
        self._query_tokens = self._hit_tokens = self._preemptions = 0
        self._prompt_blocks = self._prompt_runs = 0

    def run(self) -> PolicyResult:
        rates = Steps()
        used_steps = 0  # sum over the steps of the blocks in use
        start = self._arrivals[0].arrival_s if self._arrivals else 0.0
        last_arrival = self._arrivals[-1].arrival_s if self._arrivals else 0.0
        rate: float | None = None
        while self._arrivals or self._waiting or self._running:
            if not self._waiting and not self._running and rates.count:
                # Nothing happens before the next arrival: every step until then is as the last one was.
                idle = _step_of(self._arrivals[0].arrival_s, start) - rates.count
                if idle > 0:
                    rates.add(rate, idle)
                    used_steps += idle * self._pool.num_used
            now = start + rates.count * STEP_SECONDS
            while self._arrivals and self._arrivals[0].arrival_s <= now:
                request = self._arrivals.popleft()
                self._waiting.append(_Sequence(request, request_block_hashes(request, self._pool.block_tokens)))
            self._admit()
            self._decode()
            if self._meter.changed:
                rate = self._meter.fragmentation_rate()
                self._meter.changed = False
            rates.add(rate)
            used_steps += self._pool.num_used
        arriving_steps = int((last_arrival - start) / STEP_SECONDS) + 1
        return self._result(rates, used_steps, arriving_steps)

    def _decode(self) -> None:
        """One step for every running sequence."""
        block_tokens = self._pool.block_tokens
        position = 0
        while position < len(self._running):  # the list shrinks where a sequence ends, and from its end on preemption
            sequence = self._running[position]
            request = sequence.request
            generated = min(sequence.generated + DECODE_TOKENS_PER_STEP, request.output_tokens)
            missing = -(-(request.prompt_tokens + generated) // block_tokens) - len(sequence.table)
            if missing > 0 and not self._grow(sequence, missing):
                return
            sequence.generated = generated
            self._register(sequence)
            if generated == request.output_tokens:
                del self._running[position]
                self._pool.release(reversed(sequence.table))
            else:
                position += 1

    def _grow(self, sequence: _Sequence, missing: int) -> bool:
        """Allocate for a running sequence, preempting from the last admitted on; False where it was itself the last."""
        while True:
            try:
                sequence.table += self._pool.allocate(missing).blocks
            except PoolExhausted:
                victim = self._running.pop()
                self._pool.release(reversed(victim.table))
                victim.table = []
                victim.registered = 0
                self._waiting.appendleft(victim)
                self._preemptions += 1
                if victim is sequence:
                    return False
            else:
                return True

    def _admit(self) -> None:
        pool = self._pool
        while self._waiting and len(self._running) < self._max_sequences:
            sequence = self._waiting[0]
            tokens = sequence.request.prompt_tokens + sequence.generated
            # The last token is always computed, as engines do: its logits are needed.
            hit = pool.find_prefix(sequence.hashes[: (tokens - 1) // pool.block_tokens])
            missing = -(-tokens // pool.block_tokens) - len(hit)
            # A preempted sequence that needs the headroom gets it once it is alone: everything comes to its end.
            new = not (sequence.admissions and not self._running)
            if not pool.can_allocate(missing + pool.num_unreferenced(hit), new_sequence=new):
                return
            self._waiting.popleft()
            hit = pool.pull(hit).blocks
            pool.acquire(hit)
            fresh = pool.allocate(missing, position=len(hit), new_sequence=new).blocks
            sequence.table = hit + fresh
            sequence.registered = len(hit)
            self._register(sequence)
            if not sequence.admissions:
                self._query_tokens += tokens
                self._hit_tokens += len(hit) * pool.block_tokens
                self._prompt_blocks += len(fresh)
                self._prompt_runs += count_runs(fresh)
            sequence.admissions += 1
            self._running.append(sequence)

    def _register(self, sequence: _Sequence) -> None:
        full = (sequence.request.prompt_tokens + sequence.generated) // self._pool.block_tokens
        if full > sequence.registered:
            news = slice(sequence.registered, full)
            self._pool.register_blocks(sequence.table[news], sequence.hashes[news])
            sequence.registered = full

    def _result(self, rates: Steps, used_steps: int, arriving_steps: int) -> PolicyResult:
        meter = self._meter
        return PolicyResult(
            fragmentation_rate=rates.quantiles(0, rates.count),
            settled_fragmentation_rate=rates.quantiles(arriving_steps // 5, arriving_steps),
            undefined_share=_ratio(rates.undefined, rates.count),
            live_share_mean=_ratio(used_steps, rates.count * self._pool.usable_blocks),
            prefix_query_tokens=self._query_tokens if self._pool.prefix_cache else 0,
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            evictions=meter.evictions,
            allocated_blocks=meter.allocated_blocks,
            copies_per_allocated_block=_ratio(meter.copies, meter.allocated_blocks),
            descriptors_per_block=_ratio(self._prompt_runs, self._prompt_blocks),
            steps=rates.count,
        )


def _step_of(arrival_s: float, start: float) -> int:
    """The first step at or after an arrival, by the comparison that the steps themselves make."""
    step = max(0, int((arrival_s - start) / STEP_SECONDS) - 1)
    while start + step * STEP_SECONDS < arrival_s:
        step += 1
    return step


class Steps:
    """F of every step, kept as runs of equal steps, so that a year without a request takes no more room than one."""

    def __init__(self) -> None:
        self.count = self.undefined = 0
        self._rates: list[float] = []  # NaN: no block was allocatable
        self._ends: list[int] = []  # steps up to the end of each run

    def add(self, rate: float | None, steps: int = 1) -> None:
        self.count += steps
        if rate is None:
            self.undefined += steps
        self._rates.append(np.nan if rate is None else rate)
        self._ends.append(self.count)

    def quantiles(self, first: int, stop: int) -> FragmentationQuantiles:
        """Over steps first to before stop where F is defined; by linear interpolation, as numpy.percentile's."""
        ends = np.clip(np.array(self._ends, np.int64), first, stop)
        counts = np.diff(ends, prepend=first)
        rates = np.array(self._rates)
        keep = (counts > 0) & ~np.isnan(rates)
        if not keep.any():
            return FragmentationQuantiles(None, None, None, None, None)
        rates, counts = rates[keep], counts[keep]
        order = np.argsort(rates, kind="stable")
        rates, upto = rates[order], np.cumsum(counts[order])
        places = (int(upto[-1]) - 1) * (np.array((10, 50, 90, 95, 100)) / 100)
        below = np.floor(places).astype(np.int64)
        low = rates[np.searchsorted(upto, below, side="right")]
        high = rates[np.searchsorted(upto, np.minimum(below + 1, upto[-1] - 1), side="right")]
        share, width = places - below, high - low
        values = np.where(share < 0.5, low + width * share, high - width * (1 - share))
        return FragmentationQuantiles(*(float(value) for value in values))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
