"""The sampler beside real writers: every state an engine can be in, and every way a map can be bad."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from agent.exporter import Exporter
from agent.history import MemoryHistory
from agent.sampling.follower import READ_TIMEOUT_SECONDS, MapSource
from agent.sampling.judgement import Limits
from agent.sampling.model import AgentView, Clock
from agent.sampling.sampler import Sampler, SamplerSettings
from agent.web import presenter
from engine_shim.allocation_map.reader import MapReader
from engine_shim.layout import HEADER, REGION
from engine_shim.snapshot import MapSnapshot
from tests.agent.conftest import PATIENT

Start = Callable[..., Any]
MakeSampler = Callable[..., Sampler]


class HandClock:
    """A clock that stands still until it is turned; it began before any engine of the test."""

    def __init__(self) -> None:
        wall, monotonic = time.time(), time.monotonic()
        self.turned, self.set = 0.0, 0.0  # seconds that passed, and by which the wall clock was set besides
        self.clock = Clock(wall=lambda: wall + self.turned + self.set, monotonic=lambda: monotonic + self.turned)

    def turn(self, seconds: float) -> None:
        self.turned += seconds


@pytest.fixture
def hands() -> HandClock:
    return HandClock()


def stop(engine: Any) -> None:
    """Stop the writer, and come back once it stands."""
    engine.send_signal(signal.SIGSTOP)
    os.waitpid(engine.process.pid, os.WUNTRACED)


@pytest.fixture
def make_sampler(folder: Path) -> Iterator[MakeSampler]:
    made: list[Sampler] = []

    def make(
        *folders: Path,
        open_map: Callable[[Path], MapSource] = MapReader,
        settings: SamplerSettings | None = None,
        clock: Clock | None = None,
    ) -> Sampler:
        sampler = Sampler(
            lambda: folders or (folder,),
            open_map,
            MemoryHistory(),
            settings=settings or PATIENT,
            clock=clock,
        )
        made.append(sampler)
        return sampler

    yield make
    for sampler in made:
        sampler.close()


def fill(engine: Any) -> None:
    """Ten blocks: one reserved, four used by one request, two cached, one pinned."""
    engine.reserved([0])
    owner = engine.open_owner("request-1")
    engine.allocated([1, 2, 3, 4, 5, 6, 7], owner)
    engine.wrote([1, 2, 3, 4], [16, 16, 16, 5], 53)
    engine.cached([5, 6])
    engine.pinned([7])
    engine.step_ended(1, 2)


def test_a_live_engine(start_engine: Start, make_sampler: MakeSampler) -> None:
    engine = start_engine(total_blocks=10, headroom_blocks=1, policy="vllm")
    fill(engine)
    sample = make_sampler().tick().samples[engine.id]
    assert (sample.state, sample.reason) == ("live", "")
    report = sample.report
    assert (report.free_blocks, report.cached_blocks, report.used_blocks, report.pinned_blocks) == (2, 2, 4, 1)
    assert report.largest_allocatable_run == 2
    assert report.fragmentation_rate == 0.5
    assert sample.waste is not None
    assert sample.waste.tokens == 11 + 16  # the pinned block holds no tokens yet
    assert sample.residual_blocks == 0
    assert sample.oldest_pinned_seconds is not None
    assert (sample.snapshot.running_requests, sample.snapshot.waiting_requests) == (1, 2)


def test_an_engine_that_was_killed_is_gone_and_then_out_of_view(
    start_engine: Start, make_sampler: MakeSampler, hands: HandClock
) -> None:
    sampler = make_sampler(clock=hands.clock, settings=replace(PATIENT, gone_seconds=60))
    engine = start_engine()
    fill(engine)
    assert sampler.tick().samples[engine.id].state == "live"
    engine.kill()
    gone = sampler.tick().samples[engine.id]
    assert (gone.state, gone.report.used_blocks) == ("gone", 4)
    assert "without closing" in gone.reason
    hands.turn(61)
    assert engine.id not in sampler.tick().samples
    assert engine.id not in sampler.tick().samples
    assert engine.path.exists()  # the agent deletes nothing


def test_an_engine_that_ended_in_good_order_is_gone(start_engine: Start, make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    engine = start_engine()
    sampler.tick()
    engine.close()
    gone = sampler.tick().samples[engine.id]
    assert (gone.state, gone.reason) == ("gone", "the engine ended in good order")
    assert not engine.path.exists()


def test_a_writer_that_starts_again_with_another_size(start_engine: Start, make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    first = start_engine(total_blocks=100)
    before = sampler.tick().samples[first.id]
    first.kill()
    second = start_engine(total_blocks=5000)
    after = sampler.tick().samples[first.id]
    assert second.path == first.path
    assert (before.report.total_blocks, after.report.total_blocks) == (100, 5000)
    assert after.identity.incarnation != before.identity.incarnation
    assert after.state == "live"
    assert after.tokens_per_second is None


def test_two_agents_on_one_map(start_engine: Start, make_sampler: MakeSampler) -> None:
    one, other = make_sampler(), make_sampler()
    engine = start_engine()
    fill(engine)
    assert one.tick().samples[engine.id].report == other.tick().samples[engine.id].report
    one.close()
    assert other.tick().samples[engine.id].state == "live"
    assert engine.path.exists()


def test_a_stopped_engine_with_requests_is_stalled_within_five_seconds(
    start_engine: Start, make_sampler: MakeSampler, hands: HandClock
) -> None:
    settings = replace(PATIENT, limits=Limits())
    sampler = make_sampler(clock=hands.clock, settings=settings)
    engine, idle = start_engine(), start_engine(engine_id="idle")
    fill(engine)
    idle.step_ended(0, 0)
    assert sampler.tick().samples[engine.id].state == "live"
    stop(engine)
    while sampler.tick().samples[engine.id].state == "live":
        hands.turn(settings.interval_seconds)
        assert hands.turned < 5.0
    assert sampler.view.samples[engine.id].state == "stalled"
    assert "no step has ended" in sampler.view.samples[engine.id].reason
    assert sampler.view.samples[idle.id].state == "live"  # an idle engine is not stalled
    engine.send_signal(signal.SIGCONT)
    engine.step_ended(1, 0)
    assert sampler.tick().samples[engine.id].state == "live"


def test_a_stopped_idle_engine_is_stale(start_engine: Start, make_sampler: MakeSampler, hands: HandClock) -> None:
    sampler = make_sampler(clock=hands.clock, settings=replace(PATIENT, limits=Limits(stale_seconds=2)))
    engine = start_engine()
    engine.step_ended(0, 0)
    stop(engine)
    assert sampler.tick().samples[engine.id].state == "live"
    hands.turn(1.9)
    assert sampler.tick().samples[engine.id].state == "live"
    hands.turn(0.1)
    assert sampler.tick().samples[engine.id].state == "stale"


def test_a_sleeping_engine_has_no_fragmentation(start_engine: Start, make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    engine = start_engine(total_blocks=10)
    fill(engine)
    engine.set_flag(sleeping=True)
    sample = sampler.tick().samples[engine.id]
    assert (sample.state, sample.fragmentation_known) == ("sleeping", False)
    engine.set_flag(sleeping=False)
    awake = sampler.tick().samples[engine.id]
    assert (awake.state, awake.fragmentation_known) == ("live", True)


def test_an_observer_that_failed_marks_the_map_degraded(start_engine: Start, make_sampler: MakeSampler) -> None:
    engine = start_engine(total_blocks=10)
    fill(engine)
    engine.allocated([10_000])  # a block that the pool does not have
    engine.step_ended(1, 0)
    assert make_sampler().tick().samples[engine.id].snapshot.flags.degraded


@pytest.mark.parametrize("states", ["one block", "nothing free", "all pinned"])
def test_small_and_full_pools(states: str, start_engine: Start, make_sampler: MakeSampler) -> None:
    engine = start_engine(total_blocks=1 if states == "one block" else 8)
    blocks = list(range(8)) if states != "one block" else [0]
    if states != "one block":
        engine.allocated(blocks)
    if states == "all pinned":
        engine.pinned(blocks)
    engine.step_ended(1, 0)
    sample = make_sampler().tick().samples[engine.id]
    rate = sample.report.fragmentation_rate
    assert rate == (0.0 if states == "one block" else None)
    assert sample.state == "live"


def tear(engine: Any) -> None:
    """Stop the writer, and leave its map as within a publish."""
    stop(engine)
    header = np.frombuffer(engine.path.read_bytes()[: HEADER.itemsize], HEADER)[0]
    with engine.path.open("r+b") as file:
        file.seek(int(header["live_offset"]))
        sequence = int.from_bytes(file.read(8), "little")
        file.seek(int(header["live_offset"]))
        file.write((sequence + 1).to_bytes(8, "little"))


def patch_header(path: Path, **fields: Any) -> None:
    header = np.frombuffer(path.read_bytes()[: HEADER.itemsize], HEADER).copy()
    for name, value in fields.items():
        header[0][name] = value
    with path.open("r+b") as file:
        file.write(header.tobytes())


def patch_region(path: Path, name: bytes, **fields: Any) -> None:
    header = np.frombuffer(path.read_bytes()[: HEADER.itemsize], HEADER)[0]
    with path.open("r+b") as file:
        file.seek(int(header["region_offset"]))
        table = np.frombuffer(file.read(int(header["region_count"]) * REGION.itemsize), REGION).copy()
        for field, value in fields.items():
            table[field][table["name"] == name] = value
        file.seek(int(header["region_offset"]))
        file.write(table.tobytes())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda path: patch_header(path, magic=b"NOTAMAP\0"), "wrong magic", id="wrong magic"),
        pytest.param(lambda path: patch_header(path, major=2), "map version 2.0", id="another version"),
        pytest.param(lambda path: patch_header(path, incompat=1 << 40), "does not know", id="unknown incompat bit"),
        pytest.param(
            lambda path: patch_region(path, b"tokens", offset=1 << 40), "outside the file", id="column outside the file"
        ),
        pytest.param(lambda path: os.truncate(path, 100), "cut short", id="cut within the header"),
        pytest.param(lambda path: os.truncate(path, path.stat().st_size - 1), "cut short", id="cut at the end"),
    ],
)
def test_a_bad_map_is_named_and_the_others_go_on(
    damage: Callable[[Path], None], reason: str, start_engine: Start, make_sampler: MakeSampler
) -> None:
    bad, good = start_engine(engine_id="bad"), start_engine(engine_id="good")
    stop(bad)  # else its heartbeat would change the file as well
    damage(bad.path)
    before = bad.path.read_bytes()
    sampler = make_sampler()
    for _ in range(3):
        view = sampler.tick()
        assert list(view.samples) == [good.id]
        assert len(view.unreadable) == 1
        assert view.unreadable[0].startswith(f"{bad.path}: ")
        assert reason in view.unreadable[0]
    assert bad.path.read_bytes() == before


def test_a_map_cut_short_while_it_is_read(start_engine: Start, make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    bad, good = start_engine(engine_id="bad"), start_engine(engine_id="good")
    fill(bad)
    assert sampler.tick().samples[bad.id].state == "live"
    stop(bad)  # else the writer itself would touch the missing pages
    os.truncate(bad.path, 8192)
    view = sampler.tick()
    assert view.samples[bad.id].state == "unreadable"
    assert "cut short" in view.samples[bad.id].reason
    assert view.samples[bad.id].report.used_blocks == 4  # the last whole snapshot
    assert view.samples[good.id].state == "live"
    bad.path.unlink()
    assert bad.id not in sampler.tick().samples


def test_a_writer_that_stops_and_dies_while_it_publishes(
    start_engine: Start, make_sampler: MakeSampler, hands: HandClock
) -> None:
    """No whole snapshot can be had any more; the last one is kept, and its age is told."""
    settings = replace(PATIENT, limits=Limits())
    sampler = make_sampler(clock=hands.clock, settings=settings)
    engine = start_engine()
    fill(engine)
    assert sampler.tick().samples[engine.id].state == "live"
    tear(engine)
    torn = sampler.tick().samples[engine.id]
    assert (torn.state, torn.torn_reads) == ("live", 1)
    assert sampler.view.unreadable == ()
    while (stalled := sampler.tick().samples[engine.id]).state == "live":
        hands.turn(settings.interval_seconds)
        assert hands.turned < 5.0
    assert (stalled.state, stalled.report.used_blocks) == ("stalled", 4)
    engine.kill()
    gone = sampler.tick().samples[engine.id]
    assert (gone.state, gone.report.used_blocks) == ("gone", 4)
    late = make_sampler().tick()
    assert late.samples == {}
    assert "its writer died while it published" in late.unreadable[0]


def test_cached_prefixes_are_no_leak(start_engine: Start, make_sampler: MakeSampler) -> None:
    """24 requests come and go; what they leave is cached, allocatable and in no live count."""
    engine = start_engine(total_blocks=100)
    sampler = make_sampler()
    engine.step_ended(0, 0)
    assert sampler.tick().samples[engine.id].report.used_blocks == 0
    for request in range(24):
        owner = engine.open_owner(f"request-{request}")
        blocks = [2 * request, 2 * request + 1]
        engine.allocated(blocks, owner)
        engine.wrote(blocks, [16, 16], 32)
        engine.cached(blocks, owner)
        engine.close_owner(owner)
    engine.step_ended(0, 0)
    sample = sampler.tick().samples[engine.id]
    assert (sample.report.used_blocks, sample.report.cached_blocks, sample.report.free_blocks) == (0, 48, 52)
    assert sample.report.allocatable_blocks == 100
    assert sample.report.fragmentation_rate == 0.0
    assert sample.waste is not None
    assert sample.waste.tokens == 0


def test_a_fault_of_ours_with_one_map_costs_no_other_its_sample(start_engine: Start, make_sampler: MakeSampler) -> None:
    bad, good = start_engine(engine_id="bad"), start_engine(engine_id="good")

    def open_map(path: Path) -> MapSource:
        if path == bad.path:
            raise ZeroDivisionError("a bug")
        return MapReader(path)

    view = make_sampler(open_map=open_map).tick()
    assert list(view.samples) == [good.id]
    assert view.unreadable == (f"{bad.path}: ZeroDivisionError: a bug",)


def test_the_same_name_in_two_folders(
    tmp_path: Path, folder: Path, start_engine: Start, make_sampler: MakeSampler
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    first, second = start_engine(folder), start_engine(other, total_blocks=7)
    sampler = make_sampler(folder, other)
    view = sampler.tick()
    assert view.samples[first.id].snapshot.path == str(first.path)
    assert view.unreadable == (f"{second.path}: left out, {first.path} has the same name",)
    first.kill()
    sampler.tick()
    assert sampler.tick().samples[second.id].report.total_blocks == 7
    second.kill()
    for _ in range(3):  # two dead maps of one name must not take turns
        assert sampler.tick().samples[second.id].report.total_blocks == 7


def test_tokens_per_second_and_forecast(start_engine: Start, make_sampler: MakeSampler, hands: HandClock) -> None:
    sampler = make_sampler(clock=hands.clock)
    engine = start_engine(total_blocks=1000)
    for step in range(15):
        engine.allocated([step * 10 + block for block in range(10)])
        engine.wrote([step * 10], [16], 160)
        engine.step_ended(1, step)
        sampler.tick()
        hands.turn(2.0)
    sample = sampler.view.samples[engine.id]
    assert sample.tokens_per_second == pytest.approx(80)
    assert sample.forecast.seconds == pytest.approx(850 / 5, rel=0.05)
    assert sample.queue_grows
    assert not sample.admission.blocked  # there is room: they wait for something else
    engine.counted("allocation_failures")
    engine.step_ended(1, 14)
    for _ in range(2):  # nothing new is known at the second look
        assert sampler.tick().samples[engine.id].admission.blocked
    engine.step_ended(1, 14)
    assert not sampler.tick().samples[engine.id].admission.blocked
    engine.allocated(list(range(150, 990)))
    engine.step_ended(1, 14)
    full = sampler.tick().samples[engine.id]
    assert full.admission.blocked
    assert full.admission.reason == f"14 wait; 10 blocks above the headroom of {full.identity.headroom_blocks}"


def test_events_are_logged_once(
    start_engine: Start, make_sampler: MakeSampler, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "foreign.kvmap").write_bytes(b"something else")
    engine = start_engine()
    sampler = make_sampler()
    with caplog.at_level(logging.INFO, "kvatlas.sampler"):
        for _ in range(5):
            sampler.tick()
        engine.kill()
        for _ in range(5):
            sampler.tick()
    events = [(record.getMessage(), getattr(record, "fields", {}).get("value")) for record in caplog.records]
    assert [value for event, value in events if event == "engine"] == ["live", "gone"]
    assert len([event for event, _ in events if event == "unreadable"]) == 1


def test_a_tick_that_fails_does_not_end_the_thread(
    folder: Path, caplog: pytest.LogCaptureFixture, wait_until: Callable[..., Any]
) -> None:
    calls: list[int] = []

    def folders() -> list[Path]:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("no folders today")
        return [folder]

    sampler = Sampler(folders, MapReader, MemoryHistory(), settings=SamplerSettings(interval_seconds=0.01))
    thread = threading.Thread(target=sampler.run)
    with caplog.at_level(logging.INFO, "kvatlas.sampler"):
        thread.start()
        view: AgentView = wait_until(lambda: sampler.view if sampler.view.generation else None)
        sampler.stop()
        thread.join()
    assert view.folders == (str(folder),)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def open_files() -> list[str]:
    """What this process has open, by name; files that were removed among them."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)"))
        except FileNotFoundError:
            continue  # the listing's own
    return found


@pytest.mark.parametrize("end", ["kill", "close"])
def test_the_map_of_an_engine_that_is_gone_is_closed_and_still_shown(
    end: str, start_engine: Start, make_sampler: MakeSampler
) -> None:
    sampler, engine = make_sampler(), start_engine()
    fill(engine)
    sampler.tick()
    assert str(engine.path) in open_files()
    getattr(engine, end)()
    for _ in range(3):
        assert sampler.tick().samples[engine.id].state == "gone"
        assert str(engine.path) not in open_files()


def test_a_file_that_took_the_inode_of_a_dead_map_is_read(
    tmp_path: Path, start_engine: Start, make_sampler: MakeSampler
) -> None:
    """A closed file keeps its inode from nobody: the next map may get it, under the same name."""
    sampler = make_sampler()
    first, second = start_engine(), start_engine(tmp_path, total_blocks=7)
    sampler.tick()
    first.kill()
    second.kill()
    assert sampler.tick().samples[first.id].report.total_blocks == 100
    inode = first.path.stat().st_ino
    first.path.write_bytes(second.path.read_bytes())
    assert first.path.stat().st_ino == inode
    assert sampler.tick().samples[first.id].report.total_blocks == 7


def test_no_more_maps_are_open_than_allowed(start_engine: Start, make_sampler: MakeSampler) -> None:
    sampler = make_sampler(settings=replace(PATIENT, max_open=1))
    first, second = start_engine(engine_id="a"), start_engine(engine_id="b")
    for _ in range(2):
        view = sampler.tick()
        assert list(view.samples) == [first.id]
        assert [line.startswith(f"{second.path}: ") and "ulimit -n" in line for line in view.unreadable] == [True]
    first.kill()
    sampler.tick()
    assert sampler.tick().samples[second.id].state == "live"


def test_a_map_that_is_completed_later_is_read_then(
    tmp_path: Path, folder: Path, start_engine: Start, make_sampler: MakeSampler
) -> None:
    sampler, engine = make_sampler(), start_engine(tmp_path)
    fill(engine)
    engine.kill()
    content = engine.path.read_bytes()
    copy = folder / "copy.kvmap"
    copy.write_bytes(content[:20_000])
    view = sampler.tick()
    assert view.samples == {}
    assert "cut short" in view.unreadable[0]
    with copy.open("ab") as file:
        file.write(content[20_000:])
    view = sampler.tick()
    assert (view.samples["copy"].report.used_blocks, view.unreadable) == (4, ())


def test_names_that_are_not_utf_8(tmp_path: Path, folder: Path, start_engine: Start, make_sampler: MakeSampler) -> None:
    """They may be on any file system; JSON, metrics and logs have no room for them as they are."""
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/odd-\xff"))
    odd.mkdir()
    engine = start_engine(tmp_path)
    engine.kill()
    (odd / os.fsdecode(b"map-\xfe.kvmap")).write_bytes(engine.path.read_bytes())
    (odd / os.fsdecode(b"foreign-\xfd.kvmap")).write_bytes(b"hello")
    (odd / os.fsdecode(b"short-\xfc.kvmap")).write_bytes(engine.path.read_bytes()[:5000])
    view = make_sampler(odd, Path(os.fsdecode(b"/dev/null/\xfb"))).tick()
    assert list(view.samples) == ["map-\\xfe"]
    assert view.folders[0].endswith("/odd-\\xff")
    for text in (*view.folders, *view.unreadable, *view.samples):
        text.encode()  # raises where half a character is left
    assert all(any(name in line for line in view.unreadable) for name in ("foreign-\\xfd", "short-\\xfc"))
    assert len(view.unreadable) == 3
    presenter.summarize(view.samples["map-\\xfe"], view.taken_unix).model_dump_json().encode()
    Exporter(lambda: view, clock=Clock()).render()


class Patient(MapReader):
    """Notes how long each read may wait."""

    waits: ClassVar[list[float]] = []

    def read(self, timeout_seconds: float = READ_TIMEOUT_SECONDS) -> MapSnapshot:
        self.waits.append(timeout_seconds)
        return super().read(timeout_seconds)


def test_maps_torn_for_good_share_one_wait_and_then_cost_none(
    start_engine: Start, make_sampler: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patient, "waits", [])
    torn = [start_engine(engine_id=f"torn{index}") for index in range(3)]
    good = start_engine(engine_id="whole")
    fill(good)
    for engine in torn:
        tear(engine)
    sampler = make_sampler(open_map=Patient)
    first = sampler.tick()
    assert Patient.waits[0] == READ_TIMEOUT_SECONDS
    assert sum(Patient.waits[:3]) < 2 * READ_TIMEOUT_SECONDS
    Patient.waits.clear()
    second = sampler.tick()
    assert Patient.waits[:3] == [0.0, 0.0, 0.0]
    assert Patient.waits[3] > 0
    for view in (first, second):
        assert view.samples[good.id].state == "live"
        assert {view.samples[engine.id].state for engine in torn} == {"unreadable"}


def test_a_new_agent_shows_a_map_that_it_never_saw_whole(start_engine: Start, make_sampler: MakeSampler) -> None:
    """Its engine lives, and says by a flag that nobody follows the pool any more; no block of it is known."""
    engine = start_engine(total_blocks=10)
    fill(engine)
    engine.allocated([10_000])  # a block that the pool does not have
    engine.step_ended(1, 0)
    tear(engine)
    sampler = make_sampler()
    sampler.tick()
    view = sampler.tick()
    sample = view.samples[engine.id]
    assert (sample.state, sample.snapshot.flags.degraded, sample.identity.engine_id) == ("unreadable", True, "engine")
    assert "given up" in sample.reason
    assert sample.report.unknown_blocks == 10
    summary = presenter.summarize(sample, view.taken_unix)
    assert (summary.degraded, summary.fragmentation.rate, summary.blocks.used) == (True, None, 0)
    lines = Exporter(lambda: view, clock=Clock()).render().decode().splitlines()
    assert any(line.startswith("kvatlas_engine_degraded{") and line.endswith(" 1.0") for line in lines)
    assert any(line.startswith("kvatlas_engine_up{") and line.endswith(" 0.0") for line in lines)
    assert not any(line.startswith("kvatlas_pool_blocks{") for line in lines)


def test_a_read_that_does_not_come_back_holds_up_no_other_map(start_engine: Start, make_sampler: MakeSampler) -> None:
    bad, good = start_engine(engine_id="bad"), start_engine(engine_id="good")
    hanging, reads = threading.Event(), []
    before = [one.name for one in threading.enumerate()].count("map reader")

    class Hanging(MapReader):
        def read(self, timeout_seconds: float = READ_TIMEOUT_SECONDS) -> MapSnapshot:
            if self.path == bad.path:
                reads.append(self.path)
                hanging.wait()
            return super().read(timeout_seconds)

    # One allowance is for every map, also for the one that is read in no time on a machine that has it.
    sampler = make_sampler(open_map=Hanging, settings=replace(PATIENT, hung_seconds=1.0))
    try:
        for _ in range(5):
            view = sampler.tick()
            assert list(view.samples) == [good.id]
            assert view.unreadable == (f"{bad.path}: a read of it does not come back; look at its file system",)
        assert reads == [bad.path]  # nobody else is sent after it
        # One thread hangs and one reads the others, however many ticks pass.
        assert [one.name for one in threading.enumerate()].count("map reader") <= before + 2
    finally:
        hanging.set()


def test_a_stopped_engine_is_stalled_though_the_clock_was_set_back(
    start_engine: Start, make_sampler: MakeSampler, hands: HandClock
) -> None:
    sampler = make_sampler(clock=hands.clock, settings=replace(PATIENT, limits=Limits()))
    engine = start_engine()
    fill(engine)
    assert sampler.tick().samples[engine.id].state == "live"
    stop(engine)
    hands.set = -3600.0
    sampler.tick()
    hands.turn(60.0)
    assert sampler.tick().samples[engine.id].state == "stalled"
    hands.set = 3600.0
    engine.kill()
    assert sampler.tick().samples[engine.id].state == "gone"
    assert sampler.tick().samples[engine.id].state == "gone"  # an hour ahead is not an hour gone
