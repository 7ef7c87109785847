"""What agent and engine say to each other over the control socket: typed, versioned, bounded, one JSON object a line.

A request is `{"schema": "kvatlas.control/v1", "op": "compact", "target": 0.1, ...}`: the fields of the dataclass with
that `op`; those with a default may be left out, and any other is refused, since an engine must not move memory on an
order that it understands in part. A reply is `{"schema": ..., "reply": "run", ...}`; more fields may stand in it.
Numbers are finite, integers within ±2**53 (exact in every JSON library), and a line is at most MAX_LINE_BYTES long.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from engine_shim.errors import ControlMalformed

SCHEMA = "kvatlas.control/v1"
MAX_LINE_BYTES = 64 * 1024  # with the newline
MAX_INTEGER = 2**53
MAX_RUN_SECONDS = 600.0

Scalar = str | int | float | bool | None
Detail = Scalar | Mapping[str, Scalar]

# What `ErrorReply.error` may be in this version; a client takes any other as a refusal.
ERROR_CODES = (
    "bad_request",
    "unsupported",  # another version's schema
    "too_large",
    "too_slow",
    "refused",  # this peer may not, or moving is not allowed
    "busy",
    "unavailable",  # not carried out
    "timeout",  # not answered: whether it was carried out is not known
    "failed",
)


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks how things stand. Changes nothing."""

    op: ClassVar[str] = "status"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Asks what a run would move. Changes nothing."""

    op: ClassVar[str] = "plan"
    target: float = 0.10  # the fragmentation rate to come down to, 0 to 1
    max_moves: int | None = None  # None: as many as the target takes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRequest:
    """Asks for one run; the reply comes when it has ended. The engine may keep to tighter limits of its own."""

    op: ClassVar[str] = "compact"
    target: float = 0.10
    max_moves: int | None = None  # over the whole run; None: as many as the target takes
    max_chunk_moves: int | None = None  # of one step's chunk, as the next two; None: as the engine is set
    max_chunk_bytes: int | None = None  # temporary memory
    max_step_seconds: float | None = None  # that a step may be held up
    verify: bool = False  # compare contents before each commit, also where the engine is not set to
    max_seconds: float = 60.0  # then the run is aborted and reported as far as it came; to MAX_RUN_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingRequest:
    """The kill switch: off forbids moves of live blocks and aborts a run in progress."""

    op: ClassVar[str] = "moving"
    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RelocationRequest:
    """Switches relocating allocation on or off, where the engine's pool has it."""

    op: ClassVar[str] = "relocation"
    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOffRequest:
    """Takes KVAtlas out of an engine that it was plugged into, until that is started again: hooks, map and socket go.

    An engine that it is a part of refuses.
    """

    op: ClassVar[str] = "turn_off"
    reason: str = ""  # for the engine's log


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRequest:
    """Asks what torch's allocator holds in the engine's process. Answered beside the engine's thread, not on it."""

    op: ClassVar[str] = "allocator"
    snapshot: bool = False  # also write a light snapshot, which costs the process some milliseconds


ControlRequest = (
    StatusRequest | PlanRequest | CompactRequest | MovingRequest | RelocationRequest | TurnOffRequest | AllocatorRequest
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReply:
    """What a run did, or what a plan would do: then nothing is moved and `..._after` is predicted.

    Moves and lengths are in blocks; rates are 0 to 1. None where it is not known, or nothing is allocatable.
    """

    kind: ClassVar[str] = "run"
    decision: str  # a stable word of the engine's: "planned", "compacted", "aborted", ...
    reason: str
    planned_moves: int
    moved_blocks: int
    moved_bytes: int
    fragmentation_rate_before: float | None
    fragmentation_rate_after: float | None
    largest_allocatable_run_before: int | None
    largest_allocatable_run_after: int | None
    details: Mapping[str, Detail] = field(default_factory=dict)  # what else the report holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReply:
    """How a switch stands now, and why it is not where it was asked to be, if so."""

    kind: ClassVar[str] = "switch"
    on: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply:
    """How the engine stands to moving."""

    kind: ClassVar[str] = "status"
    moving: bool
    relocation: bool | None  # None: this pool has no relocating allocation
    running: bool  # a run is in progress
    policy: str  # the pool's allocation policy
    reason: str  # why moving or relocation is off; "" where neither is
    last_report: RunReply | None = None
    details: Mapping[str, Detail] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReply:
    """What torch's allocator holds, by CUDA index in that process; names are those of allocator.STATISTICS."""

    kind: ClassVar[str] = "allocator"
    available: bool
    reason: str = ""  # why not, or what to beware of
    backend: str = ""  # "native", "cudaMallocAsync"
    devices: Mapping[str, Detail] = field(default_factory=dict)
    snapshot_file: str = ""  # "" where none was asked for, or none could be made
    snapshot_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """The request was not carried out: why, in which field ("" where in none), and what to do."""

    kind: ClassVar[str] = "error"
    error: str  # one of ERROR_CODES
    message: str
    action: str
    field: str = ""


ControlReply = RunReply | SwitchReply | StatusReply | AllocatorReply | ErrorReply


def encode_request(request: ControlRequest) -> bytes:
    """The request as one line. Raises ControlMalformed for values that the other end would refuse."""
    return _line({"schema": SCHEMA, "op": request.op, **_checked(type(request), _shallow(request))})


def encode_reply(reply: ControlReply) -> bytes:
    """The reply as one line. Raises ControlMalformed for what cannot be said: NaN, nested values, more than a line."""
    return _line({"schema": SCHEMA, "reply": reply.kind, **_checked(type(reply), _shallow(reply))})


def parse_request(line: bytes) -> ControlRequest:
    """The request on a line, with or without its newline. Anything else raises ControlMalformed, naming the field."""
    message = _object(line)
    kind = _kind_of(message, "op", _REQUESTS)
    unknown = message.keys() - {"schema", "op"} - _FIELDS[kind].keys()
    if unknown:
        name = min(unknown)
        raise ControlMalformed(f"{_show(name)} is no field of {message['op']}", field=name[:80])
    request: ControlRequest = kind(**_checked(kind, message))
    return request


def parse_reply(line: bytes) -> ControlReply:
    """The reply on a line, without fields that this version does not know. Anything else raises ControlMalformed."""
    message = _object(line)
    kind = _kind_of(message, "reply", _REPLIES)
    values = _checked(kind, message)
    if kind is StatusReply and values.get("last_report") is not None:
        values["last_report"] = RunReply(**values["last_report"])
    reply: ControlReply = kind(**values)
    return reply


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ControlMalformed(f"a message has at most {MAX_LINE_BYTES} bytes, this one {len(line)}", error="too_large")
    try:
        message = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ControlMalformed("the message is nested too deeply") from None
    except ValueError as error:  # of UTF-8 as well
        raise ControlMalformed(f"the message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ControlMalformed("the message is not a JSON object")
    if message.get("schema") != SCHEMA:
        raise ControlMalformed(
            f"schema is {_show(message.get('schema'))}; this side speaks {SCHEMA}", error="unsupported", field="schema"
        )
    return message


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise ControlMalformed(f"{_show(name)} stands twice in the message", field=name[:80])
    return members


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _kind_of(message: Mapping[str, Any], key: str, kinds: Mapping[str, type[Any]]) -> type[Any]:
    name = message.get(key)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ControlMalformed(f"{key} is {_show(name)}; it is one of {', '.join(kinds)}", field=key)
    return kind


def _line(message: Mapping[str, Any]) -> bytes:
    line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ControlMalformed(f"a message has at most {MAX_LINE_BYTES} bytes, this one {len(line)}", error="too_large")
    return line


def _shallow(message: Any) -> dict[str, Any]:
    return {one.name: getattr(message, one.name) for one in fields(message)}


def _checked(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of `values`, each checked and as a plain JSON value; those with a default may be absent."""
    checked = {}
    for one in fields(kind):
        if one.name not in values:
            if one.default is MISSING and one.default_factory is MISSING:
                raise ControlMalformed(f"{one.name} is missing", field=one.name)
            continue
        try:
            checked[one.name] = _FIELDS[kind][one.name](values[one.name])
        except ValueError as error:
            raise ControlMalformed(f"{one.name} is {_show(values[one.name])}; {error}", field=one.name) from None
    return checked


def _show(value: object) -> str:
    # Converting an integer of thousands of digits to text raises.
    text = "a huge number" if isinstance(value, int) and abs(value) > MAX_INTEGER else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


Check = Callable[[object], Any]  # returns the plain value; ValueError says what is wanted


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("give text")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def _integer(lowest: int = 0, highest: int = MAX_INTEGER) -> Check:
    def check(value: object) -> int:
        # NumPy's integers are Integral too, and a report is made of them.
        number = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else lowest - 1
        if not lowest <= number <= highest:
            raise ValueError(f"give an integer from {lowest} to {highest}")
        return number

    return check


def _number(highest: float, *, positive: bool = False) -> Check:
    def check(value: object) -> float:
        number = _as_float(value)
        if not 0 <= number <= highest or (positive and number == 0):
            raise ValueError(f"give a number {'above' if positive else 'from'} 0 to {highest:g}")
        return number

    return check


def _as_float(value: object) -> float:
    """NaN for what is no number, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(_integer(-MAX_INTEGER)(value))
    if math.isfinite(number := _as_float(value)):
        return number
    raise ValueError("give text, a finite number, true, false or null")


def _object_of(check: Check) -> Check:
    def checked_object(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError("give an object")
        checked = {}
        for key, one in value.items():
            try:
                checked[key] = check(one)
            except ValueError as error:
                raise ValueError(f"its {_show(key)} is {_show(one)}: {error}") from None
        return checked

    return checked_object


_scalars = _object_of(_scalar)
_details = _object_of(lambda value: _scalars(value) if isinstance(value, Mapping) else _scalar(value))


def _run(value: object) -> dict[str, Any]:
    """A RunReply, or what stands for one in JSON."""
    if isinstance(value, RunReply):
        value = _shallow(value)
    if not isinstance(value, Mapping):
        raise ValueError("give the object of a run")
    try:
        return _checked(RunReply, value)
    except ControlMalformed as error:
        raise ValueError(f"its {error}") from None


_share = _number(1)
_count = _integer()
_REQUESTS: dict[str, type[Any]] = {
    kind.op: kind
    for kind in (
        StatusRequest,
        PlanRequest,
        CompactRequest,
        MovingRequest,
        RelocationRequest,
        TurnOffRequest,
        AllocatorRequest,
    )
}
_REPLIES: dict[str, type[Any]] = {
    kind.kind: kind for kind in (RunReply, SwitchReply, StatusReply, AllocatorReply, ErrorReply)
}
_FIELDS: dict[type[Any], dict[str, Check]] = {
    StatusRequest: {},
    PlanRequest: {"target": _share, "max_moves": _optional(_count)},
    CompactRequest: {
        "target": _share,
        "max_moves": _optional(_count),
        "max_chunk_moves": _optional(_integer(1)),
        "max_chunk_bytes": _optional(_integer(1)),
        "max_step_seconds": _optional(_number(1, positive=True)),
        "verify": _flag,
        "max_seconds": _number(MAX_RUN_SECONDS, positive=True),
    },
    MovingRequest: {"on": _flag},
    RelocationRequest: {"on": _flag},
    TurnOffRequest: {"reason": _text},
    AllocatorRequest: {"snapshot": _flag},
    RunReply: {
        "decision": _text,
        "reason": _text,
        "planned_moves": _count,
        "moved_blocks": _count,
        "moved_bytes": _count,
        "fragmentation_rate_before": _optional(_share),
        "fragmentation_rate_after": _optional(_share),
        "largest_allocatable_run_before": _optional(_count),
        "largest_allocatable_run_after": _optional(_count),
        "details": _details,
    },
    SwitchReply: {"on": _flag, "reason": _text},
    StatusReply: {
        "moving": _flag,
        "relocation": _optional(_flag),
        "running": _flag,
        "policy": _text,
        "reason": _text,
        "last_report": _optional(_run),
        "details": _details,
    },
    AllocatorReply: {
        "available": _flag,
        "reason": _text,
        "backend": _text,
        "devices": _details,
        "snapshot_file": _text,
        "snapshot_bytes": _count,
    },
    ErrorReply: {"error": _text, "message": _text, "action": _text, "field": _text},
}
