"""What a chunk of devices holds: a DevicesView as plain JSON, less what the one before said already.

DEVICES  JSON: of each object the keys whose values changed, of each list of unchanged length an object of the places
         that did, anything else as it is now; after a base everything. Objects have a view's fields, a mapping is a
         list of pairs, and times are on the recording's time line.

No more is told than /v1/devices shows of a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from agent.devices.model import NOTHING_RECORDED, DevicesView, DeviceView, LibraryState, NvmlReading
from agent.recording.contents import json_bytes, json_object
from agent.sampling.model import NANOSECONDS

MAX_DEVICES_BYTES = 1 << 20
"""Of a whole view as JSON: some hundred devices with a hundred processes on each."""
_MAX_DEPTH = 12  # a row of a slice's memory lies at 8
_NONE = object()
_TAKEN = "taken_ns"  # in place of the view's monotonic time
_SHOWN = frozenset(
    ("reserved_bytes", "live_bytes", "active_bytes", "requested_bytes", "stuck_bytes", "retries", "ooms")
)  # of what an allocator tells

Plain = Mapping[str, Any]
"""A view as JSON values."""


class UnknownWord(ValueError):
    """A state or kind that this version has no word for."""


def plain_view(view: DevicesView, line_ns: Callable[[float], int]) -> Plain:
    """A view as it is recorded; `line_ns` brings a monotonic time in seconds to the recording's time line in ns.

    One that no reader would take, as with more than MAX_DEVICES_BYTES of processes, comes out as nothing but why.
    """
    plain = _plain_view(view, line_ns)
    try:
        check_plain(plain)
    except ValueError as error:
        return _plain_view(_untold(f"what was told of devices then could not be recorded: {error}"), line_ns)
    return plain


def _untold(reason: str) -> DevicesView:
    nvml = NvmlReading(LibraryState.RECORDING, reason)
    return replace(NOTHING_RECORDED, nvml=nvml, host_reason=reason, cgroup_reason=reason)


def check_plain(plain: Plain) -> DevicesView:
    """The view that it tells. Raises ValueError for one that cannot be, or is larger than MAX_DEVICES_BYTES."""
    size = len(json_bytes(plain))
    if size > MAX_DEVICES_BYTES:
        raise ValueError(f"devices of {size} bytes cannot be")
    told = dict(plain)
    try:
        taken_ns = told.pop(_TAKEN)
    except KeyError:
        raise ValueError("devices do not tell when they were read") from None
    if taken_ns is not None and (type(taken_ns) is not int or not -(1 << 63) <= taken_ns < 1 << 63):
        raise ValueError(f"devices that were read at {taken_ns!r} cannot be")
    told["taken_monotonic"] = None if taken_ns is None else taken_ns / NANOSECONDS
    view: DevicesView = _made(DevicesView, told, 0)
    if not 0 <= view.taken_unix < 1e11:  # false for NaN
        raise ValueError("devices do not tell when they were read")
    for device in view.devices:
        _check_device(device)
    return view


def _check_device(device: DeviceView) -> None:
    memory = device.sample.memory
    if device.attribution is not None and memory is not None and memory.total_bytes <= 0:
        raise ValueError(f"a device of {memory.total_bytes} bytes cannot be")
    for one in device.slices:
        _check_device(one)


def encode_devices(before: Plain, now: Plain) -> bytes:
    """What leads from `before`, which is empty after a base, to the present view; never longer than all of that."""
    changes = json_bytes(
        {key: _change(before.get(key), one) for key, one in now.items() if before.get(key, _NONE) != one}
    )
    return min(changes, json_bytes(now), key=len)


def decode_devices(payload: bytes, before: Plain) -> tuple[Plain, DevicesView]:
    """The view now, as JSON values and as itself. Raises ValueError for a payload that cannot be.

    The view of a newer recorder, in words that are not known here, says so and nothing else.
    """
    if len(payload) > MAX_DEVICES_BYTES:
        raise ValueError(f"devices of {len(payload)} bytes cannot be")
    try:
        plain = _patched(before, json_object(payload), 0)
        try:
            return plain, check_plain(plain)
        except UnknownWord as error:
            return plain, _untold(f"{error}; update kvatlas")
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"devices cannot be: {type(error).__name__} {error}") from error


# ---- what changed ---------------------------------------------------------------------------------------------------


def _change(before: Any, now: Any) -> Any:
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: _change(before.get(key), one) for key, one in now.items() if before.get(key, _NONE) != one}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return {str(place): _change(old, one) for place, (old, one) in pairs if old != one}
    return now


def _patched(before: Any, told: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("devices are nested too deep")
    if not isinstance(told, dict):
        return told
    if isinstance(before, dict):
        return before | {key: _patched(before.get(key), one, depth + 1) for key, one in told.items()}
    if not isinstance(before, list):
        return told
    after = list(before)
    for key, one in told.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(after)):
            raise ValueError(f"devices have nothing at place {key[:20]!r}")
        after[int(key)] = _patched(after[int(key)], one, depth + 1)
    return after


# ---- a view as JSON values -------------------------------------------------------------------------------------------


def _plain_view(view: DevicesView, line_ns: Callable[[float], int]) -> Plain:
    """Without what /v1/devices does not show: devices and processes are in it once, with their names."""
    shown = replace(
        view,
        nvml=replace(view.nvml, devices=()),
        devices=tuple(map(_shown_device, view.devices)),
        allocators=tuple(
            replace(
                one,
                model="",
                devices={
                    device: {name: size for name, size in told.items() if name in _SHOWN}
                    for device, told in one.devices.items()
                },
            )
            for one in view.allocators
        ),
    )
    plain: dict[str, Any] = _plain(shown)
    taken = plain.pop("taken_monotonic")
    return plain | {_TAKEN: None if taken is None else line_ns(taken)}


def _shown_device(device: DeviceView) -> DeviceView:
    sample = replace(device.sample, processes=None, gpu_instance=None, slices=())
    return replace(device, sample=sample, slices=tuple(map(_shown_device, device.slices)))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return [[key, _plain(one)] for key, one in value.items()]
    return value


def _made(kind: Any, value: Any, depth: int) -> Any:
    """A value of a field's type, made of JSON values. Raises ValueError for what is of another.

    A field that is missing has its default, one that is not known is left out: versions may differ in them.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("devices are nested too deep")
    origin, parts = get_origin(kind), get_args(kind)
    if type(None) in parts:
        return None if value is None else _made(next(one for one in parts if one is not type(None)), value, depth)
    if origin is tuple and isinstance(value, list):
        return tuple(_made(parts[0], one, depth + 1) for one in value)
    if origin is Mapping and isinstance(value, list):
        return MappingProxyType({_made(str, key, depth): _made(parts[1], one, depth + 1) for key, one in _pairs(value)})
    if is_dataclass(kind) and isinstance(value, dict):
        return _made_object(kind, value, depth + 1)
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
        if value not in set(kind):
            raise UnknownWord(f"what was recorded of devices has the word {value[:40]!r}, which is not known here")
        return kind(value)
    if kind is str and isinstance(value, str):
        value.encode()  # half of a pair of surrogates cannot be told to anybody
        return value
    if kind is int and type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is float and isinstance(value, float | int) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"devices hold {str(value)[:40]!r} where {getattr(kind, '__name__', kind)} was expected")


def _made_object(kind: Any, value: Mapping[str, Any], depth: int) -> Any:
    types = _types(kind)
    return kind(**{name: _made(types[name], one, depth) for name, one in value.items() if name in types})


def _pairs(value: Sequence[Any]) -> Sequence[tuple[Any, Any]]:
    if not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise ValueError("devices hold a list where pairs were expected")
    return [(key, one) for key, one in value]


@cache
def _types(kind: type[Any]) -> Mapping[str, Any]:
    return get_type_hints(kind)
