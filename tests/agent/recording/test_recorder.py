"""The recorder beside a live engine: nothing is lost unnamed, and what is written can be read."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from agent.cli import main
from agent.recording.chunks import ChunkWriter, RecordingError, RecordingVersionError
from agent.recording.contents import columns_of
from agent.recording.reading import Recording
from agent.recording.recorder import Recorder
from agent.sampling.model import Clock
from engine_shim.adapters.sglang.state_map import StateMap
from engine_shim.allocation_map.reader import MapReader
from engine_shim.allocation_map.writer import MapSpec, MapWriter
from engine_shim.layout import BlockState
from tests.agent.recording.conftest import PATIENCE_SECONDS, StartRecorder, StartStepping
from tests.agent.recording.support import SteppingEngine


def last_state(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """The columns at the end of a recording, and the engine's steps by then."""
    recording = Recording(path)
    cursor = recording.cursor()
    cursor.seek(recording.end_ns)
    snapshot = cursor.state().snapshot
    recording.close()
    return columns_of(snapshot), snapshot.counters["steps"]


@pytest.mark.parametrize("good", [True, False], ids=["closes", "dies"])
def test_a_recording_ends_with_its_engine_and_says_how(
    start_stepping: StartStepping, start_recorder: StartRecorder, tmp_path: Path, good: bool
) -> None:
    engine = start_stepping()
    recorder = start_recorder(engine, tmp_path / "a.kvrec", "--json", "--interval-seconds", "0.05")
    steps = engine.step(200)
    if good:
        engine.close()
    else:
        engine.kill()
    status, out, errors = recorder.end()
    assert status == 0, errors
    facts = json.loads(out)
    assert facts["ended"] == ("the engine ended in good order" if good else "the engine ended without closing its map")
    assert facts["lost_events"] == 0
    assert facts["bytes"] == (tmp_path / "a.kvrec").stat().st_size
    columns, recorded_steps = last_state(tmp_path / "a.kvrec")
    assert recorded_steps == steps
    assert not (tmp_path / "a.kvrec.part").exists()
    recording = Recording(tmp_path / "a.kvrec")
    assert recording.ended == facts["ended"]
    assert recording.events == facts["events"]
    recording.close()
    assert np.count_nonzero(columns["state"]) > 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_a_recorder_that_is_stopped_finishes_its_file(
    start_stepping: StartStepping, start_recorder: StartRecorder, tmp_path: Path, number: signal.Signals
) -> None:
    engine = start_stepping()
    recorder = start_recorder(engine, tmp_path / "a.kvrec")
    engine.step(20)
    recorder.process.send_signal(number)
    status, out, errors = recorder.end()
    assert status == 0, errors
    assert "it was stopped" in out
    assert Recording(tmp_path / "a.kvrec").ended == "it was stopped"


def test_a_recorder_ends_after_the_seconds_that_were_asked_for(
    start_stepping: StartStepping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(start_stepping().path), "-o", str(tmp_path / "a.kvrec"), "--seconds", "0.2"]) == 0
    assert "0.2 s were asked for" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [["--seconds", "0"], ["--seconds", "nan"], ["--interval-seconds", "0.01"], ["--interval-seconds", "61"]]
)
def test_times_that_make_no_sense_are_refused(
    start_stepping: StartStepping, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(["record", str(start_stepping().path), "-o", str(tmp_path / "a.kvrec"), *flags]) == 2
    assert "give" in capsys.readouterr().err
    assert not list(tmp_path.glob("a.kvrec*"))


def test_what_a_killed_recorder_wrote_is_readable_up_to_its_last_chunk(
    start_stepping: StartStepping,
    start_recorder: StartRecorder,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    engine = start_stepping()
    recorder = start_recorder(engine, tmp_path / "a.kvrec", "--interval-seconds", "0.05")
    part = tmp_path / "a.kvrec.part"
    steps = engine.step(100)
    wait_until(lambda: last_state(part)[1] == steps, within=PATIENCE_SECONDS)
    recorder.process.kill()
    recorder.end()
    whole = Recording(part)
    assert whole.ended == ""
    ends = [place.end for place in whole.places()]
    whole.close()
    content = part.read_bytes()
    for cut, lost in ((1, "cut short"), (ends[-1] - ends[-2] - 5, "beginning of a chunk")):
        torn = tmp_path / f"torn-{cut}.kvrec"
        torn.write_bytes(content[: ends[-1] - cut])
        recording = Recording(torn)
        assert lost in recording.torn
        assert str(ends[-2]) in recording.torn
        assert last_state(torn)[0].keys() == last_state(part)[0].keys()
        recording.close()
    zeros = tmp_path / "zeros.kvrec"
    zeros.write_bytes(content[: ends[-2]] + bytes(5000))
    recording = Recording(zeros)
    assert "zeros" in recording.torn
    recording.close()


def test_nothing_is_overwritten(
    start_stepping: StartStepping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start_stepping()
    for name in ("a.kvrec", "b.kvrec.part"):
        (tmp_path / name).write_text("mine")
        output = tmp_path / name.removesuffix(".part")
        assert main(["record", str(engine.path), "-o", str(output), "--seconds", "0.1"]) == 1
        errors = capsys.readouterr().err
        assert errors.startswith("error: ")
        assert str(tmp_path / name) in errors
        assert (tmp_path / name).read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a.kvrec", "b.kvrec.part"]


def test_a_name_that_is_taken_meanwhile_keeps_its_file(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "a.kvrec")
    (tmp_path / "a.kvrec").write_text("mine")
    with pytest.raises(RecordingError, match="came to be meanwhile"):
        writer.finish()
    assert (tmp_path / "a.kvrec").read_text() == "mine"
    assert (tmp_path / "a.kvrec.part").exists()


def test_a_full_disk_is_said_and_what_was_written_stays_readable(
    start_stepping: StartStepping,
    start_recorder: StartRecorder,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    """A limit on the size of a file stands for the disk: the same write fails in the same place."""
    engine = start_stepping(blocks=2000)
    recorder = start_recorder(engine, tmp_path / "a.kvrec", "--interval-seconds", "0.05", limit="ulimit -f 24")
    engine.step(1)  # and is written before the flood, of which a slow recorder may find no part small enough
    wait_until(lambda: last_state(tmp_path / "a.kvrec.part")[1] == 1, within=PATIENCE_SECONDS)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            engine.step(50)

    running = threading.Thread(target=run)
    running.start()
    try:
        status, _, errors = recorder.end()
    finally:
        stop.set()
        running.join()
    assert status == 1
    assert "the disk is full" in errors
    assert "Make room" in errors
    assert last_state(tmp_path / "a.kvrec")[1] > 0
    recording = Recording(tmp_path / "a.kvrec")
    assert recording.torn == recording.ended == ""
    recording.close()


class Recorded(Protocol):
    def __call__(self, engine: SteppingEngine, path: Path) -> tuple[Recorder, MapReader]: ...


@pytest.fixture
def begin() -> Iterator[Recorded]:
    """Recorders in this process, for what has to happen between two of their looks."""
    readers: list[MapReader] = []

    def make(engine: SteppingEngine, path: Path) -> tuple[Recorder, MapReader]:
        reader = MapReader(engine.path)
        readers.append(reader)
        recorder = Recorder(reader, ChunkWriter(path), engine.id, 3600.0, Clock())
        recorder.begin()
        return recorder, reader

    yield make
    for one in readers:
        one.close()


def test_a_gap_is_named_and_the_next_sample_is_right_again(
    start_stepping: StartStepping, begin: Recorded, tmp_path: Path
) -> None:
    engine = start_stepping(events_per_second=1)  # the smallest ring there is
    recorder, reader = begin(engine, tmp_path / "a.kvrec")
    before = reader.read().event_head
    engine.step(1500)
    after = reader.read().event_head
    assert after - before > 1024
    recorder.poll()
    recorder.interval_seconds, recorder._sample_due = 0.05, 0.0
    recorder.poll()
    recorder.end("enough")
    recorder.writer.finish()
    recording = Recording(tmp_path / "a.kvrec")
    assert [(gap.first, gap.count) for gap in recording.gaps] == [(before, after - before - 1024)]
    assert recording.lost_events == recorder.tally.lost_events == after - before - 1024
    assert recording.events == 1024
    recording.close()
    columns, _ = last_state(tmp_path / "a.kvrec")
    for name, column in columns_of(reader.read()).items():
        assert np.array_equal(column, columns[name]), name


def test_between_samples_the_events_alone_tell_all_but_tokens(
    start_stepping: StartStepping, begin: Recorded, tmp_path: Path
) -> None:
    engine = start_stepping()
    engine.step(100)
    recorder, reader = begin(engine, tmp_path / "a.kvrec")
    for policy in ("relocating", "vllm", "relocating"):
        engine.switch(policy)
        engine.step(150)
        recorder.poll()
    recorder.end("enough")
    recorder.writer.finish()
    assert recorder.tally.samples == 1
    recording = Recording(tmp_path / "a.kvrec")
    cursor = recording.cursor()
    cursor.seek(recording.end_ns + 10**12)
    state = cursor.state().snapshot
    actual = reader.read()
    recording.close()
    told = columns_of(state)
    for name, column in columns_of(actual).items():
        if name != "tokens":
            assert np.array_equal(column, told[name]), name
    assert state.state_counts == actual.state_counts
    assert state.event_head == actual.event_head


def test_an_engine_that_keeps_few_columns_is_recorded_too(
    start_stepping: StartStepping, begin: Recorded, tmp_path: Path
) -> None:
    engine = start_stepping(columns=["state", "tokens"])
    recorder, reader = begin(engine, tmp_path / "a.kvrec")
    engine.step(100)
    recorder._sample_due = 0.0
    recorder.poll()
    recorder.end("enough")
    recorder.writer.finish()
    columns, _ = last_state(tmp_path / "a.kvrec")
    assert set(columns) == {"state", "tokens"}
    assert np.array_equal(columns["state"], reader.read().states)


def test_a_newer_recording_is_refused_by_its_version(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "a.kvrec")
    writer.finish()
    content = bytearray((tmp_path / "a.kvrec").read_bytes())
    content[8] = 9
    (tmp_path / "b.kvrec").write_bytes(content)
    with pytest.raises(RecordingVersionError, match=r"version 9\.\d.*knows 1\.x"):
        Recording(tmp_path / "b.kvrec")


def test_a_map_without_events_is_named_and_not_simulated(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SGLang's maps are: three policies with the same numbers of nothing would read as a finding."""
    spec = MapSpec(
        engine_id="silent", kind="sglang", model="tiny", pool="kv", total_blocks=100, block_tokens=1, block_bytes=64,
        dtype="float16", columns=("state",), owner_slots=1, events_per_second=1,
    )  # fmt: skip
    output = tmp_path / "a.kvrec"
    with closing(MapWriter.create(spec, folder)) as writer:
        shown = StateMap(writer)
        shown.states[10:40] = BlockState.USED
        shown.publish(1, 0, 1)
        assert main(["record", str(writer.path), "-o", str(output), "--seconds", "0.1"]) == 0
    assert "publishes no events" in capsys.readouterr().out
    recording = Recording(output)
    assert [note for note in recording.notes if "publishes no events" in note]
    recording.close()
    for flags in ([], ["--compare"], ["--sizes", "auto"]):
        assert main(["simulate", str(output), *flags]) == 1
        assert f"error: {output}: holds no events" in capsys.readouterr().err
