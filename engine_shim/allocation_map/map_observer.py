"""Publishes a pool's changes to its allocation map, and keeps every fault of ours away from the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map.folders import writer_folder
from engine_shim.allocation_map.journal import HEAD_FIELDS, HELD, HIGH, WROTE
from engine_shim.allocation_map.publisher import StepJournal, StepPublisher
from engine_shim.allocation_map.sequence import Compiler
from engine_shim.allocation_map.writer import MapSpec, MapWriter
from engine_shim.errors import KvatlasError
from engine_shim.layout import BlockState, EventKind

log = logging.getLogger("kvatlas.shim")

MAX_ENTRIES = 4096  # a pool that never ends a step is published all the same: the journal must not grow
MAX_FIELDS = MAX_ENTRIES * HEAD_FIELDS

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


class OpenJournal(NamedTuple):
    """An observer's journal, for hooks in which a call of a method for each operation would cost too much.

    An entry is four ints more in `heads` (see journal.Head) and its blocks in `unnamed`: objects of the engine's, whose
    `block_id` is read when something else needs the list or the step is published, all at once. Once `heads` is longer
    than MAX_FIELDS, `full` must be called: the journal is published, or emptied where nothing is published any more.
    """

    heads: list[int]
    unnamed: list[Any]
    clock_ns: Callable[[], int]
    full: Callable[[], None]


class MapObserver:
    """A PoolObserver that journals every call and publishes at step ends.

    Nothing here raises into the engine: the first fault marks the map degraded, logs one line and turns this observer
    off for good.
    """

    def __init__(
        self, writer: MapWriter | None, *, clock_ns: Callable[[], int] = time.time_ns, reason: str = ""
    ) -> None:
        self._clock_ns = clock_ns
        self.reason = reason  # why nothing is published; "" while all is well
        self._on = writer is not None
        self._publisher = None if writer is None else StepPublisher(writer, clock_ns)
        self._step = StepJournal()
        self._heads, self._named, self._unnamed = self._step.heads, self._step.named, self._step.unnamed

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

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self._record(_ALLOCATE, blocks, owner, position, group)

    def reused(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self._record(_REUSE, blocks, owner, position, group)

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._record(_FREE, blocks, owner)

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._record(_CACHE, blocks, owner)

    def evicted(self, blocks: Sequence[int]) -> None:
        self._record(_EVICT, blocks)

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
        self._record(HELD, blocks, owner, position, group)

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

    def compile(self, compiler: Compiler) -> str:
        """Let steps be stored by code that `compiler` makes of two functions (see `sequence`), at once and on this
        thread. "" or why that is not so; then all goes on as before."""
        if not self._on or self._publisher is None:
            return self.reason or "nothing is published"
        try:
            self._publisher.compile(compiler)
        except Exception as error:  # noqa: BLE001 - compilers raise what they like
            return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[0]
        return ""

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
    def failed(self) -> bool:
        """Was there a map, and has observation ended for good?"""
        return self._publisher is not None and not self._on

    @property
    def path(self) -> Path | None:
        """Where the map is; None where nothing is published."""
        return None if self._publisher is None else self._publisher.writer.path

    def open_journal(self) -> OpenJournal:
        """The journal itself, for the hottest hooks."""
        return OpenJournal(self._heads, self._unnamed, self._clock_ns, self._make_room)

    def _make_room(self) -> None:
        if self._on:
            self.publish()
        else:
            self._step.clear()

    def _record(self, kind: int, blocks: Sequence[int], owner: int = 0, position: int = 0, extra: int = 0) -> None:
        if self._on:
            heads = self._heads
            try:
                if (owner | position << 1) >> HIGH or extra >> 8:
                    raise ValueError(f"no owner, position and group: {owner}, {position}, {extra}")
                if self._unnamed:
                    self._step.name()
                heads.extend((self._clock_ns(), len(blocks), owner | extra << HIGH, kind | position << HIGH))
                self._named.extend(blocks)
            except Exception as error:  # noqa: BLE001 - whatever was handed over, it is no fault of the engine's
                self._fail(error)
            if len(heads) > MAX_FIELDS:
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
