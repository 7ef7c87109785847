"""Devices in a recording: as much as /v1/devices shows, as much as is news, and nothing that a driver can hold up."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.devices.families import device_families
from agent.devices.model import (
    NOTHING_READ,
    CgroupMemory,
    DevicesView,
    LibraryState,
    NamedProcess,
    RowKind,
)
from agent.devices.signals import signals
from agent.recording.chunks import ChunkKind, ChunkWriter, RecordingError
from agent.recording.device_contents import MAX_DEVICES_BYTES, Plain, decode_devices, encode_devices, plain_view
from agent.recording.reading import Recording
from agent.recording.recorder import Recorder
from agent.sampling.model import Clock
from agent.web.device_routes import describe_devices
from engine_shim.allocation_map.reader import MapReader
from tests.agent.devices.conftest import GIB, compile_driver, gpu
from tests.agent.recording.conftest import PATIENCE_SECONDS, StartRecorder, StartStepping
from tests.agent.recording.full_view import full_view
from tests.agent.recording.support import rewrite_chunks

CLOCK = Clock(lambda: 2_000_000_000.0, lambda: 100.0)


def line_ns(monotonic: float) -> int:
    return round(monotonic * 1e9)


def carried(view: DevicesView, before: Plain | None = None) -> tuple[Plain, DevicesView, int]:
    """Through a chunk and back, and how many bytes it is."""
    payload = encode_devices(before or {}, plain_view(view, line_ns))
    return *decode_devices(payload, before or {}), len(payload)


@pytest.mark.parametrize("view", [full_view(), NOTHING_READ], ids=["everything", "nothing"])
def test_what_is_shown_of_devices_is_recorded_and_nothing_else(view: DevicesView) -> None:
    plain, again, _ = carried(view)
    assert describe_devices(again, CLOCK) == describe_devices(view, CLOCK)
    assert list(signals(again)) == list(signals(view))
    text = json.dumps(plain)
    assert "org/model" not in text
    assert "segments" not in text
    assert text.count("MIG-1") == (view is not NOTHING_READ)
    assert again.nvml.devices == ()


def test_only_what_changed_is_written() -> None:
    view = full_view()
    plain, _, whole = carried(view)
    assert view.host is not None
    later = replace(view, taken_monotonic=99.5, host=replace(view.host, free_bytes=7))
    _, again, changed = carried(later, plain)
    assert describe_devices(again, CLOCK) == describe_devices(later, CLOCK)
    assert changed < 100 < whole
    fewer = replace(view, devices=view.devices[1:], engines=(), cgroup=CgroupMemory(1, "/", 5, 4, 3, None))
    assert describe_devices(carried(fewer, plain)[1], CLOCK) == describe_devices(fewer, CLOCK)
    assert encode_devices(plain, plain) == b"{}"


def test_where_all_is_another_it_is_told_as_a_whole_and_stays_within_the_bound() -> None:
    view = full_view()

    def crowded(by: int) -> DevicesView:
        crowd = tuple(NamedProcess(pid + by, pid, f"{pid + by}", f"{-pid - by}") for pid in range(by, by + 12_800))
        return replace(view, devices=(replace(view.devices[1], processes=crowd),))

    plain, _, _ = carried(crowded(0))
    _, again, size = carried(crowded(1_000_000), plain)
    assert describe_devices(again, CLOCK) == describe_devices(crowded(1_000_000), CLOCK)
    assert MAX_DEVICES_BYTES * 0.9 < size <= MAX_DEVICES_BYTES


def test_what_no_reader_would_take_is_recorded_as_such() -> None:
    crowd = tuple(NamedProcess(pid, 1, "", "x" * 15) for pid in range(30_000))
    view = full_view()
    crowded = replace(view, devices=(replace(view.devices[1], processes=crowd),))
    absurd = replace(view, allocators=(replace(view.allocators[0], devices={"0": {"live_bytes": 10**30}}),))
    half = replace(view, host_reason="\ud800")
    for strange in (crowded, absurd, half):
        _, again, size = carried(strange)
        assert size < 2000
        assert again.nvml.state is LibraryState.RECORDING
        assert "could not be recorded" in again.nvml.reason
        assert list(signals(again)) == []
        assert describe_devices(again, CLOCK).devices == []


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    told = json.loads(json.dumps(plain_view(full_view(), line_ns)))
    change(told)
    return json.dumps(told).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"{" + b'"a":{' * 50_000,
        changed(lambda told: told.pop("host")),
        changed(lambda told: told.pop("taken_ns")),
        changed(lambda told: told.update(taken_ns=1.5)),
        changed(lambda told: told.update(taken_ns=True)),
        changed(lambda told: told.update(taken_unix=float("nan"))),
        changed(lambda told: told.update(taken_unix=-1)),
        changed(lambda told: told.update(devices={})),
        changed(lambda told: told.update(devices=[None])),
        changed(lambda told: told.update(host=5)),
        changed(lambda told: told["host"].update(free_bytes="much")),
        changed(lambda told: told["host"].update(free_bytes=True)),
        changed(lambda told: told["host"].update(free_bytes=1 << 70)),
        changed(lambda told: told["nvml"].update(reason="\ud800")),
        changed(lambda told: told["allocators"][0].update(devices=[["0"]])),
        changed(lambda told: told["devices"][0]["slices"][0]["sample"]["memory"].update(total_bytes=0)),
        changed(lambda told: told.update(more="x" * MAX_DEVICES_BYTES)),
    ],
)
def test_devices_that_cannot_be_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"devices|JSON|not "):
        decode_devices(payload, {})


@pytest.mark.parametrize("place", ["2", "-1", "x", "1e3", "²", "9" * 30])
def test_a_change_at_a_place_that_is_not_there_is_refused(place: str) -> None:
    plain, _, _ = carried(full_view())
    with pytest.raises(ValueError, match="nothing at place"):
        decode_devices(json.dumps({"devices": {place: {}}}).encode(), plain)


def test_changes_do_not_add_up_to_more_than_a_whole_view_may_be() -> None:
    plain, _, _ = carried(full_view())
    with pytest.raises(ValueError, match="bytes cannot be"):  # noqa: PT012 - one of these, whichever
        for place in range(3):
            told = {"more": {str(place): "x" * (MAX_DEVICES_BYTES // 2 - 100)}} if place else {"more": {}}
            plain, _ = decode_devices(json.dumps(told).encode(), plain)


def test_slices_of_slices_without_end_are_refused() -> None:
    view = full_view()
    device = view.devices[1]
    for _ in range(20):
        device = replace(device, slices=(device,))
    deep = plain_view(replace(view, devices=(device,)), line_ns)
    assert deep["nvml"]["state"] == "recording"


def test_the_words_of_a_newer_recorder_are_said_to_be_unknown() -> None:
    _, view = decode_devices(changed(lambda told: told["nvml"].update(state="asleep", more=1)), {})
    assert view.nvml.state is LibraryState.RECORDING
    assert "'asleep', which is not known here" in view.nvml.reason
    assert "update kvatlas" in view.nvml.reason
    _, view = decode_devices(changed(lambda told: told["nvml"].update(more=1)), {})
    assert view.nvml.state is LibraryState.OK
    assert device_families(view)


def test_a_recording_says_devices_anew_after_each_base(
    start_stepping: StartStepping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that who begins there knows what who came along knows; and where nothing changed, nothing is written."""
    monkeypatch.setattr("agent.recording.recorder.BASE_SECONDS", 10.0)
    engine = start_stepping()
    now, view = 1000.0, full_view()
    clock = Clock(lambda: now, lambda: now)
    reader = MapReader(engine.path)
    recorder = Recorder(reader, ChunkWriter(tmp_path / "a.kvrec"), engine.id, 1.0, clock, devices=lambda: replace(view))
    with closing(reader):
        recorder.begin()
        for second in range(1, 36):
            engine.step(3, round(now * 1e9))
            now += 1.0
            if second % 7 == 0:
                view = replace(view, taken_monotonic=now, cgroup_reason=f"{second}")
            recorder.poll()
        recorder.end("enough")
        recorder.writer.finish()
    assert recorder.tally.device_readings == 4 + 5  # bases, and changes; none of them fall together
    recording = Recording(tmp_path / "a.kvrec")
    along = recording.cursor()
    with closing(recording):
        for number, time_ns in enumerate(recording.sample_times_ns):
            along.seek(time_ns)
            there = recording.cursor()
            there.seek(time_ns)
            told = there.state().devices
            assert told is not None
            assert told == along.state().devices
            assert told.cgroup_reason == (f"{number // 7 * 7}" if number >= 7 else "not in one")
            if number >= 7:
                assert told.taken_monotonic == pytest.approx(1000.0 + number // 7 * 7)


def test_a_damaged_reading_names_its_byte(start_stepping: StartStepping, tmp_path: Path) -> None:
    engine = start_stepping()
    reader = MapReader(engine.path)
    recorder = Recorder(reader, ChunkWriter(tmp_path / "a.kvrec"), engine.id, devices=full_view)
    with closing(reader):
        recorder.begin()
        recorder.end("enough")
        recorder.writer.finish()
    rewrite_chunks(tmp_path / "a.kvrec", tmp_path / "b.kvrec", {ChunkKind.DEVICES: lambda number, payload: b"{}"})
    recording = Recording(tmp_path / "b.kvrec")
    with closing(recording), pytest.raises(RecordingError, match=r"b\.kvrec cannot be read at byte \d+: devices"):
        recording.cursor().seek(recording.end_ns)


def test_devices_are_told_of_once_behind_a_sample(start_stepping: StartStepping, tmp_path: Path) -> None:
    """Each takes its time to check, and thousands of empty changes would be a small file."""
    engine = start_stepping()
    reader, written = MapReader(engine.path), ChunkWriter(tmp_path / "a.kvrec")
    recorder = Recorder(reader, written, engine.id, devices=full_view)
    with closing(reader):
        recorder.begin()
        written.append(ChunkKind.DEVICES, 2**62, b"{}")
        written.finish()
    with pytest.raises(RecordingError, match="told of once behind a sample"):
        Recording(tmp_path / "a.kvrec")


# ---- kvatlas record -------------------------------------------------------------------------------------------------


def last_devices(path: Path) -> DevicesView | None:
    recording = Recording(path)
    with closing(recording):
        cursor = recording.cursor()
        cursor.seek(recording.end_ns)
        return cursor.state().devices


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("nvml") / "new")


def test_the_command_records_the_gpus_that_change_beside_it(
    start_stepping: StartStepping,
    start_recorder: StartRecorder,
    library: Path,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    engine = start_stepping(medium="cuda", gpu_uuids=["GPU-00000000-aaaa-bbbb-cccc-000000000000"])
    script = tmp_path / "script"

    def say(used: int) -> None:
        keys = {"count": 1, **gpu(0, used=used, free=23 * GIB - used, processes=f"{engine.process.pid}:{GIB}")}
        fresh = tmp_path / "fresh"
        fresh.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
        fresh.replace(script)

    say(4 * GIB)
    recorder = start_recorder(
        engine,
        tmp_path / "a.kvrec",
        "--json",
        "--interval-seconds",
        "0.1",
        environment={
            "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(script), "KVATLAS_DEVICES_SECONDS": "0.5",
        },
    )  # fmt: skip

    def used() -> int:
        told = last_devices(tmp_path / "a.kvrec.part")
        memory = told.devices[0].sample.memory if told is not None and told.devices else None
        return memory.used_bytes if memory is not None else 0

    wait_until(lambda: used() == 4 * GIB, within=PATIENCE_SECONDS)
    say(6 * GIB)
    engine.step(50)
    wait_until(lambda: used() == 6 * GIB, within=PATIENCE_SECONDS)
    told = last_devices(tmp_path / "a.kvrec.part")  # a later one may be of when the engine had ended
    engine.close()
    status, out, errors = recorder.end()
    assert status == 0, errors
    facts = json.loads(out)
    assert facts["device_readings"] >= 2
    assert facts["lost_events"] == 0
    assert told is not None
    assert (told.nvml.state, told.nvml.driver_version) == (LibraryState.OK, "999.1")
    (device,) = told.devices
    assert device.processes is not None
    assert [(one.pid, one.engine_id) for one in device.processes] == [(engine.process.pid, "engine")]
    assert device.attribution is not None
    assert device.attribution.bytes_of(RowKind.KV_POOL) == 600 * 4096
    assert told.host is not None
    (process,) = told.engines
    assert process.pid == engine.process.pid


@pytest.mark.parametrize(
    ("trouble", "state"),
    [
        ("nvmlInitWithFlags=hang\n", LibraryState.HUNG),
        ("count=1\nnvmlDeviceGetCount_v2=hang\n", LibraryState.HUNG),
        ("nvmlInitWithFlags=9\n", LibraryState.NO_DRIVER),
        ("no library", LibraryState.NO_LIBRARY),
        ("broken binding", LibraryState.FAILED),
        ("off", LibraryState.OFF),
    ],
)
def test_whatever_befalls_the_driver_no_event_is_lost_and_it_is_told(
    start_stepping: StartStepping,
    start_recorder: StartRecorder,
    library: Path,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    trouble: str,
    state: LibraryState,
) -> None:
    engine = start_stepping()
    (tmp_path / "script").write_text(trouble if "=" in trouble else "count=0\n")
    environment = {
        "FAKE_NVML": str(tmp_path / "script"),
        "KVATLAS_DEVICES_SECONDS": "0.5",
        "KVATLAS_DEVICES_TIMEOUT_SECONDS": "0.5",
    }
    if trouble == "broken binding":
        (tmp_path / "binding").mkdir()
        (tmp_path / "binding" / "pynvml.py").write_text("raise RuntimeError('of another Python')\n")
        environment["PYTHONPATH"] = str(tmp_path / "binding")
    if "=" in trouble:
        environment["LD_LIBRARY_PATH"] = str(library)
    elif trouble == "no library" and shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    flags = ("--no-devices",) if trouble == "off" else ()
    recorder = start_recorder(
        engine, tmp_path / "a.kvrec", "--json", "--interval-seconds", "0.1", *flags, environment=environment
    )
    for _ in range(5):
        engine.step(20)

    def told() -> bool:
        view = last_devices(tmp_path / "a.kvrec.part")
        return view is not None and view.nvml.state is state and view.host is not None and len(view.engines) == 1

    wait_until(told, within=PATIENCE_SECONDS)
    engine.close()
    status, out, errors = recorder.end()
    assert status == 0, errors
    assert errors.count("\n") == 1, errors  # nothing is said between the lines
    facts = json.loads(out)
    assert (facts["lost_events"], facts["ended"]) == (0, "the engine ended in good order")
    view = last_devices(tmp_path / "a.kvrec")
    assert view is not None
    assert view.nvml.reason or state is LibraryState.OK
    assert view.devices == ()
    assert os.stat(tmp_path / "a.kvrec").st_size == facts["bytes"]
