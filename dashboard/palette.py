"""Colours of the block states, told apart by colour-blind eyes in both themes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ThemeName = Literal["light", "dark"]

STATE_ORDER = ("used", "pinned", "reserved", "unknown", "cached", "free")
"""Held blocks first, allocatable ones last: the order of stripes in a cell and of rows in the legend."""

STATE_MEANINGS = {
    "used": ("running", "referenced by running sequences"),
    "cached": ("evictable", "reference count 0, kept as a prefix until evicted"),
    "free": ("empty", "holds nothing"),
    "pinned": ("in transfer", "holds data that must not move now"),
    "reserved": ("never given out", "not allocatable, as the null block of vLLM"),
    "unknown": ("newer than this agent", "a state that this agent does not know"),
}
"""For the legend: a word or two, and a sentence."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one theme as #rrggbb. `states` has one for each name in STATE_ORDER.

    Every two of free, cached, used, pinned and reserved are at least 20 apart by CIEDE2000, seen normally and under
    simulated deuteranopia; a test computes it. `unknown` is outside that promise: it must only be seen at all.
    """

    name: ThemeName
    states: dict[str, str]
    text: str
    muted: str
    grid: str
    line: str  # fragmentation over free + cached
    line_second: str  # fragmentation over free alone
    threshold: str
    hover_background: str
    ground: str  # of the page
    series: tuple[str, ...]  # of things without an order, as the largest owners
    others: str  # of those that have no colour of their own
    shades: tuple[str, ...]  # six steps from little to much


LIGHT = Theme(
    name="light",
    states={
        "free": "#e3e8ee",
        "cached": "#f0a92e",
        "used": "#2b6cb8",
        "pinned": "#7a1250",
        "reserved": "#8b95a1",
        "unknown": "#d92d20",
    },
    text="#1f2933",
    muted="#5f6b7a",
    grid="#e3e8ee",
    line="#1f2933",
    line_second="#8b95a1",
    threshold="#c2410c",
    hover_background="#ffffff",
    ground="#ffffff",
    series=("#2b6cb8", "#d1495b", "#2a9d6f", "#8e5bbf", "#b8860b", "#00a0b0", "#e0559a", "#5a6f1e"),
    others="#a9b2bd",
    shades=("#fde725", "#90d743", "#35b779", "#21918c", "#31688e", "#443983"),
)

DARK = Theme(
    name="dark",
    states={
        "free": "#2b3440",
        "cached": "#e9a83a",
        "used": "#3f8cf0",
        "pinned": "#f3d9ff",
        "reserved": "#8a8078",
        "unknown": "#ff5a4f",
    },
    text="#e6eaef",
    muted="#9aa5b1",
    grid="#2b3440",
    line="#e6eaef",
    line_second="#8a94a0",
    threshold="#fb923c",
    hover_background="#1b222c",
    ground="#0e1117",
    series=("#3f8cf0", "#f0707f", "#3fc38d", "#b48be8", "#d9a520", "#2cc5d5", "#f584bd", "#a3bd4a"),
    others="#6b7684",
    shades=("#fde725", "#90d743", "#35b779", "#21918c", "#3b7cab", "#6a5fc0"),
)


def theme_named(name: str | None) -> Theme:
    """The theme of the browser; light until the browser has said which it shows."""
    return DARK if name == "dark" else LIGHT
