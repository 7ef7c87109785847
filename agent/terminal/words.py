"""Numbers and foreign text in a terminal: one way to write each, and the characters that the terminal can show."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from agent.wire import BlockStateName
from alerts.units import Unit, tell

STATE_ORDER: tuple[BlockStateName, ...] = ("used", "pinned", "reserved", "unknown", "cached", "free")
"""Held blocks first, allocatable ones last, as in the dashboard."""

_UNSHOWABLE = frozenset(
    {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
)  # controls, marks of direction, lone surrogates, ...


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters for one kind of terminal. `states` are told apart without colours."""

    encoding: str
    states: dict[BlockStateName, str]
    levels: str  # of a sparkline, lowest first
    undefined: str  # a value that there is none of, in a sparkline
    rule: str
    dash: str
    dot: str
    more: str  # at a cut
    chosen: str

    def plain(self, text: str) -> str:
        """Text from outside as this terminal can show it: no control characters, nothing that it has no sign for."""
        shown = "".join("?" if unicodedata.category(one) in _UNSHOWABLE else one for one in text)
        return shown.encode(self.encoding, "replace").decode(self.encoding)

    def fit(self, text: str, width: int) -> str:
        """Plain text in exactly `width` columns; what is too long keeps both ends, since names differ at either."""
        shown = self.plain(text)
        if cell_len(shown) > width:
            tail = max(0, width - len(self.more)) // 2
            head = max(0, width - len(self.more) - tail)
            shown = set_cell_size(shown, head) + self.more[:width] + (_last(shown, tail) if tail else "")
        return set_cell_size(shown, width)


UNICODE = Glyphs(
    encoding="utf-8",
    states={"used": "█", "cached": "▒", "free": "·", "pinned": "P", "reserved": "x", "unknown": "?"},
    levels="▁▂▃▄▅▆▇█",
    undefined=" ",
    rule="─",
    dash="–",
    dot="·",
    more="…",
    chosen="▶",
)
ASCII = Glyphs(
    encoding="ascii",
    states={"used": "#", "cached": "+", "free": ".", "pinned": "P", "reserved": "x", "unknown": "?"},
    levels="_.:-=+*#",
    undefined=" ",
    rule="-",
    dash="-",
    dot="|",
    more="...",
    chosen=">",
)

STYLES: dict[BlockStateName, str] = {
    "used": "blue",
    "cached": "yellow",
    "free": "bright_black",
    "pinned": "bold magenta",
    "reserved": "white",
    "unknown": "bold red",
}


def fold(line: Text, width: int) -> list[Text]:
    """A line that is too long as several, broken between words: what is cut off says nothing."""
    return list(line.wrap(Console(width=width), max(10, width)))


def count(value: int) -> str:
    return f"{value:,}"


def rate(value: float | None, glyphs: Glyphs) -> str:
    """0 to 1 with three digits; an undefined one is a dash, not 0."""
    return glyphs.dash if value is None else f"{value:.3f}"


def size(value: int | None) -> str:
    return tell(value, Unit.BYTES)


def seconds(value: float | None) -> str:
    return tell(value, Unit.SECONDS)


def share(part: int, whole: int, glyphs: Glyphs) -> str:
    """In percent, never a rounded 0 % for something that is there."""
    if whole == 0:
        return glyphs.dash
    percent = 100 * part / whole
    return "<0.1 %" if 0 < percent < 0.1 else f"{percent:.1f} %"


def _last(text: str, width: int) -> str:
    """The end of `text` in at most `width` columns."""
    kept: list[str] = []
    for one in reversed(text):
        width -= cell_len(one)
        if width < 0:
            break
        kept.append(one)
    return "".join(reversed(kept))
