"""A recording that is damaged, or made to do harm, is refused in words, within bounds, and never by a crash."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.devices.signals import signals
from agent.recording.chunks import (
    CHUNK_HEAD,
    CHUNK_MARK,
    FILE_HEAD,
    ChunkFile,
    ChunkKind,
    ChunkWriter,
    RecordingError,
)
from agent.recording.contents import decode_events, encode_events
from agent.recording.reading import Recording
from agent.recording.recorder import Recorder
from agent.recording.rerun import rerun
from agent.sampling.model import Clock
from agent.web.device_routes import describe_devices
from engine_shim import layout
from engine_shim.allocation_map.reader import MapReader
from tests.agent.recording.full_view import full_view
from tests.agent.recording.support import SteppingEngine

BLOCKS = 64
MANY = settings(
    derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40
)
Chunk = tuple[int, int, bytes]  # kind, time, payload


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small recording with everything in it."""
    folder = tmp_path_factory.mktemp("maps")
    engine = SteppingEngine(folder, blocks=BLOCKS, events_per_second=1)
    reader = MapReader(engine.path)
    now = 2_000_000_000.0
    clock = Clock(lambda: now, lambda: now)
    recorder = Recorder(
        reader,
        ChunkWriter(folder / "sound.kvrec"),
        engine.id,
        1.0,
        clock,
        devices=lambda: replace(full_view(), taken_monotonic=now, cgroup_reason=f"at {now}"),
    )
    try:
        recorder.begin()
        for steps in (20, 30, 1000, 30, 10):
            engine.step(steps, round(now * 1e9))
            now += 1.0
            recorder.poll()
        recorder.end("enough")
        recorder.writer.finish()
    finally:
        reader.close()
        engine.kill()
    assert recorder.tally.gaps
    return folder / "sound.kvrec"


@pytest.fixture(scope="module")
def chunks(sound: Path) -> list[Chunk]:
    file = ChunkFile(sound)
    found = [(place.kind, place.time_ns, file.read(place)) for place in file.places()]
    file.close()
    return found


def use(path: Path) -> None:
    """Everything that is done with a recording. Raises nothing but RecordingError, which names the file."""
    with suppress(RecordingError), named(path):
        recording = Recording(path)
        with closing(recording):
            cursor = recording.cursor()
            for time_ns in (*recording.sample_times_ns, recording.start_ns + 1, recording.end_ns):
                cursor.seek(time_ns)
                state = cursor.state()
                assert state.snapshot.states.size == recording.header.identity.total_blocks
                if state.devices is not None:
                    describe_devices(state.devices, Clock()).model_dump_json()
                    list(signals(state.devices))
            rerun(recording, policies=("vllm",))


@contextmanager
def named(path: Path) -> Iterator[None]:
    try:
        yield
    except RecordingError as error:
        if str(path) not in str(error):
            raise AssertionError(f"{error} does not name its file") from error
        raise


def write(path: Path, chunks: list[Chunk]) -> Path:
    """With checksums that are right: only the contents are wrong."""
    path.unlink(missing_ok=True)
    writer = ChunkWriter(path)
    for kind, time_ns, payload in chunks:
        writer.append(kind, time_ns, payload)  # type: ignore[arg-type]
    writer.finish()
    return path


def test_the_sound_one_is_used_without_an_error(sound: Path) -> None:
    recording = Recording(sound)
    assert (recording.torn, recording.ended) == ("", "enough")
    rerun(recording, policies=("vllm",))
    recording.close()


@MANY
@given(seed=st.integers(0, 2**32))
def test_any_damage_of_bytes_is_an_error_or_a_dropped_end(sound: Path, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    content = bytearray(sound.read_bytes())
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(content))
        match dice.randrange(4):
            case 0:
                content[at] ^= 1 << dice.randrange(8)
            case 1:
                del content[at:]
                content = content or bytearray(b"K")
            case 2:
                del content[at : at + dice.randrange(1, 60)]
                content = content or bytearray(b"K")
            case 3:
                content[at:at] = dice.randbytes(dice.randrange(1, 60))
    path = tmp_path / "damaged.kvrec"
    path.write_bytes(content)
    use(path)


@MANY
@given(seed=st.integers(0, 2**32))
def test_contents_that_cannot_be_are_an_error_though_their_checksums_are_right(
    chunks: list[Chunk], tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    changed = list(chunks)
    for _ in range(dice.randrange(1, 3)):
        at = dice.randrange(len(changed))
        kind, time_ns, payload = changed[at]
        match dice.randrange(5):
            case 0:
                data = bytearray(payload)
                for _ in range(dice.randrange(1, 5)):
                    data[dice.randrange(len(data))] = dice.randrange(256)
                changed[at] = (kind, time_ns, bytes(data))
            case 1:
                changed[at] = (kind, time_ns, payload[: dice.randrange(len(payload))])
            case 2:
                changed[at] = (dice.randrange(256), time_ns, payload)
            case 3:
                changed[at] = (kind, time_ns + dice.randrange(-(10**10), 10**10), payload)
            case 4:
                other = dice.randrange(len(changed))
                changed[at], changed[other] = changed[other], changed[at]
    use(write(tmp_path / "hostile.kvrec", changed))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with a key of it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield value, key
        yield from places_in(one)


@MANY
@given(seed=st.integers(0, 2**32), value=VALUES, remove=st.booleans())
def test_any_field_may_hold_anything(
    chunks: list[Chunk], tmp_path: Path, seed: int, value: object, remove: bool
) -> None:
    """In the header, in the facts of a base, in devices, and in the words at the end."""
    dice = random.Random(seed)
    at = dice.choice([i for i, (kind, _, _) in enumerate(chunks) if kind in (1, 3, 6, 7, 8)])
    kind, time_ns, payload = chunks[at]
    start, size = (4, int.from_bytes(payload[:4], "little")) if kind == ChunkKind.BASE else (0, len(payload))
    told = json.loads(payload[start : start + size])
    container, key = dice.choice(list(places_in(told)))
    if remove:
        del container[key]
    else:
        container[key] = value
    text = json.dumps(told).encode()
    head = len(text).to_bytes(4, "little") if start else b""
    changed = [*chunks[:at], (kind, time_ns, head + text + payload[start + size :]), *chunks[at + 1 :]]
    use(write(tmp_path / "fields.kvrec", changed))


@MANY
@given(rows=st.lists(st.tuples(*[st.integers(0, 255)] * layout.EVENT.itemsize), min_size=1, max_size=8))
def test_events_may_be_anything(chunks: list[Chunk], tmp_path: Path, rows: list[tuple[int, ...]]) -> None:
    events = np.frombuffer(bytes(byte for row in rows for byte in row), layout.EVENT).copy()
    at = next(i for i, (kind, _, _) in enumerate(chunks) if kind == ChunkKind.EVENTS)
    kind, time_ns, payload = chunks[at]
    first, before = decode_events(payload)
    mixed = np.concatenate((before[: -len(events)], events))[: len(before)]
    use(
        write(
            tmp_path / "events.kvrec", [*chunks[:at], (kind, time_ns, encode_events(first, mixed)), *chunks[at + 1 :]]
        )
    )


def test_a_chunk_that_inflates_to_more_than_it_says_takes_no_memory(
    chunks: list[Chunk], sound: Path, tmp_path: Path
) -> None:
    bomb = zlib.compress(bytes(64 * 2**20), 1)
    fields = CHUNK_HEAD.pack(CHUNK_MARK, ChunkKind.NOTE, 1, len(bomb), 100, chunks[-1][1], zlib.crc32(bomb), 0)[:-4]
    content = sound.read_bytes() + fields + zlib.crc32(fields).to_bytes(4, "little") + bomb
    (tmp_path / "bomb.kvrec").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(RecordingError, match="not as long as it says"):
        Recording(tmp_path / "bomb.kvrec")
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: b"", "wrong magic"),
        (lambda content: b"KVATLAS\0" + content[8:], "wrong magic"),
        (lambda content: content[: FILE_HEAD.size], "ended at its start"),
        (lambda content: content[:200], "ended at its start"),
        (lambda content: content[: FILE_HEAD.size] + b"\xff" * 400, "no chunk begins there"),
    ],
    ids=["empty", "a map", "head alone", "no sample", "noise"],
)
def test_what_is_no_recording_is_told_so(
    sound: Path, tmp_path: Path, change: Callable[[bytes], bytes], why: str
) -> None:
    (tmp_path / "not.kvrec").write_bytes(change(sound.read_bytes()))
    with pytest.raises(RecordingError, match=why):
        Recording(tmp_path / "not.kvrec")


def test_a_folder_a_pipe_and_nothing_are_told_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path, "no regular file"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / "x", "No such"),
    ):
        with pytest.raises(RecordingError, match=why):
            Recording(path)
