"""How blocks live: how long they are held, lie idle and wait for reuse, and how full pages of memory are. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from agent.wire.profile import Durations, PageOccupancy
from dashboard.widgets import bars_html, heading_html, note_html
from dashboard.wording import count, counted, duration, noun, share, size

LABELLED_EVERY = 4  # bars; more would run into each other
NOT_IN_MAP = "Not in this map."
NOTHING_YET = "Nothing yet since the engine started."


def durations_html(title: str, meaning: str, found: Durations | None) -> str:
    """One histogram: bars by powers of two, and where its middle and its end lie."""
    total = sum(found.counts) if found else 0
    if found is None or total == 0:
        return heading_html(title) + note_html(NOT_IN_MAP if found is None else NOTHING_YET)
    first = next(i for i, number in enumerate(found.counts) if number)
    last = max(i for i, number in enumerate(found.counts) if number)
    shown = range(first, last + 1)
    bounds = [0.0, *found.bounds_seconds]
    titles = [f"{count(found.counts[i])} {_between(bounds, i)}" for i in shown]
    labels = [_short(bounds[i]) if (i - first) % LABELLED_EVERY == 0 else "" for i in shown]
    middle, late = (quantile_words(found, part) for part in (0.5, 0.95))
    mean = duration(found.sum_seconds / total)
    return (
        heading_html(title, counted(total, "block"))
        + bars_html([found.counts[i] for i in shown], labels, titles, numbers=False)
        + note_html(f"{meaning} Half {middle}, 95 % {late}, mean {mean}.")
    )


def quantile_words(found: Durations, part: float) -> str:
    """The bound below which that part of all values lies. There are values."""
    wanted, seen = part * sum(found.counts), 0
    for bound, number in zip(found.bounds_seconds, found.counts, strict=False):
        seen += number
        if seen >= wanted:
            return f"within {_short(bound)}"
    return f"beyond {_short(found.bounds_seconds[-1])}"


def _between(bounds: Sequence[float], index: int) -> str:
    below = f"of {_short(bounds[index])} to {_short(bounds[index + 1])}" if index + 1 < len(bounds) else ""
    return below or f"longer than {_short(bounds[-1])}"


def _short(seconds: float) -> str:
    return f"{round(1000 * seconds)} ms" if seconds < 1 else duration(seconds)


def pages_html(pages: PageOccupancy | None) -> str:
    """How many pages an elastic pool could give back, and how full the others are."""
    if pages is None:
        return heading_html("Pages of memory") + note_html("Not known: the map tells no bytes, or means nothing now.")
    heights = [pages.free_pages, pages.evictable_pages, *pages.by_held_tenth]
    labels = ["free", "", *("" if i % 3 else f"{10 * i + 10} %" for i in range(10))]
    titles = [
        f"{counted(pages.free_pages, 'page holds', 'pages hold')} nothing and could be given back now",
        f"{counted(pages.evictable_pages, 'page holds', 'pages hold')} evictable prefixes alone",
        *(
            f"{counted(n, 'page is', 'pages are')} held to {10 * i} to {10 * i + 10} %"
            for i, n in enumerate(pages.by_held_tenth)
        ),
    ]
    what = "a layer's tensor" if pages.per_layer else "the pool"
    return (
        heading_html("Pages of memory", f"{count(pages.pages)} of {size(pages.page_bytes)}")
        + bars_html(heights, labels, titles, numbers=False)
        + note_html(
            f"{counted(pages.blocks_per_page, 'block')} of {what} a page. {count(pages.free_pages)} "
            f"({share(pages.free_pages, pages.pages)}) {noun(pages.free_pages, 'is', 'are')} free, "
            f"{counted(pages.evictable_pages, 'holds', 'hold')} evictable prefixes alone; the others by the share of "
            "their blocks that is held. One held block keeps a page."
        )
    )
