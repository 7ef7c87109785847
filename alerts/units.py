"""Numbers with a unit, as people read and write them."""

from __future__ import annotations

import math
import re
from enum import StrEnum

_WRITTEN = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\D*)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


class Unit(StrEnum):
    """What a named number counts."""

    RATIO = "ratio"  # a share, 0 to 1
    SECONDS = "seconds"
    BYTES = "bytes"
    BLOCKS = "blocks"
    COUNT = "count"
    PER_MINUTE = "per_minute"
    FLAG = "flag"  # 1 where something is so, 0 where it is not


_SUFFIXES = {Unit.SECONDS: _SECONDS, Unit.BYTES: _BYTES}
_EXAMPLES = {Unit.RATIO: "0.3 or 30%", Unit.SECONDS: "90s, 5m or 2h", Unit.BYTES: "1048576 or 1MiB", Unit.FLAG: "0.5"}


def parse(text: str, unit: Unit) -> float | None:
    """A number as it is written in a file, such as `30%`, `5m` or `12`; None where it is none of this unit."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        return None
    suffix = match[2].strip()
    if suffix == "%" and unit is Unit.RATIO:
        value = float(match[1]) / 100  # multiplied by 0.01 it would not be the number that 0.95 is
    elif not suffix or suffix in _SUFFIXES.get(unit, {}):
        value = float(match[1]) * (_SUFFIXES[unit][suffix] if suffix else 1.0)
    else:
        return None
    return value if math.isfinite(value) else None


def example(unit: Unit) -> str:
    """How a number of this unit may be written."""
    return _EXAMPLES.get(unit, "12")


def tell(value: float | None, unit: Unit) -> str:
    """A number for people: "41 %", "3 min", "1,234 blocks"; "unknown" for None."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if unit is Unit.RATIO:
        percent = 100 * value
        return f"{percent:.0f} %" if abs(percent) >= 10 or percent == round(percent) else f"{percent:.1f} %"
    if unit is Unit.SECONDS:
        return tell_seconds(value)
    if unit is Unit.BYTES:
        return _tell_bytes(value)
    if unit is Unit.BLOCKS:
        return f"{value:,.0f} {'block' if value == 1 else 'blocks'}"
    if unit is Unit.PER_MINUTE:
        return f"{_short(value)} a minute"
    if unit is Unit.FLAG:
        return "yes" if value else "no"
    return _short(value)


def tell_seconds(seconds: float) -> str:
    """ "45 s", "3 min", "1 h 20 min", "2 d 4 h"."""
    if seconds < 0:
        return f"-{tell_seconds(-seconds)}"
    if seconds < 10 and seconds != round(seconds):
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    hours = round(seconds / 3600)
    return f"{hours // 24} d" + (f" {hours % 24} h" if hours % 24 else "")


def _tell_bytes(value: float) -> str:
    for name, size in reversed(_BYTES.items()):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.2g}"
