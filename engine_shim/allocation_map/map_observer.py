"""Publishes a pool's changes to its allocation map, and keeps every fault of ours away from the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map.folders import writer_folder
from engine_shim.allocation_map.journal import HELD, WROTE
from engine_shim.allocation_map.publisher import StepJournal, StepPublisher
from engine_shim.allocation_map.writer import MapSpec, MapWriter
from engine_shim.errors import KvatlasError
from engine_shim.layout import BlockState, EventKind

log = logging.getLogger("kvatlas.shim")

MAX_ENTRIES = 4096  # a pool that never ends a step is published all the same: the journal must not grow

# Plain ints: an IntEnum member costs several times as much to turn into an array element.
_ALLOCATE, _REUSE, _SHARE, _UNSHARE, _FREE, _CACHE, _EVICT, _PIN, _UNPIN, _RESERVE, _MOVE, _RELOCATE = map(
    int,
    (
        EventKind.ALLOCATE,
        EventKind.REUSE,
        EventKind.SHARE,
        EventKind.UNSHARE,
        EventKind.FREE,
        EventKind.CACHE,
        EventKind.EVICT,
        EventKind.PIN,
        EventKind.UNPIN,
        EventKind.RESERVE,
        EventKind.MOVE,
        EventKind.RELOCATE,
    ),
)


class MapObserver:
    """A PoolObserver that journals every call and publishes at step ends.

    Nothing here raises into the engine: hot calls append one tuple; everything else runs under `_guarded`, which on
    the first fault marks the map degraded, logs one line and turns this observer off for good.
    """

    def __init__(
        self, writer: MapWriter | None, *, clock_ns: Callable[[], int] = time.time_ns, reason: str = ""
    ) -> None:
        self._clock_ns = clock_ns
        self.reason = reason  # why nothing is published; "" while all is well
        self._on = writer is not None
        self._publisher = None if writer is None else StepPublisher(writer, clock_ns)
        self._step = StepJournal()
        self._journal = self._step.entries

    @classmethod
    def create(
        cls, spec: MapSpec, folder: Path | None = None, *, clock_ns: Callable[[], int] = time.time_ns
    ) -> MapObserver:
        """A map in `folder`, or where KVATLAS_DIR and the host's folders say. Where that fails, one log line says why
        and the observer that is returned does nothing."""
        try:
            if folder is None:
                chosen = writer_folder()
                if chosen.warning:
                    log.warning("%s", chosen.warning)
                folder = chosen.path
            return cls(MapWriter.create(spec, folder, clock_ns=clock_ns), clock_ns=clock_ns)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must start
            log.warning(
                "not instrumented, the engine goes on: %s", error if isinstance(error, KvatlasError) else repr(error)
            )
            return cls(None, reason=str(error))

    # ---- hot path: one append each -------------------------------------------------------------------------------

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        if self._on:
            self._journal.append((_ALLOCATE, blocks, owner, position, group, self._clock_ns()))
            if len(self._journal) >= MAX_ENTRIES:
                self.publish()

    def reused(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        if self._on:
            self._journal.append((_REUSE, blocks, owner, position, group, self._clock_ns()))
            if len(self._journal) >= MAX_ENTRIES:
                self.publish()

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        if self._on:
            self._journal.append((_FREE, blocks, owner, 0, 0, self._clock_ns()))
            if len(self._journal) >= MAX_ENTRIES:
                self.publish()

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None:
        if self._on:
            self._journal.append((_CACHE, blocks, owner, 0, 0, self._clock_ns()))
            if len(self._journal) >= MAX_ENTRIES:
                self.publish()

    def evicted(self, blocks: Sequence[int]) -> None:
        if self._on:
            self._journal.append((_EVICT, blocks, 0, 0, 0, self._clock_ns()))
            if len(self._journal) >= MAX_ENTRIES:
                self.publish()

    # ---- the rest ------------------------------------------------------------------------------------------------

    def shared(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._record(_SHARE, blocks, owner)

    def unshared(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._record(_UNSHARE, blocks, owner)

    def pinned(self, blocks: Sequence[int]) -> None:
        self._record(_PIN, blocks)

    def unpinned(self, blocks: Sequence[int], *, cached: bool) -> None:
        self._record(_UNPIN, blocks, extra=int(BlockState.CACHED if cached else BlockState.USED))

    def reserved(self, blocks: Sequence[int]) -> None:
        self._record(_RESERVE, blocks)

    def held_by(self, blocks: Sequence[int], owner: int, position: int = 0, group: int = 0) -> None:
        """Blocks in use name this holder from now on, where the one they named has left. Nothing else changes."""
        if self._on:
            self._journal.append((HELD, blocks, owner, position, group, self._clock_ns()))
            if len(self._journal) >= MAX_ENTRIES:
                self.publish()

    def wrote(self, blocks: Sequence[int], block_tokens: Sequence[int], new_tokens: int) -> None:
        if self._on:
            self._step.token_lists.append(block_tokens)
            self.counted("tokens_written", new_tokens)
            self._record(WROTE, blocks)

    def moved(self, sources: Sequence[int], destinations: Sequence[int], *, live: bool) -> None:
        if self._on:
            self._step.move_sources.append(sources)
            self._record(_MOVE if live else _RELOCATE, destinations)

    def progressed(self, owners: Sequence[int], tokens: Sequence[int]) -> None:
        if self._on:
            self._step.progress.append((owners, tokens))
            if len(self._step.progress) >= MAX_ENTRIES:
                self.publish()

    def counted(self, name: str, amount: int = 1) -> None:
        if self._on:
            counted = self._step.counted
            try:
                counted[name] = counted.get(name, 0) + amount
            except Exception as error:  # noqa: BLE001 - a name or an amount of some other kind is no fault of the engine's
                self._fail(error)

    def open_owner(self, request_id: str, lora: str = "", cache_salt: str = "") -> int:
        publisher = self._publisher
        if not self._on or publisher is None:
            return layout.NO_OWNER
        owner = publisher.take_owner()
        if owner != layout.NO_OWNER:
            slot = owner & (1 << layout.OWNER_SLOT_BITS) - 1
            self._step.opened[slot] = (owner, request_id, lora, cache_salt, self._clock_ns())
        return owner

    def close_owner(self, owner: int) -> None:
        if self._on and owner != layout.NO_OWNER:
            self._step.closed.append(owner)

    def step_ended(self, running: int, waiting: int) -> None:
        self._guarded(lambda publisher: publisher.publish(self._step, running, waiting))

    def publish(self) -> None:
        """Make everything so far visible without counting a step."""
        self._guarded(lambda publisher: publisher.publish(self._step, None, None))

    def queues_changed(self, running: int, waiting: int) -> None:
        """Make everything so far visible, and how many requests run and wait, without counting a step."""
        self._guarded(lambda publisher: publisher.publish(self._step, running, waiting, counts=False))

    def set_flag(self, **flags: bool) -> None:
        """Set or clear `sleeping` or `relocating`; visible at once."""
        self._guarded(lambda publisher: publisher.set_flags(flags))

    def set_gpu_uuids(self, uuids: Sequence[str]) -> None:
        """Name the devices that hold the pool, once they are known."""
        self._guarded(lambda publisher: publisher.set_gpu_uuids(uuids))

    def set_policy(self, policy: str) -> None:
        """Name the allocation policy, after it was switched."""
        self._guarded(lambda publisher: publisher.set_policy(policy))

    def close(self, *, keep: bool = False) -> None:
        """Publish what is left and remove the map (or keep it, as a black box). Idempotent."""
        self.publish()
        self._on = False
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            try:
                publisher.writer.close(keep=keep)
            except Exception as error:  # noqa: BLE001 - an engine that shuts down must not be stopped by us
                log.warning("the allocation map was not closed in order: %r", error)

    def turn_off(self, reason: str) -> None:
        """Stop for good, for a reason outside of this observer: the map is marked as degraded and left as it is."""
        if self._on:
            self._turn_off(reason)
            self._mark_degraded()

    @property
    def columns(self) -> Mapping[str, NDArray[Any]]:
        """The map's columns as published, to compare with the pool, not to write to; empty where nothing is."""
        return {} if self._publisher is None else self._publisher.writer.columns

    @property
    def path(self) -> Path | None:
        """Where the map is; None where nothing is published."""
        return None if self._publisher is None else self._publisher.writer.path

    def _record(self, kind: int, blocks: Sequence[int], owner: int = 0, extra: int = 0) -> None:
        if self._on:
            self._journal.append((kind, blocks, owner, 0, extra, self._clock_ns()))
            if len(self._journal) >= MAX_ENTRIES:
                self.publish()

    def _guarded(self, action: Callable[[StepPublisher], None]) -> None:
        publisher = self._publisher
        if not self._on or publisher is None:
            return
        if not publisher.writer.active:  # a forked child: the map is the parent's
            self._turn_off("this process is a fork of the map's writer")
            return
        try:
            action(publisher)
        except Exception as error:  # noqa: BLE001 - any fault of ours ends observation, never the engine
            self._fail(error)
        except BaseException as interruption:
            # Ctrl-C in the middle of a publish. It is the engine's to handle; the map can no longer be trusted.
            self._fail(interruption)
            raise

    def _fail(self, error: BaseException) -> None:
        self._turn_off(repr(error))
        log.error("observation stopped, the engine goes on: %r", error)
        self._mark_degraded()

    def _mark_degraded(self) -> None:
        try:
            if self._publisher is not None and self._publisher.writer.active:
                word = self._publisher.writer.live.flags
                word[0] = int(word[0]) | layout.FLAG_DEGRADED
        except Exception:  # noqa: BLE001 - the mapping itself is gone; there is nobody left to tell
            log.error("the map could not be marked as degraded")

    def _turn_off(self, reason: str) -> None:
        self._on = False
        self.reason = reason
        self._step.clear()
