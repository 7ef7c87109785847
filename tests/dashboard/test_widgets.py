"""The page's own HTML: right numbers, nothing unescaped, nothing undefined shown as 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.wire import BlockCounts, EngineSummary, Forecast, Fragmentation, Request, RequestPage
from dashboard import widgets
from dashboard.palette import LIGHT

Summary = Callable[..., EngineSummary]


def tile(engine: EngineSummary, label: str) -> widgets.Tile:
    return next(tile for tile in widgets.tiles_of(engine, 0.3) if tile.label == label)


def test_absolute_sizes_stand_beside_rates(summary: Summary) -> None:
    run, allocatable, waste = (tile(summary(), name) for name in ("Largest run", "Allocatable", "Tail waste"))
    assert (run.value, run.detail) == ("250 blocks", "4,000 tokens · 250 MiB")
    assert (allocatable.value, allocatable.detail) == ("500 blocks", "50.1 % · 500 MiB · headroom 100")
    assert (waste.value, waste.detail) == ("50.0 MiB", "800 slots · 10.0 % of held")


def test_one_of_each_is_no_plural(summary: Summary) -> None:
    one = summary().fragmentation.model_copy(update={"largest_allocatable_run": 1})
    least = BlockCounts(free=1, cached=0, used=1, pinned=0, reserved=0)
    engine = summary(blocks=least, fragmentation=one, total_blocks=1, block_tokens=1, tail_waste_tokens=1)
    assert (tile(engine, "Largest run").value, tile(engine, "Allocatable").value) == ("1 block", "1 block")
    assert tile(engine, "Largest run").detail == "1 token · 1.00 MiB"
    assert tile(engine, "Tail waste").detail.startswith("1 slot · ")
    assert "1 block × 1 token × 1.00 MiB" in widgets.identity_html(engine)


def test_fragmentation_above_the_threshold_is_marked(summary: Summary) -> None:
    assert tile(summary(), "Fragmentation F").tone == "bad"
    calm = summary().fragmentation.model_copy(update={"rate": 0.3})
    assert tile(summary(fragmentation=calm), "Fragmentation F").tone == ""


def test_undefined_fragmentation_is_a_dash(summary: Summary) -> None:
    full = Fragmentation(
        rate=None,
        strict_rate=None,
        largest_allocatable_run=0,
        largest_free_run=0,
        allocatable_runs=0,
        run_length_histogram=[],
    )
    engine = summary(fragmentation=full, tail_waste_tokens=None, tail_waste_bytes=None)
    assert tile(engine, "Fragmentation F").value == "—"
    assert tile(engine, "Tail waste").detail == "not in the map"
    assert "No allocatable run" in widgets.runs_html([])


def test_exhaustion_comes_with_its_reason(summary: Summary) -> None:
    assert tile(summary(), "Exhaustion").value == "in 4 min 10 s"
    assert tile(summary(), "Exhaustion").detail == "falling by 2 blocks a second"
    calm = summary(forecast=Forecast(exhaustion_seconds=None, reason="steady"))
    assert (tile(calm, "Exhaustion").value, tile(calm, "Exhaustion").detail) == ("not in sight", "steady")


@pytest.mark.parametrize(
    ("forecast", "value", "detail", "tone"),
    [
        pytest.param(
            {"headroom_seconds": 0.0, "admission_blocked": True, "admission_reason": "137 wait; 0 blocks above it"},
            "now: new sequences wait",
            "137 wait; 0 blocks above it",
            "alarm",
            id="blocked",
        ),
        pytest.param(
            {"headroom_seconds": 0.0},
            "headroom reached",
            "a new sequence would wait · why",
            "bad",
            id="at the headroom",
        ),
        pytest.param(
            {"exhaustion_seconds": 300.0, "headroom_seconds": 50.0},
            "in 5 min",
            "headroom in 50 s · why",
            "bad",
            id="headroom soon",
        ),
        pytest.param(
            {"exhaustion_seconds": 300.0, "headroom_seconds": 0.0},
            "in 5 min",
            "headroom reached · why",
            "bad",
            id="beyond the headroom",
        ),
        pytest.param({"exhaustion_seconds": 90.0}, "in 1 min 30 s", "why", "", id="falling"),
        pytest.param({"exhaustion_seconds": 0.0}, "now", "why", "bad", id="nothing left"),
        pytest.param({"known": False}, "—", "why", "", id="too few samples"),
    ],
)
def test_exhaustion_says_what_is_nearest(
    summary: Summary, forecast: dict[str, Any], value: str, detail: str, tone: str
) -> None:
    found = tile(summary(forecast=Forecast(**({"exhaustion_seconds": None, "reason": "why"} | forecast))), "Exhaustion")
    assert (found.value, found.detail, found.tone) == (value, detail, tone)


def test_a_pool_without_headroom_has_one_moment(summary: Summary) -> None:
    forecast = Forecast(exhaustion_seconds=40.0, headroom_seconds=40.0, reason="why")
    found = tile(summary(forecast=forecast, headroom_blocks=0), "Exhaustion")
    assert (found.value, found.detail, found.tone) == ("in 40 s", "why", "bad")


@pytest.mark.parametrize("state", ["stalled", "stale", "gone", "unreadable"])
def test_an_engine_that_does_not_go_on_has_no_forecast(summary: Summary, state: str) -> None:
    blocked = Forecast(exhaustion_seconds=3.0, reason="falls", admission_blocked=True, admission_reason="they wait")
    found = tile(summary(state=state, forecast=blocked), "Exhaustion")
    assert (found.value, found.detail, found.tone) == ("—", f"the engine is {state}", "")


def test_a_queue_is_coloured_where_it_grows_or_waits_for_blocks(summary: Summary) -> None:
    fields_of_each: list[dict[str, Any]] = [{}, {"queue_grows": True}, {"queue_grows": True, "admission_blocked": True}]
    calm, grows, blocked = (
        tile(summary(forecast=Forecast(exhaustion_seconds=None, reason="", **fields)), "Requests")
        for fields in fields_of_each
    )
    assert (calm.detail, calm.detail_tone) == ("1 waiting", "")
    assert (grows.detail, grows.detail_tone) == ("1 waiting, and ever more", "bad")
    assert blocked.detail_tone == "alarm"
    assert '<div class="kv-detail alarm"' in widgets.tiles_html([blocked])


def test_the_age_of_the_oldest_pin_is_in_its_row(summary: Summary) -> None:
    assert "pinned<small>oldest 2.0 s</small>" in widgets.states_html(summary(), LIGHT)
    assert "pinned<small>in transfer</small>" in widgets.states_html(summary(oldest_pinned_seconds=None), LIGHT)


def test_legend_shows_five_states_and_the_unknown_only_where_there_are_any(summary: Summary) -> None:
    html = widgets.states_html(summary(), LIGHT)
    for name in ("used", "cached", "free", "pinned", "reserved"):
        assert f"background:{LIGHT.states[name]}" in html
    assert "unknown" not in html
    assert "<td>480</td><td>48.0 %</td><td>7,680</td><td>480 MiB</td>" in html
    odd = summary(blocks=BlockCounts(free=0, cached=0, used=0, pinned=0, reserved=0, unknown=1000))
    assert "unknown" in widgets.states_html(odd, LIGHT)


def test_ids_from_outside_are_escaped(summary: Summary) -> None:
    attack = '<img src=x onerror="alert(1)">'
    request = Request(
        request_id=attack,
        lora="",
        cache_salt="",
        tokens=1,
        blocks=1,
        exclusive_blocks=None,
        runs=None,
        tail_waste_tokens=None,
        age_seconds=1.0,
    )
    page = RequestPage(id="x", sequence=2, total=12, requests=[request])
    pages = [
        widgets.identity_html(summary(model=attack, kind=attack, policy=attack)),
        widgets.holders_html(page, 1024),
        widgets.tiles_html(widgets.tiles_of(summary(forecast=Forecast(exhaustion_seconds=None, reason=attack)), 0.3)),
        widgets.heading_html(attack, attack),
    ]
    for html in pages:
        assert "<img" not in html
        assert "&lt;img" in html
    assert "of 12 sequences" in pages[1]


def test_sequences_that_wait_are_no_holders() -> None:
    waiting = Request(
        request_id="waits",
        lora="",
        cache_salt="",
        tokens=0,
        blocks=0,
        exclusive_blocks=0,
        runs=0,
        tail_waste_tokens=0,
        age_seconds=3.0,
    )
    page = RequestPage(id="x", sequence=2, total=1, requests=[waiting])
    assert widgets.holders_html(page, 1024) == '<p class="kv-note">No sequence holds a block.</p>'


def test_every_run_length_has_a_bar_that_can_be_seen() -> None:
    html = widgets.runs_html([5000, 0, 1])
    assert 'title="5,000 runs of 1 block"' in html
    assert 'title="1 run of 4 to 7 blocks"><b>1</b><i style="height:2%">' in html
    assert '<b></b><i style="height:0%">' in html
