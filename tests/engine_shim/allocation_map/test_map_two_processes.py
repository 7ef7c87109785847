"""Writer and reader as they really are: two processes, one of which may die, stop or lie."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_shim import BlockState, MapObserver, MapReader, MapSpec, MapWriter
from engine_shim.errors import MapBusy, MapSpaceError, MapUnavailable

WRITER = Path(__file__).with_name("restless_writer.py")
Start = Callable[..., tuple["subprocess.Popen[str]", Path]]
# Of waits that end by themselves: no more than what a machine with many other things to do may take.
READ_SECONDS, PATIENCE_SECONDS = 60.0, 120.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts restless writers; the result is the process and its map."""
    running: list[subprocess.Popen[str]] = []

    def start_one(blocks: int = 50_000, pause: float = 0.001, *extra: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, str(WRITER), str(tmp_path), str(blocks), str(pause), *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.endswith(".kvmap"), line
        return process, Path(line)

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


def stop_between_publishes(process: subprocess.Popen[str], reader: MapReader) -> None:
    """Hold a writer where its map is whole, so that a kill does not tear it."""
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        if reader.sequence() % 2 == 0:
            return
        process.send_signal(signal.SIGCONT)


def disagreements(reader: MapReader, reads: int) -> int:
    """Snapshots whose states do not add up to the counts that the writer published with them."""
    wrong = 0
    for _ in range(reads):
        snapshot = reader.read(READ_SECONDS)
        counted = np.bincount(snapshot.states, minlength=8)
        wrong += tuple(counted.tolist()) != snapshot.state_counts
    return wrong


def test_a_reader_beside_a_restless_writer_gets_only_whole_snapshots(start: Start) -> None:
    _, path = start()
    reader = MapReader(path)
    assert disagreements(reader, 150) == 0
    before = reader.read(READ_SECONDS).sequence
    assert reader.read(READ_SECONDS).sequence >= before


def let_a_publish_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each attempt wait, between its reads of counts and states, until the writer has published again."""
    read_items = MapReader._read_items

    def late(self: MapReader, name: str, first: int, into: np.ndarray) -> None:
        if name == "state":
            before = self._read_live()["sequence"]
            while self._read_live()["sequence"] < before + 4:
                time.sleep(0)
        read_items(self, name, first, into)

    monkeypatch.setattr(MapReader, "_read_items", late)


def test_a_publish_between_two_reads_is_noticed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = start()
    reader = MapReader(path)
    let_a_publish_in_between(monkeypatch)
    for _ in range(3):
        with pytest.raises(MapUnavailable, match="no whole snapshot"):
            reader.read(timeout_seconds=0.02)
    assert reader.torn_reads >= 3


def test_without_the_sequence_check_torn_snapshots_get_through(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: they can fail."""
    _, path = start()
    monkeypatch.setattr(MapReader, "_unchanged_since", lambda self, live: True)
    let_a_publish_in_between(monkeypatch)
    assert disagreements(MapReader(path), 20) > 0


def test_other_columns_are_consistent_segment_by_segment(start: Start) -> None:
    """A used block has a reference, another has none; in each segment that holds for columns of one publish."""
    process, path = start(20_000, 0.002)
    reader = MapReader(path)
    for _ in range(50):
        snapshot = reader.read(READ_SECONDS)
        assert snapshot.references is not None
        assert snapshot.group is not None
        assert ((snapshot.references > 0) == (snapshot.group != 255)).all()
    # A segment that the writer was at in every try stays as it was; once the writer rests, none does.
    stop_between_publishes(process, reader)
    stale = reader.stale_segments
    reader.read(READ_SECONDS)
    assert reader.stale_segments == stale


def test_a_reader_that_ends_leaves_the_map_and_prints_nothing(start: Start) -> None:
    process, path = start()
    read = f"MapReader(Path({str(path)!r})).read({READ_SECONDS})"
    code = f"from pathlib import Path; from engine_shim import MapReader; {read}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert path.exists()
    reader = MapReader(path)
    assert reader.writer_alive()
    first = reader.read(READ_SECONDS).sequence
    deadline = time.monotonic() + PATIENCE_SECONDS
    while reader.read(READ_SECONDS).sequence == first:
        assert time.monotonic() < deadline
    assert process.poll() is None


def test_a_writer_killed_while_it_publishes_leaves_a_map_that_is_never_taken_for_whole(start: Start) -> None:
    process, path = start(50_000, 0.0, "die-in-publish")
    process.wait(PATIENCE_SECONDS)
    reader = MapReader(path)
    assert not reader.writer_alive()
    with pytest.raises(MapUnavailable, match="no whole snapshot"):
        reader.read(timeout_seconds=0.05)
    assert not reader.flags().closing
    assert path.exists()


def test_kill_9_frees_the_lock_and_a_restart_with_another_size_takes_the_name(start: Start) -> None:
    process, path = start(50_000)
    reader = MapReader(path)
    assert reader.writer_alive()
    assert not reader.replaced()
    old = reader.read(READ_SECONDS)
    stop_between_publishes(process, reader)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
    assert not reader.writer_alive()
    assert reader.read(READ_SECONDS).identity.incarnation == old.identity.incarnation  # the black box is still whole
    start(70_000)
    assert reader.replaced()
    fresh = MapReader(path).read(READ_SECONDS)
    assert fresh.identity.total_blocks == 70_000
    assert fresh.identity.incarnation != old.identity.incarnation


def spec(**changes: object) -> MapSpec:
    facts: dict[str, object] = {
        "engine_id": "restless",
        "kind": "reference",
        "model": "tiny",
        "pool": "kv",
        "total_blocks": 1000,
        "block_tokens": 16,
        "block_bytes": 1024,
        "dtype": "float16",
    }
    return MapSpec(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_second_writer_of_a_live_map_is_refused_and_its_engine_goes_on(start: Start, tmp_path: Path) -> None:
    _, path = start()
    with pytest.raises(MapBusy, match="another live engine"):
        MapWriter.create(spec(), tmp_path)
    observer = MapObserver.create(spec(), tmp_path)
    observer.allocated([1])
    observer.step_ended(1, 0)
    assert observer.path is None
    assert "another live engine" in observer.reason
    assert disagreements(MapReader(path), 3) == 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # no half-made file is left


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first = MapObserver.create(spec(), tmp_path)
    with pytest.raises(MapBusy, match="this process"):
        MapWriter.create(spec(), tmp_path)
    first.close()
    MapWriter.create(spec(), tmp_path).close()


def test_another_spelling_of_the_folder_is_the_same_map(tmp_path: Path) -> None:
    (tmp_path / "maps").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "maps")
    first = MapWriter.create(spec(), tmp_path / "maps")
    with pytest.raises(MapBusy, match="this process"):
        MapWriter.create(spec(), tmp_path / "link")
    code = (
        "import sys; from pathlib import Path; from engine_shim import MapReader; "
        "sys.exit(not MapReader(Path(sys.argv[1])).writer_alive())"
    )
    assert subprocess.run([sys.executable, "-c", code, str(first.path)], check=False).returncode == 0
    first.close()


def test_a_change_of_the_working_folder_leaves_no_map_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = MapWriter.create(spec(), Path("maps"))
    monkeypatch.chdir("/")
    writer.close()
    assert list((tmp_path / "maps").iterdir()) == []


def test_a_file_that_is_no_map_keeps_its_name(tmp_path: Path) -> None:
    path = tmp_path / spec().file_name
    path.write_text("mine")
    with pytest.raises(MapSpaceError, match="in the way and is no map"):
        MapWriter.create(spec(), tmp_path)
    assert path.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_map_has_no_name_before_it_is_complete_and_none_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that kill -9 while a map is made leaves nothing."""
    seen: list[list[Path]] = []

    def fill_in(*arguments: object) -> None:
        seen.append(list(tmp_path.iterdir()))
        raise OSError("power cut")

    monkeypatch.setattr(MapWriter, "_fill_in", fill_in)
    with pytest.raises(OSError, match="power cut"):
        MapWriter.create(spec(), tmp_path)
    assert seen == [[]]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_can_start_no_thread_leaves_no_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    observer = MapObserver.create(spec(), tmp_path)
    assert "can't start new thread" in observer.reason
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_map_is_an_error_now_and_not_a_signal_later(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(MapSpaceError, match=r"no room .* MiB"):
            MapWriter.create(spec(total_blocks=1_000_000), tmp_path)
        observer = MapObserver.create(spec(total_blocks=1_000_000), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    observer.allocated([1])
    observer.step_ended(1, 0)
    assert "no room" in observer.reason
    assert list(tmp_path.iterdir()) == []


def test_a_full_tmpfs_of_its_own_is_such_an_error(tmp_path: Path) -> None:
    """In a mount namespace of its own; needs the right to mount, which CI has."""
    code = (
        "from pathlib import Path; from engine_shim import MapObserver, MapSpec\n"
        "o = MapObserver.create(MapSpec(engine_id='e', kind='k', model='m', pool='p', total_blocks=100_000,"
        f" block_tokens=16, block_bytes=1, dtype='f'), Path({str(tmp_path)!r}))\n"
        "o.allocated([1]); o.step_ended(1, 0); print(o.reason)"
    )
    script = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$0"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, code, str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no room" in done.stdout
    assert "KVATLAS_DIR" in done.stdout


def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MapSpaceError, match=r"file/inside.*KVATLAS_DIR"):
        MapWriter.create(spec(), tmp_path / "file" / "inside")


def test_ids_that_are_no_file_names_do_not_leave_the_folder(tmp_path: Path) -> None:
    writer = MapWriter.create(spec(engine_id="../../etc/pass wd", pool="a/b"), tmp_path)
    assert writer.path.parent == tmp_path
    assert MapReader(writer.path).identity.engine_id == "../../etc/pass wd"
    writer.close()


def test_a_pool_of_one_block(tmp_path: Path) -> None:
    observer = MapObserver.create(spec(total_blocks=1), tmp_path)
    observer.pinned([0])
    observer.step_ended(1, 0)
    assert observer.path is not None
    assert MapReader(observer.path).read().states.tolist() == [BlockState.PINNED]
    observer.close()
