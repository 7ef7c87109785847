"""The engine: a trace's requests in, steps over paged KV memory, and a report of what was served at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.compaction.compactor import Compactor
from engine_shim.compaction.run import RunSettings
from engine_shim.compaction.time_share import MAX_TIME_SHARE
from engine_shim.control.mailbox import ControlMailbox
from engine_shim.control.server import ControlServer
from engine_shim.errors import SettingsError
from engine_shim.observer import NO_OBSERVER, PoolObserver
from engine_shim.pool.block_pool import BlockPool
from engine_shim.reference.clock import Clock, RealClock
from engine_shim.reference.content import PatternContent, Runner, Work
from engine_shim.reference.control_desk import ControlDesk
from engine_shim.reference.elastic import ElasticConsumer, ElasticPages
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.monitor import PoolMonitor
from engine_shim.reference.mover import ReferenceMover
from engine_shim.reference.resize import PoolSize
from engine_shim.reference.scheduler import Limits, Scheduler
from engine_shim.reference.sequence import Sequence
from engine_shim.reference.transfer import Transfers, TransferTotals

log = logging.getLogger(__name__)

RELOCATION_BYTES = 64 << 20
IDLE_STEP_SECONDS = 0.25  # an idle engine still ends a step this often, so that its map stays fresh


LEAST_PACE = 1e-6


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a trace is served. `speed` scales arrivals, decoding and transfers alike."""

    speed: float = 1.0
    tokens_per_second: float = 30.0  # of one sequence; 0 where only the hardware is the limit

    def __post_init__(self) -> None:
        # Below the least, the time of one step is no number that a clock can wait for.
        if not LEAST_PACE <= self.speed < math.inf:
            raise SettingsError(f"speed={self.speed} must be {LEAST_PACE:g} or more, and finite; 1 is real time")
        if self.tokens_per_second != 0 and not LEAST_PACE <= self.tokens_per_second < math.inf:
            wanted = f"must be 0, which is unbounded, or {LEAST_PACE:g} or more"
            raise SettingsError(f"tokens_per_second={self.tokens_per_second} {wanted}")

    @property
    def step_seconds(self) -> float:
        """Time of one step, in which each running sequence gets at most one token; 0 where unbounded."""
        return 1.0 / (self.tokens_per_second * self.speed) if self.tokens_per_second else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine has done since it started. Counts of tokens are tokens, of blocks blocks."""

    served_requests: int
    rejected_requests: int
    running: int
    waiting: int
    steps: int
    computed_tokens: int  # keys and values written
    output_tokens: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    copied_blocks: int
    relocation_copies: int  # that the policy asked for; chains of one step are copied once
    copy_failures: int  # steps whose copies broke off
    verified_tokens: int
    mismatched_blocks: int
    seconds: float
    tokens_per_second: float  # computed tokens over `seconds`
    fragmentation_p50: float | None  # over allocatable blocks, one sample a second of trace time; None: never any free
    live_share_p50: float | None
    live_share_max: float | None
    states_seen: tuple[str, ...]
    transfers: TransferTotals


class Engine:
    """One pool, its KV memory, and the sequences that use it. One thread calls; `clock.wake` may come from others."""

    def __init__(
        self,
        pool: BlockPool,
        cache: KVCache,
        runner: Runner,
        *,
        limits: Limits | None = None,
        observer: PoolObserver = NO_OBSERVER,
        clock: Clock | None = None,
        transfers: Transfers | None = None,
        transfer_every: int = 1,
        verify_every: int = 0,
        relocation_bytes: int = RELOCATION_BYTES,
        compaction: RunSettings | None = None,
        moving_time_share: float = MAX_TIME_SHARE,
        elastic: bool = False,
    ) -> None:
        """`transfer_every`: each n-th finished sequence is sent. `verify_every`: steps between checks of contents,
        which pattern mode alone can do. `relocation_bytes`: what the pool's policy may have copied in one step.
        `compaction`: budgets of a run. `moving_time_share`: of the time that there is work, for all runs. `elastic`:
        memory that a run has emptied is given back to the host."""
        if relocation_bytes < 0:
            raise SettingsError(f"relocation_bytes={relocation_bytes} must be 0 or more")
        if transfer_every < 1:
            raise SettingsError(f"transfer_every={transfer_every} must be 1 or more")
        self.pool, self.cache, self.runner = pool, cache, runner
        if verify_every:
            self._pattern()
        self.scheduler = Scheduler(
            pool, self._copy, limits=limits, observer=observer, copy_limit=relocation_bytes // cache.block_bytes
        )
        self.monitor = PoolMonitor(pool)
        self._observer = observer
        self._clock = clock or RealClock()
        self._transfers = transfers
        self._transfer_every = transfer_every
        self._verify_every = verify_every
        self._verify_turn = 0
        self.elastic = ElasticPages(cache) if elastic else None
        mover = ReferenceMover(
            pool,
            cache,
            runner,
            lambda: self.scheduler.running,
            before_write=self._take,
            recompute=self.scheduler.recompute,
        )
        self.compaction = Compactor(
            mover,
            pool.num_blocks,
            defaults=compaction,
            consumer=ElasticConsumer(self.elastic, pool, mover.moves) if self.elastic is not None else None,
            max_time_share=moving_time_share,
            wake=self._clock.wake,
        )
        self.size = PoolSize(pool, mover.moves, self.compaction, self._copy, self._sequences, self.scheduler.refusal)
        self.desk = ControlDesk(ControlMailbox(self._clock.wake), pool, self.compaction, set_policy=self.set_policy)
        self._control: ControlServer | None = None
        self._started = self._clock.now()
        self._served = self._rejected = self._steps = 0
        self._computed = False  # in the last step: else nobody waits for the next one
        self._computed_tokens = self._output_tokens = 0
        self._verified_tokens = self._mismatched = 0
        self._branches: dict[str, int] = {}  # samples of a request that are still to finish

    def submit(self, sequence: Sequence) -> bool:
        """Queue a sequence; False, counted and logged, where the pool can never hold it."""
        reason = self.scheduler.refusal(sequence, self.size.usable_blocks)
        if reason is not None:
            self._rejected += 1
            log.info("request %s rejected: %s", sequence.request_id, reason)
            return False
        self.scheduler.add(sequence)
        return True

    def offer_control(self, map_path: Path) -> None:
        """Serve the control socket beside this map; where that fails, a log line says why and the engine goes on."""
        self._control = ControlServer.offer(map_path, self.desk.mailbox)

    def set_policy(self, name: str) -> None:
        """Let the pool go on under `vllm` or `relocating`, between two steps; SettingsError where it cannot."""
        self.pool.set_policy(name)
        if isinstance(self._observer, MapObserver):
            self._observer.set_policy(name)
            self._observer.set_flag(relocating=name == "relocating")

    def step(self) -> bool:
        """Compute one batch, and publish; False where nothing could go on."""
        self._collect_transfers()
        self.desk.serve()
        self.size.step()
        self.compaction.step(idle=not self._computed)
        batch = self.scheduler.schedule()
        self._computed = bool(batch)
        if batch:
            self._take(_written(batch, self.pool.block_tokens))
            self._advance(batch, self.runner.run(batch))
            self._steps += 1
            if self._verify_every and self._steps % self._verify_every == 0:
                self._verify_some()
        self._observer.step_ended(len(self.scheduler.running), len(self.scheduler.waiting))
        return self._computed

    def serve(
        self,
        arrivals: Iterable[tuple[float, Sequence]],
        pace: Pace,
        *,
        stop: Callable[[], bool] = lambda: False,
        until_idle: bool = False,
    ) -> None:
        """Serve sequences as they arrive (trace seconds from now, ascending), until `stop` says so.

        With `until_idle`, also end when all have arrived and are served.
        """
        feed: Iterator[tuple[float, Sequence]] = iter(arrivals)
        upcoming = next(feed, None)
        begin = next_step = self._clock.now()
        while not stop():
            now = self._clock.now()
            trace_now = (now - begin) * pace.speed
            while upcoming is not None and upcoming[0] <= trace_now:
                self.submit(upcoming[1])
                upcoming = next(feed, None)
            worked = self.step()
            self.monitor.sample(trace_now)
            if worked:
                # A step that took too long is not made up for: the next ones keep their distance, as on real hardware.
                next_step = max(next_step + pace.step_seconds, self._clock.now())
                self._clock.wait(next_step - self._clock.now())
                continue
            in_flight = self._transfers.in_flight if self._transfers else 0
            if self.compaction.wants_step or self.size.wants_step:
                continue  # an idle engine is the best time to move blocks
            if until_idle and not (upcoming or self.scheduler.has_work or in_flight or self.compaction.active):
                return
            pause = IDLE_STEP_SECONDS
            if upcoming is not None:
                pause = min(pause, (upcoming[0] - trace_now) / pace.speed)
            self._clock.wait(pause)
            next_step = self._clock.now()

    def verify_all(self) -> list[str]:
        """Compare every computed token and every cached block with what it must hold; returns what differs."""
        content, running = self._pattern(), self.scheduler.running
        cached = self.monitor.cached_blocks()
        found = content.verify_all(running, cached)
        self._verified_tokens += sum(sequence.computed for sequence in running) + len(cached) * self.pool.block_tokens
        self._mismatched += len(found)
        return [str(mismatch) for mismatch in found]

    def close(self) -> None:
        """End transfers and release every block, so that observers see an empty pool."""
        self.compaction.abort("the engine is shutting down")
        self.compaction.step()
        if self._control is not None:
            self._control.close()
        if self._transfers is not None:
            self._transfers.close()
            self._collect_transfers()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.release(sequence)
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._observer.step_ended(0, 0)

    def report(self) -> Report:
        """What was done so far."""
        scheduler = self.scheduler
        seconds = self._clock.now() - self._started
        return Report(
            served_requests=self._served,
            rejected_requests=self._rejected,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            output_tokens=self._output_tokens,
            preemptions=scheduler.preemptions,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            copied_blocks=self.cache.copied_blocks,
            relocation_copies=self.pool.relocation_copies,
            copy_failures=scheduler.copy_failures,
            verified_tokens=self._verified_tokens,
            mismatched_blocks=self._mismatched,
            seconds=seconds,
            tokens_per_second=self._computed_tokens / seconds if seconds > 0 else 0.0,
            fragmentation_p50=self.monitor.fragmentation_p50,
            live_share_p50=self.monitor.live_share_p50,
            live_share_max=self.monitor.live_share_max,
            states_seen=self.monitor.states_seen,
            transfers=self._transfers.totals if self._transfers else TransferTotals(),
        )

    def _advance(self, batch: Items[Work], next_tokens: Items[Items[int]]) -> None:
        size = self.pool.block_tokens
        blocks: list[int] = []
        fills: list[int] = []
        for work in batch:
            first, last = work.start // size, -(-work.stop // size)
            blocks += work.sequence.table[first:last]
            fills += [size] * (last - first - 1)
            fills.append(work.stop - (last - 1) * size)
        new_tokens = sum(work.stop - work.start for work in batch)
        self._computed_tokens += new_tokens
        self._observer.wrote(blocks, fills, new_tokens)
        self._observer.progressed([w.sequence.owner for w in batch], [w.stop for w in batch])
        for work, candidates in zip(batch, next_tokens, strict=True):
            sequence = work.sequence
            sequence.computed = work.stop
            first, last = self.scheduler.register_full_blocks(sequence)
            if last > first:
                self.runner.registered(sequence, first, last)
            if candidates:
                self._continue(sequence, candidates)

    def _continue(self, sequence: Sequence, candidates: Items[int]) -> None:
        branches = [self.scheduler.branch(sequence, sample) for sample in range(1, len(candidates))]
        members = [sequence, *branches]
        if len(members) > 1:
            self._branches[sequence.request_id] = len(members)
        for member, token in zip(members, candidates, strict=True):
            member.append(token)
            self._output_tokens += 1
            if member.complete:
                self._finish(member)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        left = self._branches.get(sequence.request_id, 1) - 1
        if left:
            self._branches[sequence.request_id] = left
        else:
            self._branches.pop(sequence.request_id, None)
            self._served += 1
            chosen = self._transfers is not None and self._served % self._transfer_every == 0
            if chosen and self._transfers is not None and self._transfers.start(sequence):
                return
        self.scheduler.release(sequence)

    def _collect_transfers(self) -> None:
        if self._transfers is not None:
            for sequence in self._transfers.collect():
                self.scheduler.release(sequence)

    def _take(self, blocks: Iterable[int]) -> None:
        if self.elastic is not None:
            self.elastic.take(blocks)

    def _sequences(self) -> Iterator[Sequence]:
        yield from self.scheduler.running
        yield from self.scheduler.waiting

    def _copy(self, copies: Items[tuple[int, int]]) -> None:
        self._take(destination for _, destination in copies)
        self.cache.copy_blocks(copies)
        self.runner.copied(copies)

    def _pattern(self) -> PatternContent:
        if not isinstance(self.runner, PatternContent):
            raise SettingsError("contents can be verified in pattern mode only; use --content pattern or do not verify")
        return self.runner

    def _verify_some(self) -> None:
        """One running sequence in turn, and a window of the cached blocks, so that a check never stalls a step."""
        content, running = self._pattern(), self.scheduler.running
        found = []
        if running:
            sequence = running[self._verify_turn % len(running)]
            found = content.verify_sequence(sequence)
            self._verified_tokens += sequence.computed
        window = self.monitor.cached_window(self._verify_turn, 64)
        found += content.verify_cached(window)
        self._verified_tokens += len(window) * self.pool.block_tokens
        self._verify_turn += 1
        self._mismatched += len(found)
        for mismatch in found:
            log.error("%s", mismatch)


def _written(batch: Items[Work], block_tokens: int) -> Iterator[int]:
    """The blocks that a batch writes to."""
    for work in batch:
        yield from work.sequence.table[work.start // block_tokens : -(-work.stop // block_tokens)]
