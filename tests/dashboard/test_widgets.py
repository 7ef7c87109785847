"""The page's own HTML: right numbers, nothing unescaped, nothing undefined shown as 0."""

from __future__ import annotations

from collections.abc import Callable

from agent.wire import BlockCounts, EngineSummary, Forecast, Fragmentation, Request, RequestPage
from dashboard import widgets
from dashboard.palette import LIGHT

Summary = Callable[..., EngineSummary]


def tile(engine: EngineSummary, label: str) -> widgets.Tile:
    return next(tile for tile in widgets.tiles_of(engine, 0.3) if tile.label == label)


def test_absolute_sizes_stand_beside_rates(summary: Summary) -> None:
    run, allocatable, waste = (tile(summary(), name) for name in ("Largest run", "Allocatable", "Tail waste"))
    assert (run.value, run.detail) == ("250 blocks", "4,000 tokens · 250 MiB")
    assert (allocatable.value, allocatable.detail) == ("500 blocks", "50.1 % · 500 MiB · 7 runs")
    assert (waste.value, waste.detail) == ("50.0 MiB", "800 slots · 10.0 % of held")


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
    assert 'title="5,000 runs of 1 to 1 blocks"' in html
    assert 'title="1 runs of 4 to 7 blocks"><b>1</b><i style="height:2%">' in html
    assert '<b></b><i style="height:0%">' in html
