"""What the chunks of a recording hold: encoded from snapshots and events, and decoded with every claim checked.

HEADER  JSON: the pool's id, who wrote its map, its groups and columns, how it was recorded
SAMPLE  length of the JSON that follows (32 bits), the JSON: what changed of everything but blocks; then patches, in
        the order of the columns: form (8 bits), entries (32 bits); dense: all values; sparse: blocks (32 bits
        each, less the one before), values
BASE    the same, everything, of columns that are all 0
EVENTS  number of the first (64 bits), how many (32 bits), then rows of layout.EVENT less the time of the row
        before, byte plane by byte plane
GAP     number of the first lost event, and how many (64 bits each)
NOTE    JSON: something the recorder has to say
END     JSON: why the recording ends

`device_contents` has what a chunk of devices holds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.layout import COLUMNS, COUNTERS, HISTOGRAM_BOUNDS_SECONDS, HISTOGRAMS
from engine_shim.snapshot import EngineIdentity, GroupEntry, Histogram, MapFlags, MapSnapshot, OwnerEntry

SCHEMA = "kvatlas.recording/v1"
MAX_EVENTS = 1 << 20  # in one chunk
MAX_JSON = 1 << 28
_JSON_SIZE = struct.Struct("<I")
_PATCH = struct.Struct("<BI")
_EVENTS = struct.Struct("<QI")
_GAP = struct.Struct("<QQ")
_DENSE, _SPARSE = 0, 1
_LATE = ("gpu_uuids", "policy")  # parts of the identity that may change
_TIMES = ("sequence", "published_unix_ns", "heartbeat_unix_ns", "last_step_unix_ns", "running_requests",
          "waiting_requests", "event_head")  # fmt: skip
_SLOT_MASK = (1 << layout.OWNER_SLOT_BITS) - 1
# The fields of a snapshot that are columns of the map, by the column's name.
FIELD_OF = {"state": "states", "touched": "touched_ms"}


@dataclass(frozen=True, slots=True)
class Header:
    """What stands at the beginning of a recording."""

    id: str  # of the pool, as in /v1/engines
    identity: EngineIdentity
    groups: tuple[GroupEntry, ...]
    columns: tuple[str, ...]
    interval_seconds: float  # between samples
    started_unix: float
    version: str  # of the recorder
    host: str = ""  # that it ran on; "" where an older one did not say


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything of a sample but the blocks, as plain JSON values by name; `owners` by their number."""

    values: Mapping[str, Any]
    owners: Mapping[int, OwnerEntry]

    @property
    def taken_unix(self) -> float:
        return float(self.values["taken_unix"])

    @property
    def alive(self) -> bool:
        return bool(self.values["alive"])

    @property
    def whole(self) -> bool:
        """Do all columns belong to the one publish that `states` belong to?"""
        return bool(self.values["whole"])

    @property
    def event_head(self) -> int:
        return int(self.values["event_head"])


NO_FACTS = Facts(MappingProxyType({}), MappingProxyType({}))


def columns_of(snapshot: MapSnapshot) -> dict[str, NDArray[Any]]:
    """The snapshot's columns by the names that the map has for them."""
    named = {name: getattr(snapshot, FIELD_OF.get(name, name)) for name in COLUMNS}
    return {name: column for name, column in named.items() if column is not None}


def facts_of(snapshot: MapSnapshot, *, taken_unix: float, alive: bool, whole: bool) -> Facts:
    """Everything of a snapshot but its blocks, and how it was had."""
    values: dict[str, Any] = {name: getattr(snapshot, name) for name in _TIMES}
    values |= {name: getattr(snapshot.identity, name) for name in _LATE}
    values["gpu_uuids"] = list(snapshot.identity.gpu_uuids)
    values["flags"] = asdict(snapshot.flags)
    values["state_counts"] = list(snapshot.state_counts)
    values["counters"] = dict(snapshot.counters)
    values["histograms"] = {
        name: [list(one.counts), one.sum_seconds] for name, one in sorted(snapshot.histograms.items())
    }
    values |= {"taken_unix": taken_unix, "alive": alive, "whole": whole}
    return Facts(values, {entry.owner: entry for entry in snapshot.owners})


def snapshot_of(header: Header, facts: Facts, columns: Mapping[str, NDArray[Any]], path: str) -> MapSnapshot:
    """The snapshot that was recorded. Columns are copied. Raises KeyError, TypeError or ValueError for facts that
    cannot be."""
    values = facts.values
    copies = {}
    for name, column in columns.items():
        copies[name] = column.copy()
        copies[name].flags.writeable = False
    identity = asdict(header.identity) | {"gpu_uuids": tuple(values["gpu_uuids"]), "policy": values["policy"]}
    told: dict[str, Any] = {name: int(values[name]) for name in _TIMES}
    told |= {FIELD_OF.get(name, name): copies.get(name) for name in COLUMNS}
    return MapSnapshot(
        path=path,
        identity=EngineIdentity(**identity),
        flags=MapFlags(**values["flags"]),
        **told,
        state_counts=tuple(values["state_counts"]),
        counters=MappingProxyType(dict(values["counters"])),
        groups=header.groups,
        owners=tuple(sorted(facts.owners.values(), key=lambda entry: entry.owner & _SLOT_MASK)),
        histograms=MappingProxyType(
            {
                name: Histogram(HISTOGRAM_BOUNDS_SECONDS, tuple(counts), float(total))
                for name, (counts, total) in values["histograms"].items()
            }
        ),
    )


# ---- header ---------------------------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    return json_bytes({"schema": SCHEMA, **asdict(header)})


def decode_header(payload: bytes) -> Header:
    """Raises ValueError for one that cannot be."""
    told = json_object(payload)
    if told.get("schema") != SCHEMA:
        raise ValueError(f"its header has the schema {told.get('schema')!r}, not {SCHEMA!r}")
    try:
        raw = dict(told["identity"])
        raw["gpu_uuids"] = tuple(raw["gpu_uuids"])
        identity = _made(EngineIdentity, raw)
        groups = tuple(_made(GroupEntry, dict(one)) for one in told["groups"])
        columns = tuple(str(name) for name in told["columns"])
        header = Header(
            str(told["id"]),
            identity,
            groups,
            columns,
            float(told["interval_seconds"]),
            float(told["started_unix"]),
            str(told["version"]),
            str(told.get("host", "")),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"its header lacks {error}") from error
    if not 1 <= identity.total_blocks <= layout.MAX_BLOCKS:
        raise ValueError(f"a pool of {identity.total_blocks} blocks cannot be")
    if not 1 <= identity.block_tokens <= layout.MAX_BLOCK_TOKENS:
        raise ValueError(f"blocks of {identity.block_tokens} tokens cannot be")
    if "state" not in columns or len(set(columns)) != len(columns) or not set(columns) <= set(COLUMNS):
        raise ValueError(f"columns {columns} cannot be")
    if len(groups) > layout.MAX_GROUPS or any(not 0 <= group.id < 256 for group in groups):
        raise ValueError("its groups cannot be")
    if not 0.001 <= header.interval_seconds <= 86_400:
        raise ValueError(f"samples each {header.interval_seconds} s cannot be")
    return header


def _made(kind: type[Any], values: dict[str, Any]) -> Any:
    """A frozen record of whole numbers and texts, each of the kind that its field has."""
    for one in fields(kind):
        value = values[one.name]
        wanted: tuple[type, ...] = {"int": (int,), "str": (str,)}.get(str(one.type), (tuple,))
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{one.name} is {value!r}")
        if isinstance(value, int) and not 0 <= value < 1 << 64:
            raise ValueError(f"{one.name} is {value}")
    return kind(**{one.name: values[one.name] for one in fields(kind)})


# ---- samples --------------------------------------------------------------------------------------------------------


def encode_sample(
    before: Facts, now: Facts, known: Mapping[str, NDArray[Any]], actual: Mapping[str, NDArray[Any]]
) -> bytes:
    """What leads from `before` and the columns that are known, (blocks,) each, to the present ones."""
    changed = {name: value for name, value in now.values.items() if before.values.get(name) != value}
    for name in ("counters", "histograms"):
        old = before.values.get(name, {})
        if name in changed:
            changed[name] = {key: one for key, one in now.values[name].items() if old.get(key) != one}
    opened, updated = [], []
    for number, entry in now.owners.items():
        old_entry = before.owners.get(number)
        if old_entry == entry:
            continue
        if old_entry is not None and _named(old_entry) == _named(entry):
            updated.append([number, entry.tokens, entry.blocks])
        else:
            opened.append([number, entry.tokens, entry.blocks, *_named(entry)])
    told = {
        "facts": changed,
        "opened": opened,
        "updated": updated,
        "closed": [number for number in before.owners if number not in now.owners],
    }
    text = json_bytes(told)
    parts = [_JSON_SIZE.pack(len(text)), text]
    for name, column in known.items():
        parts.append(_encode_patch(column, actual[name]))
    return b"".join(parts)


def _named(entry: OwnerEntry) -> list[Any]:
    return [entry.request_id, entry.lora, entry.cache_salt, entry.first_seen_unix_ns]


def _encode_patch(known: NDArray[Any], actual: NDArray[Any]) -> bytes:
    places = np.flatnonzero(known != actual)
    if len(places) * (4 + actual.itemsize) >= actual.nbytes:
        return _PATCH.pack(_DENSE, len(actual)) + actual.tobytes()
    steps = np.diff(places, prepend=0).astype("<u4")
    return _PATCH.pack(_SPARSE, len(places)) + steps.tobytes() + actual[places].tobytes()


def decode_sample(payload: bytes, before: Facts, columns: Mapping[str, NDArray[Any]]) -> Facts:
    """The facts now, with `columns` brought up to them in place. Raises ValueError for a payload that cannot be."""
    if len(payload) < _JSON_SIZE.size:
        raise ValueError("a sample is too short")
    (size,) = _JSON_SIZE.unpack_from(payload)
    at = _JSON_SIZE.size + size
    if size > MAX_JSON or at > len(payload):
        raise ValueError("a sample is too short for its facts")
    facts = _decode_facts(json_object(payload[_JSON_SIZE.size : at]), before)
    for column in columns.values():
        at = _decode_patch(payload, at, column)
    if at != len(payload):
        raise ValueError(f"a sample is {len(payload) - at} bytes longer than its columns")
    return facts


def _decode_patch(payload: bytes, at: int, column: NDArray[Any]) -> int:
    if at + _PATCH.size > len(payload):
        raise ValueError("a sample is too short for its columns")
    form, entries = map(int, _PATCH.unpack_from(payload, at))
    at += _PATCH.size
    index_bytes = 4 * entries if form == _SPARSE else 0
    end = at + index_bytes + entries * column.itemsize
    if form not in (_DENSE, _SPARSE) or end > len(payload) or entries > len(column):
        raise ValueError("a sample holds more than its columns do")
    values = np.frombuffer(payload, column.dtype, entries, at + index_bytes)
    if form == _DENSE:
        if entries != len(column):
            raise ValueError("a column of a sample is too short")
        column[:] = values
    elif entries:
        places = np.cumsum(np.frombuffer(payload, "<u4", entries, at), dtype=np.int64)
        if int(places[-1]) >= len(column):
            raise ValueError("a sample names a block that is not in the pool")
        column[places] = values
    return end


def _decode_facts(told: Mapping[str, Any], before: Facts) -> Facts:
    try:
        values = dict(before.values)
        changed = dict(told["facts"])
        for name in ("counters", "histograms"):
            if name in changed:
                changed[name] = dict(values.get(name, {})) | dict(changed[name])
        values |= changed
        owners = dict(before.owners)
        for number in told["closed"]:
            owners.pop(number, None)
        for number, tokens, blocks in told["updated"]:
            old = owners[number]
            owners[number] = _owner(number, tokens, blocks, *_named(old))
        for number, tokens, blocks, request_id, lora, salt, first_seen in told["opened"]:
            owners[number] = _owner(number, tokens, blocks, request_id, lora, salt, first_seen)
        _check_facts(values)
    except (KeyError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(f"the facts of a sample cannot be: {type(error).__name__} {error}") from error
    if len(owners) > layout.MAX_OWNERS:
        raise ValueError(f"{len(owners)} requests at once cannot be")
    return Facts(values, owners)


def _check_facts(values: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for what no recorder writes."""
    _whole(*(values[name] for name in _TIMES), *values["state_counts"])
    counters, flags = values["counters"], values["flags"]
    if not set(counters) <= set(COUNTERS) or len(values["state_counts"]) > 64:
        raise ValueError(f"counters {list(counters)[:4]} cannot be")
    _whole(*counters.values())
    if not set(values["histograms"]) <= set(HISTOGRAMS):
        raise ValueError(f"histograms {list(values['histograms'])[:4]} cannot be")
    for counts, total in values["histograms"].values():
        _whole(*counts)
        if len(counts) != len(HISTOGRAM_BOUNDS_SECONDS) + 1 or not isinstance(total, float | int):
            raise ValueError("a histogram of a sample cannot be")
    if not all(isinstance(flags[one.name], bool) for one in fields(MapFlags)) or len(flags) != len(fields(MapFlags)):
        raise ValueError("flags of a sample cannot be")
    if not all(isinstance(text, str) for text in (values["policy"], *values["gpu_uuids"])):
        raise ValueError("a name in a sample cannot be")
    if not isinstance(values["alive"], bool) or not isinstance(values["whole"], bool):
        raise ValueError("a sample does not tell how it was had")
    if not 0 <= float(values["taken_unix"]) < 1e11:  # false for NaN
        raise ValueError("a sample does not tell when it was taken")


def _owner(
    number: Any, tokens: Any, blocks: Any, request_id: Any, lora: Any, cache_salt: Any, first_seen: Any
) -> OwnerEntry:
    _whole(number, tokens, blocks, first_seen)
    if not 0 < number < 1 << 32 or not all(isinstance(text, str) for text in (request_id, lora, cache_salt)):
        raise ValueError(f"request {number!r} of a sample cannot be")
    return OwnerEntry(number, request_id, lora, cache_salt, tokens, blocks, first_seen)


def _whole(*numbers: Any) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 64:
            raise ValueError(f"{number!r} is not what a map holds")


# ---- events ---------------------------------------------------------------------------------------------------------


def encode_events(first: int, events: NDArray[np.void]) -> bytes:
    """Up to MAX_EVENTS rows of layout.EVENT, the first of which has this number."""
    rows = events.copy()
    rows["time_ns"][1:] = np.diff(events["time_ns"])
    planes = rows.view(np.uint8).reshape(len(rows), layout.EVENT.itemsize).T
    return _EVENTS.pack(first, len(rows)) + np.ascontiguousarray(planes).tobytes()


def events_in(size: int) -> int:
    """How many events a payload of so many bytes holds."""
    return max(0, size - _EVENTS.size) // layout.EVENT.itemsize


def decode_events(payload: bytes) -> tuple[int, NDArray[np.void]]:
    """The number of the first, and the rows. Raises ValueError for a payload that cannot be."""
    if len(payload) < _EVENTS.size:
        raise ValueError("events are too short")
    first, count = _EVENTS.unpack_from(payload)
    if count > MAX_EVENTS or len(payload) != _EVENTS.size + count * layout.EVENT.itemsize:
        raise ValueError(f"{count} events do not fit their chunk")
    planes = np.frombuffer(payload, np.uint8, offset=_EVENTS.size).reshape(layout.EVENT.itemsize, count)
    rows = planes.T.copy().reshape(-1).view(layout.EVENT)
    rows["time_ns"] = np.cumsum(rows["time_ns"])
    return first, rows


def encode_gap(first: int, count: int) -> bytes:
    return _GAP.pack(first, count)


def decode_gap(payload: bytes) -> tuple[int, int]:
    """The number of the first lost event, and how many. Raises ValueError."""
    if len(payload) != _GAP.size:
        raise ValueError("a gap is not as long as one")
    first, count = _GAP.unpack(payload)
    return first, count


def encode_words(**told: Any) -> bytes:
    """The payload of a note or of the end."""
    return json_bytes(told)


def decode_words(payload: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    return json_object(payload)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Raises ValueError for a number that JSON has none for."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def json_object(payload: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no object."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} where an object was expected")
    return value
