"""`kvatlas allocator`: keys that scripts rely on, a text, a picture, and bounds that hold for a large file."""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.allocator.picture import stripes_of
from agent.allocator.snapshot import parse_snapshot
from agent.cli import main
from tests.agent.allocator.conftest import MIB, block, busy_allocator, segment, traces, whole_snapshot

ROOT = Path(__file__).resolve().parents[3]
KEYS = ("reserved_bytes", "live_bytes", "pending_bytes", "free_bytes", "internal_waste_bytes", "pools", "warnings")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snap<shot>.pickle"
    path.write_bytes(pickle.dumps(whole_snapshot(busy_allocator(3, 400).snapshot())))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main(["allocator", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_keys_that_scripts_rely_on(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, snapshot)
    assert facts["schema"] == "kvatlas.allocator/v1"
    assert set(KEYS) <= set(facts)
    assert facts["reserved_bytes"] == facts["live_bytes"] + facts["pending_bytes"] + facts["free_bytes"]
    for pool in facts["pools"]:
        assert {"largest_free_bytes", "fragmentation_rate", "reserved_bytes", "free_bytes"} <= set(pool)
    assert {one["option"] for one in facts["advice"]} == {"empty_cache", "expandable_segments", "max_split_size"}


def test_the_text_for_people(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allocator", str(snapshot)]) == 0
    text = capsys.readouterr().out
    for part in ("reserved", "GPU 0 default", "private 0,1", "empty_cache", "warning: history not recorded"):
        assert part in text


def test_the_picture_needs_nothing_else(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.html"
    assert told(capsys, snapshot, "--html", picture)["html_left_out"] == ""
    page = picture.read_text()
    assert "Plotly.newPlot" in page
    assert 'src="http' not in page
    assert "<shot>" not in page  # a file's name is no markup
    assert "pending free" in page


def test_a_picture_of_very_many_segments_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "many.json", tmp_path / "picture.html"
    path.write_text(json.dumps([segment(block((number + 1) * MIB)) for number in range(400)]))
    assert told(capsys, path, "--html", picture)["html_left_out"].startswith("the largest 300 of 400 segments")


def test_neighbours_of_one_state_are_drawn_as_one() -> None:
    states = ("inactive", "active_allocated", "active_allocated", "active_pending_free", "inactive")
    (one,) = parse_snapshot([segment(*(block(512, state) for state in states))]).segments
    stripes = stripes_of(one)
    assert stripes.starts.tolist() == [0, 512, 1536, 2048]
    assert stripes.sizes.tolist() == [512, 1024, 512, 512]
    assert stripes.blocks.tolist() == [1, 2, 1, 1]
    (nothing,) = parse_snapshot([segment()]).segments
    assert np.array_equal(stripes_of(nothing).sizes, [])


def test_a_stranger_pickle_is_refused_and_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, proof = tmp_path / "evil.pickle", tmp_path / "proof"
    path.write_bytes(b"cos\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR.")
    assert main(["allocator", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(path) in error
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R.")
    assert main(["allocator", str(path)]) == 1
    assert "os.system" in capsys.readouterr().err
    assert not proof.exists()


@pytest.mark.parametrize("name", ["missing.pickle", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allocator", str(tmp_path / name)]) == 1
    assert "error: " in capsys.readouterr().err


BOUNDED = """
import json, resource, sys
from agent.commands.allocator import describe_snapshot
from agent.allocator.errors import SnapshotError
from pathlib import Path
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * 4096
limit = mapped + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    facts = describe_snapshot(Path(sys.argv[1]))
    print(json.dumps([facts["segments"], facts["reserved_bytes"], facts["warnings"]]))
except SnapshotError as error:
    print(json.dumps(str(error)))
"""


def run_bounded(path: Path, extra_bytes: int) -> Any:
    """Read in a process that may map no more than that beyond what Python and NumPy have."""
    command = [sys.executable, "-c", BOUNDED, str(path), str(extra_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """500 MB, nearly all of it history, as a long record makes it: one batch of the list, again and again."""
    path = tmp_path / "large.pickle"
    value = {"segments": busy_allocator(5, 300).snapshot(), "device_traces": [list(traces(20_000))]}
    whole = pickle.dumps(value, 4)
    begin = whole.index(b"(}", whole.index(b"device_traces"))
    batches = whole[begin:-3]
    assert (batches[-1:], whole[-3:]) == (b"e", b"au.")
    with path.open("wb") as file:
        file.write(whole[:begin])
        while file.tell() < 500_000_000:
            file.write(batches)
        file.write(b"au.")
    yield path
    path.unlink()  # pytest keeps the folders of its last runs


def _members(values: list[Any]) -> list[bytes]:
    return [pickle.dumps(one, 2)[2:-1] for one in values]


def test_a_file_of_500_mb_is_read_within_64_mib(large: Path) -> None:
    """The bound that docs/devices.md states, for a snapshot whose size is its history."""
    segments, reserved, warnings = run_bounded(large, 64 * MIB)
    expected = busy_allocator(5, 300).segments
    assert (segments, reserved) == (len(expected), sum(one.total for one in expected))
    assert not any("history not recorded" in one for one in warnings)


def test_json_beyond_its_bound_is_refused_and_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.write(b'{"segments": [')
        file.truncate(100_000_000)
    assert "JSON beyond 64 MiB is not read" in run_bounded(path, 256 * MIB)


def test_more_blocks_than_the_bound_are_refused_within_it(tmp_path: Path) -> None:
    path, limits = tmp_path / "blocks.pickle", resource.getrlimit(resource.RLIMIT_AS)
    one = _members([segment(*(block(512) for _ in range(2000)))])[0]
    with path.open("wb") as file:
        file.write(b"\x80\x02](")
        for _ in range(200):
            file.write(one)
        file.write(b"e.")
    assert "refused: more than 1,500,000 values" in run_bounded(path, 256 * MIB)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits  # of this process nothing changed
