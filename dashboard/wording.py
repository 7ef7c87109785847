"""Numbers and names in the words of the page: one way to write bytes, durations, rates, and what others named."""

from __future__ import annotations

import html
import unicodedata

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NOT_KNOWN = "\N{EM DASH}"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # control and format characters, halves of others, breaks
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # that show as nothing, or as a space
_VARIANTS = (("\u180b", "\u180f"), ("\ufe00", "\ufe0f"), ("\U000e0000", "\U000e0fff"))


def visible(text: str) -> str:
    """Text from outside with a mark in place of whatever would hide in it, or make it read otherwise than it is
    written: control characters, marks of direction, joiners and blanks without width. Line feeds and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if _hides(one) else one for one in text)


def _hides(one: str) -> bool:
    if one in "\n\t":
        return False
    return unicodedata.category(one) in _HIDDEN or one in _BLANK or any(low <= one <= high for low, high in _VARIANTS)


def escape(text: str) -> str:
    """Text from outside as HTML that shows it, and does nothing else."""
    return html.escape(visible(text))


def in_figure(text: str) -> str:
    """Text from outside as Plotly shows it in a hover: it reads some HTML there, links among it."""
    return html.escape(visible(text), quote=False)


def count(value: int | None) -> str:
    """1234567 as 1,234,567."""
    return NOT_KNOWN if value is None else f"{value:,}"


def noun(number: int, one: str, many: str | None = None) -> str:
    """The word for so many: `many` is `one` with an s where it is not given."""
    return one if abs(number) == 1 else f"{one}s" if many is None else many


def counted(value: int | None, one: str, many: str | None = None) -> str:
    """1 block, 1,234 blocks; `one` and `many` may have the verb with them: 1 alert fires, 2 alerts fire."""
    return NOT_KNOWN if value is None else f"{count(value)} {noun(value, one, many)}"


def power_of_two(value: int) -> str:
    """A power of two in at most four characters: 512, 4K, 128K, 2M."""
    for unit, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if value >= factor:
            return f"{value // factor}{unit}"
    return str(value)


def size(value: int | None) -> str:
    """Bytes in the largest binary unit that leaves at least 1, three significant digits."""
    if value is None:
        return NOT_KNOWN
    scaled, unit = float(value), 0
    while scaled >= 1024 and unit < len(_BINARY) - 1:
        scaled, unit = scaled / 1024, unit + 1
    if unit == 0:
        return f"{value} B"
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {_BINARY[unit]}"


def duration(seconds: float | None) -> str:
    """Seconds as an operator says them: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return NOT_KNOWN
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def rate(value: float | None) -> str:
    """A ratio of 0 to 1 with three digits; an undefined one is a dash, not 0."""
    return NOT_KNOWN if value is None else f"{value:.3f}"


def share(part: int, whole: int) -> str:
    """A share in percent, never a rounded 0 % for something that is there."""
    if whole == 0:
        return NOT_KNOWN
    percent = 100 * part / whole
    return "<0.1 %" if 0 < percent < 0.1 else f"{percent:.1f} %"


def shortened(name: str, longest: int) -> str:
    """Long ids keep both ends: engines put the telling part at either."""
    if len(name) <= longest:
        return name
    tail = (longest - 1) // 2
    return f"{name[: longest - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{name[-tail:]}"
