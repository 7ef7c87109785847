"""A recording in a real browser: the views of memory and of time show what was recorded, and not what is here now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import expect

from agent.client import AgentClient
from agent.recording.reading import Recording
from dashboard import timeline
from dashboard.wording import size
from tests.agent.devices.conftest import GIB
from tests.agent.recording.world import GPU, RULES, Recorded, record_live

pytestmark = pytest.mark.browser

MEMORY = ".st-key-view_memory"
TIMELINE = ".st-key-time_figure_box .kvatlas-figure"


@dataclass
class World:
    recorded: Recorded
    times: list[float]  # of its samples, Unix seconds
    client: AgentClient
    home: str

    def go(self, sample: int) -> None:
        """To just after a sample. There is no token, and this is the machine that it listens on."""
        place = {"position_unix": self.times[sample] + 1e-4, "paused": True}
        self.client._http.post(f"{self.client.url}/v1/replay", json=place).raise_for_status()


@pytest.fixture(scope="module")
def world(
    shared_stage: Any, tmp_path_factory: pytest.TempPathFactory, eventually: Callable[..., Any]
) -> Iterator[World]:
    """A minute of a live engine on devices that change, which is long over, and the replay of it."""
    folder = tmp_path_factory.mktemp("recorded")
    recorded = record_live(folder, RULES, asked=[], began_unix=1_760_000_000)
    recording = Recording(recorded.path)
    times = [time_ns / 1e9 for time_ns in recording.sample_times_ns]
    recording.close()
    settings = {
        name: str(getattr(recorded.settings, name)) for name in ("stall_seconds", "stale_seconds", "alert_rules")
    }
    url, _ = shared_stage.replay(recorded.path, **settings)
    home, _ = shared_stage.dashboard(url)
    with AgentClient(url, timeout_seconds=60.0) as client:
        yield World(recorded, times, client, home)


def test_memory_is_that_of_the_recorded_host(world: World, window: Callable[..., Any]) -> None:
    world.go(20)
    opened = window(world.home)
    page = opened.open(world.recorded.id, view="memory")
    view = page.locator(MEMORY)
    expect(view.get_by_role("heading", name="Devices")).to_contain_text("NVML: ok · driver 999.1 · 2 of 2 devices")
    found = world.client.devices()
    assert found.devices[0].memory is not None
    assert found.devices[0].memory.used_bytes == 10 * GIB
    expect(view).to_contain_text(GPU)
    device = view.locator("section.kv-device").first
    expect(device.locator("tr").filter(has_text="engine, the rest").first).to_contain_text(size(9 * GIB - 600 * 4096))
    expect(view.locator("section.kv-device").nth(1)).to_contain_text("lost")
    assert found.host is not None
    expect(view.locator("tr").filter(has_text="host").first).to_contain_text(size(found.host.used_bytes))
    (engine,) = found.engines
    expect(view.locator("tr").filter(has_text="resident")).to_contain_text(str(engine.pid))
    (allocator,) = found.allocators
    live = allocator.devices[0].live_bytes
    assert live is not None
    expect(view.locator("table.kv-left tr").filter(has_text=size(live))).to_contain_text("engine")
    opened.check()

    world.go(47)  # the page follows: the device is back, and holds less
    expect(device.locator("tr").filter(has_text="engine, the rest").first).to_contain_text(size(3 * GIB - 600 * 4096))
    expect(view.locator("section.kv-device").nth(1)).not_to_contain_text("lost")


def test_time_ends_at_the_place_of_the_replay_and_shows_what_happened(world: World, window: Callable[..., Any]) -> None:
    world.go(59)
    opened = window(world.home)
    page = opened.open(world.recorded.id, view="time", span="2 min")
    page.locator(f"{TIMELINE}[data-drawn]").wait_for()
    start, end = world.times[59] - 120, world.times[59]
    happened = timeline.episodes_of(world.client.marks(world.recorded.id, start, end + 1, holds=False).marks, start)
    fired = [one for one in happened if one.is_span]
    assert {one.end_unix is None for one in fired} >= {False}
    script = f"""() => {{ const plot = document.querySelector('{TIMELINE} .kvatlas-plot');
        const spans = plot.data.filter(one => one.mode === 'lines+markers').map(one => one.x[0]);
        return [plot.layout.xaxis.range, spans]; }}"""
    (shown_from, shown_to), spans = page.evaluate(script)
    assert shown_to / 1000 == pytest.approx(end, abs=100)  # as of the last listing, on a clock that stands still
    assert shown_to - shown_from == pytest.approx(120_000, abs=1)
    assert spans == [round(1000 * one.start_unix) for one in fired]
    expect(page.get_by_text("60 frames are kept of this range")).to_be_visible()
    opened.check()
