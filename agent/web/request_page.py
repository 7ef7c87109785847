"""Live sequences and what they hold: sorted, filtered, and summed up by LoRA adapter and by cache salt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent import wire
from agent.sampling.model import NANOSECONDS, PoolSample, elapsed_ms
from engine_shim.layout import OWNER_SLOT_BITS, BlockState
from engine_shim.snapshot import MapSnapshot, OwnerEntry

MAX_GROUPS = 50
_SLOT_MASK = (1 << OWNER_SLOT_BITS) - 1
_NEVER_MS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Which sequences, in which order. `contains` is looked for in ids and labels, in upper and lower case."""

    limit: int
    sort: wire.RequestOrder = "blocks"
    ascending: bool = False
    contains: str = ""
    lora: str | None = None  # exactly this one; "": those without
    cache_salt: str | None = None

    def takes(self, entry: OwnerEntry) -> bool:
        if self.lora is not None and entry.lora != self.lora:
            return False
        if self.cache_salt is not None and entry.cache_salt != self.cache_salt:
            return False
        wanted = self.contains.casefold()
        texts = (entry.request_id, entry.lora, entry.cache_salt)
        return not wanted or any(wanted in text.casefold() for text in texts)


def request_page(sample: PoolSample, query: RequestQuery, now_unix: float) -> wire.RequestPage:
    """Those that match, the first `limit` in that order; totals and groups are of all that match."""
    snapshot = sample.snapshot
    holdings = _Holdings.of(snapshot, now_unix)
    rows = [
        _request(entry, index, holdings, now_unix) for index, entry in enumerate(snapshot.owners) if query.takes(entry)
    ]
    by_lora, loras = _groups(rows, lambda one: one.lora)
    by_salt, salts = _groups(rows, lambda one: one.cache_salt)
    return wire.RequestPage(
        id=sample.id,
        sequence=snapshot.sequence,
        total=len(snapshot.owners),
        requests=_sorted(rows, query)[: query.limit],
        matching=len(rows),
        totals=_sum("", rows),
        by_lora=by_lora,
        lora_groups=loras,
        by_cache_salt=by_salt,
        cache_salt_groups=salts,
    )


@dataclass(frozen=True, slots=True)
class _Holdings:
    """By owner, in the order of the snapshot's table, each (owners,). None: the map has no such column."""

    owned: list[int] | None  # blocks that it was the first to hold
    exclusive: list[int] | None  # those of them that nobody else holds
    runs: list[int] | None
    waste: list[int] | None
    last_block_seconds: list[float | None] | None

    @classmethod
    def of(cls, snapshot: MapSnapshot, now_unix: float) -> _Holdings:
        if snapshot.owner is None:
            return cls(None, None, None, None, None)
        owners = [entry.owner for entry in snapshot.owners]
        row = _owner_rows(snapshot.owner, owners)
        row[snapshot.states == BlockState.FREE] = 0
        size = len(owners) + 1
        owned = np.bincount(row, minlength=size)
        starts = np.concatenate(([True], row[1:] != row[:-1]))
        runs = np.bincount(row[starts], minlength=size)
        alone = owned if snapshot.references is None else np.bincount(row[snapshot.references == 1], minlength=size)
        waste = None
        if snapshot.tokens is not None:
            held = (snapshot.states == BlockState.USED) | (snapshot.states == BlockState.PINNED)
            empty = np.maximum(snapshot.identity.block_tokens - snapshot.tokens.astype(np.int64), 0) * held
            waste = np.bincount(row, weights=empty, minlength=size).astype(np.int64)[1:].tolist()
        return cls(
            owned[1:].tolist(),
            alone[1:].tolist(),
            runs[1:].tolist(),
            waste,
            _last_blocks(snapshot, row, size, now_unix),
        )


def _last_blocks(
    snapshot: MapSnapshot, row: NDArray[np.int32], size: int, now_unix: float
) -> list[float | None] | None:
    """Seconds since each owner last took a block; None where it holds none."""
    if snapshot.touched_ms is None:
        return None
    newest = np.full(size, _NEVER_MS, np.uint32)
    np.minimum.at(newest, row, elapsed_ms(snapshot.touched_ms, snapshot, now_unix))
    return [None if ms == _NEVER_MS else ms / 1000 for ms in newest[1:].tolist()]


def _request(entry: OwnerEntry, index: int, holdings: _Holdings, now_unix: float) -> wire.Request:
    age = max(0.0, now_unix - entry.first_seen_unix_ns / NANOSECONDS)
    return wire.Request(
        request_id=entry.request_id,
        lora=entry.lora,
        cache_salt=entry.cache_salt,
        tokens=entry.tokens,
        blocks=entry.blocks,
        owned_blocks=holdings.owned[index] if holdings.owned is not None else None,
        exclusive_blocks=holdings.exclusive[index] if holdings.exclusive is not None else None,
        runs=holdings.runs[index] if holdings.runs is not None else None,
        tail_waste_tokens=holdings.waste[index] if holdings.waste is not None else None,
        age_seconds=age,
        tokens_per_second=entry.tokens / age if age > 0 else None,
        last_block_seconds=holdings.last_block_seconds[index] if holdings.last_block_seconds is not None else None,
    )


def _sorted(rows: Sequence[wire.Request], query: RequestQuery) -> list[wire.Request]:
    """In the order asked for, equal ones by id; what is not known stands at the end, whichever way is up."""
    by_id = sorted(rows, key=lambda one: one.request_id)
    known = [one for one in by_id if getattr(one, query.sort) is not None]
    unknown = [one for one in by_id if getattr(one, query.sort) is None]
    # Not reversed afterwards: equal ones would stand in another order then.
    sign = 1 if query.ascending else -1
    if query.sort in ("request_id", "lora", "cache_salt"):
        return sorted(known, key=lambda one: str(getattr(one, query.sort)), reverse=not query.ascending) + unknown
    return sorted(known, key=lambda one: sign * getattr(one, query.sort)) + unknown


def _groups(
    rows: Sequence[wire.Request], label_of: Callable[[wire.Request], str]
) -> tuple[list[wire.RequestGroup], int]:
    """The groups with most blocks, at most MAX_GROUPS, and how many there are."""
    members: dict[str, list[wire.Request]] = {}
    for one in rows:
        members.setdefault(label_of(one), []).append(one)
    groups = [_sum(label, group) for label, group in members.items()]
    groups.sort(key=lambda one: (-(one.owned_blocks or 0), -one.tokens, one.label))
    return groups[:MAX_GROUPS], len(groups)


def _sum(label: str, rows: Sequence[wire.Request]) -> wire.RequestGroup:
    def total(name: str) -> int | None:
        values = [getattr(one, name) for one in rows]
        return None if None in values else sum(values)

    return wire.RequestGroup(
        label=label,
        requests=len(rows),
        tokens=sum(one.tokens for one in rows),
        owned_blocks=total("owned_blocks"),
        exclusive_blocks=total("exclusive_blocks"),
        runs=total("runs"),
        tail_waste_tokens=total("tail_waste_tokens"),
        oldest_seconds=max((one.age_seconds for one in rows), default=None),
    )


def _owner_rows(column: NDArray[np.uint32], owners: list[int]) -> NDArray[np.int32]:
    """For each block the position of its owner in `owners`, from 1; 0 for nobody and for owners not listed."""
    slots = [owner & _SLOT_MASK for owner in owners]
    beyond = max(slots, default=0) + 1
    row_of_slot = np.zeros(beyond + 1, np.int32)
    row_of_slot[slots] = np.arange(1, len(owners) + 1)
    rows: NDArray[np.int32] = row_of_slot[np.minimum(column & np.uint32(_SLOT_MASK), np.uint32(beyond))]
    # A slot used anew has another generation; blocks of its former owner are not the new one's.
    rows[np.asarray([0, *owners], np.uint32)[rows] != column] = 0
    return rows
