"""The views of time, compaction and requests in a real browser, beside the API.

The window holds a restart, a run that moved blocks, an alert that fires and one that is over.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from agent.alerting.rule_files import default_rules
from agent.client import AgentClient
from dashboard import figures, past, timeline, wording
from dashboard.palette import DARK, LIGHT

pytestmark = pytest.mark.browser

UPDATE = os.environ.get("KVATLAS_UPDATE_SCREENSHOTS") == "1"
TOKEN = "the-operators-secret-token"
TIMELINE = ".st-key-time_figure_box .kvatlas-figure"
MAP = ".st-key-view_time .st-key-map_box .kvatlas-figure"
RULES = """
rules:
  - name: fragmentation-stays
    for: 1s
  - name: engine-gone
    for: 0s
"""


@dataclass
class World:
    client: AgentClient
    pool: str
    still: str
    home: str
    restarted_unix: float


@pytest.fixture(scope="module")
def world(
    shared_stage: Any, tmp_path_factory: pytest.TempPathFactory, eventually: Callable[..., Any]
) -> Iterator[World]:
    """An engine that was killed and started anew, and then had its blocks moved; a pool that stands still; an agent
    that keeps the past and has a token."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "token").write_text(TOKEN)
    others = [rule.name for rule in default_rules() if rule.name not in ("engine-gone", "fragmentation-stays")]
    (folder / "rules.yaml").write_text(f"disable: [{', '.join(others)}]\n{RULES}")
    options = {"policy": "vllm", "churn": 60, "live": 0.45, "relocation": True, "consumer": "transfer"}
    still = shared_stage.pool("still", 2500)
    still.send("churn 60")
    mover = shared_stage.mover("mover", **options)
    url, _ = shared_stage.agent(
        interval_seconds="0.2",
        compaction="off",
        state_dir=str(folder / "state"),
        token_file=str(folder / "token"),
        alert_rules=str(folder / "rules.yaml"),
    )
    still.send("hold")
    client = AgentClient(url, timeout_seconds=60.0)

    def firing() -> set[str]:
        return {one.rule for one in client.alerts().open if one.state == "firing" and "mover" in str(one.labels)}

    eventually(lambda: "fragmentation-stays" in firing(), "fragmentation fires")
    eventually(lambda: client.frame_times(mover.id, 0, 1e10).total >= 3, "frames are kept")
    mover.process.kill()
    mover.process.wait()
    eventually(lambda: "engine-gone" in firing(), "it is said to be gone")
    eventually(lambda: client.black_boxes(mover.id).boxes, "there is a black box")
    shared_stage.mover("mover", **options)
    eventually(lambda: "engine-gone" in {one.rule for one in client.alerts().recent}, "it is back")
    marks = eventually(
        lambda: [one for one in client.marks(mover.id, 0, 1e10).marks if "started anew" in one.text], "so says a mark"
    )
    with client.with_token(TOKEN) as writer:
        assert writer.compact(mover.id).moved_blocks > 0
    eventually(lambda: "fragmentation-stays" in firing(), "fragmentation fires again")
    eventually(lambda: is_told(client, mover.id), "all of it is marked")
    home, _ = shared_stage.dashboard(url)
    yield World(client, mover.id, still.id, home, marks[0].time_unix)
    client.close()


def is_told(client: AgentClient, pool: str) -> bool:
    """Do the marks hold all that the window is to hold? They are written a moment after what they tell of."""
    found = timeline.episodes_of(client.marks(pool, 0, 1e10, holds=False).marks, 0)
    goes_on = {one.end_unix is None for one in found if one.is_span}
    return {"restart", "run", "gone"} <= {one.what for one in found} and goes_on == {True, False}


def plot(page: Page, figure: str, expression: str) -> Any:
    """The value of an expression in which `plot` is that figure's Plotly node, once it is drawn."""
    page.locator(f"{figure}[data-drawn]").wait_for()
    return page.evaluate(
        f"figure => {{ const plot = document.querySelector(figure + ' .kvatlas-plot'); return {expression}; }}", figure
    )


def until(page: Page, figure: str, expression: str, argument: Any = None) -> None:
    """Until the expression, in which `plot` is that figure's node and `wanted` the argument, is true."""
    page.wait_for_function(
        f"""([figure, wanted]) => {{ const plot = document.querySelector(figure + ' .kvatlas-plot');
        return plot?.layout && {expression}; }}""",
        arg=[figure, argument],
    )


def instant(page: Page) -> float | None:
    named = parse_qs(urlsplit(page.url).query).get("at")
    return float(named[0]) if named else None


def await_instant(page: Page, wanted: float) -> None:
    page.wait_for_url(lambda url: f"at={wanted:.3f}" in url)
    expect(page.locator(".st-key-view_time").get_by_text(past.moment(wanted)).first).to_be_visible()


def keep_picture(page: Page, name: str, height: int, repository_root: Path, tmp_path: Path) -> None:
    """With KVATLAS_UPDATE_SCREENSHOTS=1 the picture of the documentation."""
    page.set_viewport_size({"width": 1280, "height": height})
    folder = repository_root / "docs" / "images" if UPDATE else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"dashboard-{name}.png")


# ---- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_instant_is_shown_as_the_api_tells_it(
    scheme: str,
    world: World,
    window: Callable[..., Any],
    eventually: Callable[..., Any],
    repository_root: Path,
    tmp_path: Path,
) -> None:
    at = world.restarted_unix + 2
    opened = window(world.home, color_scheme=scheme)
    page = opened.open(world.pool, view="time", at=f"{at:.3f}")
    frame = world.client.frame(world.pool, at)
    picture = figures.block_map(
        past.cells_of(frame), DARK if scheme == "dark" else LIGHT, incarnation=frame.incarnation
    ).layout.images[0]
    until(page, MAP, "plot.layout.images[0].source === wanted", picture.source)
    tiles = dict(
        zip(
            page.locator(".st-key-view_time .kv-few .kv-label").all_inner_texts(),
            page.locator(".st-key-view_time .kv-few .kv-value").all_inner_texts(),
            strict=True,
        )
    )
    assert tiles == {tile.label: tile.value for tile in past.tiles_of(frame)}
    assert frame.blocks is not None
    row = page.locator(".st-key-view_time .kv-states tr").filter(has_text="used")
    assert row.locator("td").nth(1).inner_text() == wording.count(frame.blocks.used)

    start, end = (one / 1000 for one in plot(page, TIMELINE, "plot.layout.xaxis.range"))
    happened = timeline.episodes_of(world.client.marks(world.pool, start, end, holds=False).marks, start)
    shown = plot(page, TIMELINE, "plot.data.filter(one => one.mode === 'markers').flatMap(one => one.text)")
    assert shown == [one.text for one in happened if not one.is_span]
    assert {"restart", "run", "gone"} <= {one.what for one in happened}
    spans = plot(page, TIMELINE, "plot.data.filter(one => one.mode === 'lines+markers').map(one => Array.from(one.x))")
    alerts = [one for one in happened if one.is_span]
    assert [span[0] for span in spans] == [round(1000 * one.start_unix) for one in alerts]
    assert [one.end_unix is None for one in alerts] == [span[1] == round(1000 * end) for span in spans]
    assert {True, False} == {one.end_unix is None for one in alerts}  # one fires, one is over
    mean = plot(page, TIMELINE, "Array.from(plot._fullData.find(one => one.name === 'F').y)")
    points = world.client.history(world.pool, "fragmentation", end - start, 300, until_unix=end).points
    told = [point.mean for point in points][:-2]  # the last ones went on after the page had asked
    assert None in told  # what was not sampled, before the agent began, is a gap
    for drawn, one in zip(mean, told, strict=False):
        # JSON has no NaN: the browser hands it over as null, or as what it is.
        assert (drawn is None or math.isnan(drawn)) if one is None else drawn == pytest.approx(one, rel=1e-6)
    expect(page.get_by_role("button", name="Open the last one")).to_be_visible()  # the last part of the page is there
    opened.check()
    opened.check_keyboard()
    if scheme == "light" and UPDATE:  # once there are some minutes to be seen
        eventually(lambda: time.time() > world.restarted_unix + 75, "some minutes have passed", 100)
        page = window(world.home).open(world.pool, view="time", at=f"{at:.3f}", span="2 min")
        page.locator(f"{TIMELINE}[data-drawn]").wait_for()
        keep_picture(page, "time", 1330, repository_root, tmp_path)
    page.set_viewport_size({"width": 1920, "height": 1080})
    opened.check()


def test_the_scrubber_goes_from_frame_to_frame(world: World, window: Callable[..., Any]) -> None:
    opened = window(world.home)
    page = opened.open(world.pool, view="time")
    expect(page.get_by_text("Live: the newest one is shown.")).to_be_visible()
    expect(page.get_by_role("button", name="Back to live")).to_be_disabled()
    opened.after_refreshes(2, MAP)  # a refresh is no choice: it stays live
    assert instant(page) is None
    opened.to_view("alerts")  # nor is coming back from another view
    expect(page.locator(".st-key-view_alerts .kv-tile").first).to_be_visible()
    opened.to_view("time")
    opened.after_refreshes(2, MAP)
    assert instant(page) is None
    page.get_by_role("button", name="Earlier").click()
    page.wait_for_url("**at=*")
    at = instant(page)
    assert at is not None
    await_instant(page, at)
    times = world.client.frame_times(world.pool, at - 30, at + 1).times_unix
    index = times.index(at)
    page.get_by_role("button", name="Earlier").click()
    await_instant(page, times[index - 1])
    page.get_by_role("button", name="Later").click()
    await_instant(page, at)
    page.get_by_role("slider").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    await_instant(page, times[index - 3])
    page.get_by_role("button", name="Play").click()  # to the end of the range, where it stops by itself
    expect(page.get_by_role("button", name="Later")).to_be_disabled()
    expect(page.get_by_role("button", name="Play")).to_be_enabled()
    played = instant(page)
    assert played is not None
    assert played >= at
    page.get_by_role("button", name="Back to live").click()
    page.wait_for_url(lambda url: "at=" not in url)
    opened.after_refreshes(2, MAP)
    assert instant(page) is None


def test_a_mark_leads_to_its_instant_and_the_range_to_others(world: World, window: Callable[..., Any]) -> None:
    opened = window(world.home)
    page = opened.open(world.pool, view="time", at=f"{world.restarted_unix:.3f}")
    table = page.locator(".st-key-time_marks")
    table.locator("canvas").first.wait_for()
    page.locator(f"{TIMELINE}[data-drawn]").wait_for()
    start, end = (one / 1000 for one in plot(page, TIMELINE, "plot.layout.xaxis.range"))
    newest = world.client.marks(world.pool, start, end, holds=False).marks[-1]
    first_box = {"x": 18.0, "y": 35 * 1.5}  # that is to be ticked in the first row, below the head
    table.locator('[data-testid="stDataFrame"]').click(position=first_box)
    page.wait_for_url(lambda url: f"at={newest.time_unix:.3f}" in url)
    page.get_by_text("1 h", exact=True).click()
    page.wait_for_url("**span=1+h*")
    until(page, TIMELINE, "plot.layout.xaxis.range[1] - plot.layout.xaxis.range[0] === 3600000")
    page.locator(".st-key-time_metrics").get_by_text("Tail waste").click()
    until(page, TIMELINE, "plot.data.some(one => one.name === 'Tail waste')")
    with page.expect_download() as download:
        page.locator(".st-key-export_time").get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert {row["metric"] for row in rows} == {*timeline.DEFAULT_METRICS, "Tail waste"}


def test_the_black_box_of_the_engine_that_died(world: World, window: Callable[..., Any]) -> None:
    opened = window(world.home)
    page = opened.open(world.pool, view="time", at=f"{world.restarted_unix:.3f}")
    page.get_by_role("button", name="Open the last one").click()
    (summary,) = world.client.black_boxes(world.pool).boxes
    page.wait_for_url(f"**box={summary.name}*")
    box = world.client.black_box(summary.name)
    assert box.map is not None
    part = page.locator(".st-key-black_boxes")
    expect(part.get_by_text(f"at {past.moment(summary.ended_unix)}")).to_be_visible()
    row = part.locator(".kv-states tr").filter(has_text="used")
    expect(row.locator("td").nth(1)).to_have_text(wording.count(sum(box.map.counts["used"])))
    expect(part.get_by_text(f"F {wording.rate(box.map.fragmentation.rate)}")).to_be_visible()
    page.locator(".st-key-box_map_box .kvatlas-figure[data-drawn]").wait_for()
    page.locator(".st-key-box_figure_box .kvatlas-figure[data-drawn]").wait_for()
    with page.expect_download() as download:
        part.get_by_role("button", name="JSON").click()
    rows = json.loads(Path(download.value.path()).read_text())["rows"]
    assert [(row["what"], row["block"]) for row in reversed(rows)] == [(one.kind, one.block) for one in box.events]
    opened.check()
    opened.check_keyboard()
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".st-key-box_map_box")).to_have_count(0)


# ---- compaction -----------------------------------------------------------------------------------------------------


def type_token(page: Page, token: str) -> None:
    page.locator(".st-key-view_compaction input[type=password]").fill(token)
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("button", name="Forget it")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_policy_and_its_runs_are_told(
    scheme: str, world: World, window: Callable[..., Any], repository_root: Path, tmp_path: Path
) -> None:
    opened = window(world.home, color_scheme=scheme)
    page = opened.open(world.pool, view="compaction")
    state = world.client.compaction(world.pool)
    expect(page.locator(".kv-verdict")).to_contain_text("hold off")
    expect(page.locator(".kv-verdict")).to_contain_text(state.reason)
    tile = page.locator(".st-key-compaction_state .kv-tile").filter(has_text="Consumers")
    expect(tile.locator(".kv-detail")).to_have_text("transfer")
    entry = next(one for one in world.client.compactions(world.pool).entries if one.action == "compact")
    row = page.locator(".kv-compactions tr").nth(1)
    expect(row.get_by_title("realised").first).to_have_text(wording.count(entry.result["moved_blocks"]))
    expect(row.get_by_title("predicted").first).to_have_text(wording.count(entry.result["planned_moves"]))
    page.get_by_role("button", name="Preview the plan").click()
    expect(page.locator(".st-key-compaction_actions .kv-facts")).to_contain_text("F ≤ 0.10")
    expect(page.get_by_role("button", name="Use it")).to_be_visible()
    expect(page.get_by_role("button", name="Run it now")).to_have_count(0)  # nothing is changed without a token
    opened.check()
    if scheme == "light":
        keep_picture(page, "compaction", 900, repository_root, tmp_path)
    opened.check_keyboard()
    page.set_viewport_size({"width": 1920, "height": 1080})
    opened.check()


def test_who_has_the_token_runs_switches_and_stops(
    world: World, window: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    opened = window(world.home)
    page = opened.open(world.pool, view="compaction")
    type_token(page, "not-the-token")
    page.get_by_role("button", name="Run it now").click()
    expect(page.get_by_text("The agent refused: the bearer token is missing or wrong")).to_be_visible()
    expect(page.get_by_role("button", name="Use it")).to_be_visible()  # it was forgotten
    type_token(page, TOKEN)
    page.get_by_role("button", name="Ask the engine for its plan").click()
    told = page.locator(".kv-run tr").filter(has_text="moves")
    expect(told.locator("td").nth(2)).to_have_text("\N{EM DASH}")
    before = len(world.client.compactions(world.pool, limit=1000).entries)
    page.get_by_role("button", name="Run it now").click()
    expect(told.locator("td").nth(2)).not_to_have_text("\N{EM DASH}")
    made = next(one for one in world.client.compactions(world.pool).entries if one.action == "compact")
    expect(told.locator("td").nth(2)).to_have_text(wording.count(made.result["moved_blocks"]))
    assert made.access == "token"
    assert len(world.client.compactions(world.pool, limit=1000).entries) > before

    page.get_by_role("button", name="Switch relocation on").click()
    expect(page.get_by_text("Relocating allocation is on in the engine.")).to_be_visible()
    assert world.client.compaction(world.pool).engine.relocation is True
    page.get_by_role("button", name="Switch relocation off").click()
    expect(page.get_by_text("Relocating allocation is off in the engine.")).to_be_visible()
    expect(page.get_by_text("The policy leaves relocation off: relocation was switched off by POST")).to_be_visible()
    assert world.client.compaction(world.pool).engine.relocation is False

    kill = page.get_by_role("button", name="Switch all moves off")
    expect(kill).to_be_disabled()
    page.get_by_text("I mean it:").click()
    expect(kill).to_be_enabled()
    opened.check_keyboard()
    kill.click()
    expect(page.get_by_text("Moves of live blocks are off in the engine.")).to_be_visible()
    assert world.client.compaction(world.pool).engine.moving is False

    assert TOKEN not in page.content()
    assert TOKEN not in page.url
    assert page.evaluate("() => JSON.stringify([localStorage, sessionStorage, document.cookie])").find(TOKEN) == -1
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("button", name="Run it now")).to_have_count(0)


# ---- requests -------------------------------------------------------------------------------------------------------


def rows_of(page: Page) -> list[list[str]]:
    table = page.locator(".kv-requests tbody tr")
    table.first.wait_for()
    rows: list[list[str]] = table.evaluate_all("rows => rows.map(row => [...row.cells].map(one => one.innerText))")
    return rows


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sequences_are_told_as_the_api_has_them(
    scheme: str, world: World, window: Callable[..., Any], repository_root: Path, tmp_path: Path
) -> None:
    opened = window(world.home, color_scheme=scheme)
    page = opened.open(world.still, view="requests")
    found = world.client.requests(world.still, 50)
    engine = world.client.engine(world.still)
    assert len(found.requests) > 20
    assert [(row[0], *row[3:8]) for row in rows_of(page)] == [
        (
            one.request_id,
            *(
                wording.count(value)
                for value in (one.blocks, one.owned_blocks, one.exclusive_blocks, one.runs, one.tail_waste_tokens)
            ),
        )
        for one in found.requests
    ]
    assert found.totals is not None
    assert found.totals.tail_waste_tokens == engine.tail_waste_tokens  # nothing but live sequences holds blocks here
    tile = page.locator(".st-key-view_requests .kv-tile").filter(has_text="Tail waste")
    expect(tile.locator(".kv-value")).to_have_text(wording.count(found.totals.tail_waste_tokens))
    expect(page.locator(".kv-groups").first).to_contain_text("without")
    opened.check()
    if scheme == "light":
        keep_picture(page, "requests", 900, repository_root, tmp_path)
    opened.check_keyboard()
    page.set_viewport_size({"width": 1920, "height": 1080})
    opened.check()


def test_sorted_filtered_and_linked(world: World, window: Callable[..., Any]) -> None:
    opened = window(world.home)
    page = opened.open(world.still, view="requests", sort="tail_waste_tokens", filter="request-00")
    wanted = world.client.requests(world.still, 50, sort="tail_waste_tokens", contains="request-00").requests
    assert [row[0] for row in rows_of(page)] == [one.request_id for one in wanted]
    page.get_by_role("combobox", name="Sort by").click()
    page.get_by_role("option", name="runs", exact=True).click()
    page.wait_for_url("**sort=runs*")
    by_runs = world.client.requests(world.still, 50, sort="runs", contains="request-00").requests
    expect(page.locator(".kv-requests tbody tr td").first).to_have_text(by_runs[0].request_id)
    page.get_by_text("Smallest first").click()
    upwards = world.client.requests(world.still, 50, sort="runs", ascending=True, contains="request-00").requests
    expect(page.locator(".kv-requests tbody tr td").first).to_have_text(upwards[0].request_id)
    one = upwards[0].request_id
    page.get_by_role("textbox", name="Filter").fill(one)
    page.keyboard.press("Enter")
    expect(page.locator(".kv-requests tbody tr")).to_have_count(1)
    page.wait_for_url(re.compile(f"filter={one}"))
    with page.expect_download() as download:
        page.locator(".st-key-export_requests").get_by_role("button", name="JSON").click()
    told = json.loads(Path(download.value.path()).read_text())
    assert [row["request_id"] for row in told["rows"]] == [one]
    page.get_by_role("textbox", name="Filter").fill("nobody has this")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No live sequence matches.")).to_be_visible()
