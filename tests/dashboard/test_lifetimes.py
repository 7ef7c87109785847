"""How long blocks live, in words and bars, and how full pages are."""

from __future__ import annotations

import re

import pytest

from agent.wire.profile import Durations, PageOccupancy
from dashboard.lifetimes import NOT_IN_MAP, NOTHING_YET, durations_html, pages_html, quantile_words

BOUNDS = [0.5, 1.0, 2.0, 64.0]


def found(*counts: int) -> Durations:
    return Durations(bounds_seconds=BOUNDS, counts=list(counts), sum_seconds=sum(counts) * 1.5)


@pytest.mark.parametrize(
    ("counts", "half", "late"),
    [
        ((0, 10, 0, 0, 0), "within 1.0 s", "within 1.0 s"),
        ((5, 5, 0, 0, 0), "within 500 ms", "within 1.0 s"),
        ((0, 0, 18, 1, 1), "within 2.0 s", "within 1 min 4 s"),
        ((0, 0, 1, 0, 9), "beyond 1 min 4 s", "beyond 1 min 4 s"),
    ],
)
def test_quantiles_are_bounds(counts: tuple[int, ...], half: str, late: str) -> None:
    assert quantile_words(found(*counts), 0.5) == half
    assert quantile_words(found(*counts), 0.95) == late


def test_bars_stand_for_what_occurs() -> None:
    html = durations_html("Residency", "Held.", found(0, 3, 0, 6, 0))
    assert re.findall(r'title="(\d+) of', html) == ["3", "0", "6"]
    assert "9 blocks" in html
    assert "1 block<" in durations_html("Residency", "Held.", found(0, 1, 0, 0, 0))
    assert "mean 1.5 s" in html


def test_nothing_is_said() -> None:
    assert NOT_IN_MAP in durations_html("Residency", "Held.", None)
    assert NOTHING_YET in durations_html("Residency", "Held.", found(0, 0, 0, 0, 0))


def test_pages() -> None:
    pages = PageOccupancy(
        page_bytes=2**21,
        block_bytes=2**16,
        per_layer=True,
        blocks_per_page=32,
        pages=100,
        free_pages=60,
        evictable_pages=10,
        by_held_tenth=[0, 0, 5, 0, 0, 0, 0, 0, 0, 25],
    )
    html = pages_html(pages)
    assert "60 (60.0 %) are free, 10 hold evictable prefixes alone" in html
    assert "5 pages are held to 20 to 30 %" in html
    assert "2.00 MiB" in html
    one = pages.model_copy(
        update={"free_pages": 1, "evictable_pages": 1, "by_held_tenth": [1, *[0] * 9], "blocks_per_page": 1}
    )
    told = pages_html(one)
    assert "1 block of a layer&#x27;s tensor a page. 1 (1.0 %) is free, 1 holds evictable prefixes alone" in told
    for words in ("1 page holds nothing", "1 page holds evictable prefixes", "1 page is held to 0 to 10 %"):
        assert f'title="{words}' in told
    assert "Not known" in pages_html(None)
