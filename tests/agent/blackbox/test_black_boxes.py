"""Black boxes of real engine processes that end in every way there is."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.blackbox import contents
from agent.blackbox.contents import read_facts
from agent.blackbox.keeper import BlackBoxes
from agent.blackbox.privacy import hash_id, scrub_map
from agent.history import MemoryHistory
from agent.history.entries import Mark
from agent.sampling.sampler import Sampler
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import MapCorrupt
from engine_shim.layout import HEADER
from tests.agent.conftest import PATIENT

Start = Callable[..., Any]
REQUEST, SALT = "chatcmpl-7f3e-of-a-customer", "salt-of-a-tenant"


class Watch:
    """A sampler and a keeper of boxes, ticked by hand."""

    def __init__(self, maps: Path, state: Path, most: int = 20, **options: Any) -> None:
        history = MemoryHistory()
        self.sampler = Sampler(lambda: [maps], MapReader, history, settings=PATIENT)
        self.boxes = BlackBoxes(state, most, history, settings={"listen": "here"}, **options)

    def tick(self) -> list[Path]:
        """Returns the boxes that there are, oldest first."""
        self.boxes.look(self.sampler.tick())
        return sorted(self.boxes.folder.glob("*.tar.gz"))


@pytest.fixture
def watch(folder: Path, tmp_path: Path) -> Any:
    made: list[Watch] = []

    def make(**options: Any) -> Watch:
        made.append(Watch(folder, tmp_path / "state", **options))
        return made[-1]

    yield make
    for one in made:
        one.sampler.close()
        for watched in one.boxes._watched.values():
            watched.close()


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path, "r:gz") as archive:
        return {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]


def busy(engine: Any) -> None:
    """Three blocks of one request, one freed, on the map."""
    owner = engine.open_owner(REQUEST, cache_salt=SALT)
    engine.allocated([1, 2, 3], owner)
    engine.progressed([owner], [40])
    engine.step_ended(1, 0)
    engine.freed([3])
    engine.step_ended(1, 2)


@pytest.mark.parametrize("how", ["kill", "close", "restart"])
def test_however_an_engine_ends_it_is_boxed_once(how: str, start_engine: Start, watch: Any, folder: Path) -> None:
    engine = start_engine(total_blocks=50)
    busy(engine)
    watching = watch()
    assert watching.tick() == []  # the negative control: it lives
    if how == "close":
        engine.close()  # in good order: its map vanishes
        assert not engine.path.exists()
    engine.kill()
    if how == "restart":
        again = start_engine(total_blocks=50)
        again.step_ended(0, 0)
    (path,) = watching.tick()
    assert watching.tick() == [path]
    box = members(path)
    facts = json.loads(box["box.json"])
    assert facts["schema"] == "kvatlas.black-box/v1"
    assert facts == read_facts(path)
    assert (facts["id"], facts["left_out"]) == (engine.id, [])
    assert facts["in_good_order"] == (how == "close")
    assert facts["blocks_by_state"][:5] == [48, 0, 2, 0, 0]
    assert (facts["running_requests"], facts["waiting_requests"]) == (1, 2)
    assert facts["agent"]["settings"] == {"listen": "here"}
    assert facts["reason"]
    events = json.loads(box["events.json"])["events"]
    assert [(one["kind"], one["block"], one["count"]) for one in events] == [("allocate", 1, 3), ("free", 3, 1)]
    (request,) = json.loads(box["requests.json"])["requests"]
    assert (request["request_id"], request["cache_salt"]) == (hash_id(REQUEST), hash_id(SALT))
    assert (request["tokens"], request["blocks"]) == (40, 3)
    history = json.loads(box["history.json"])
    used = [each[2] for each in history["minimum_mean_maximum"]["used"] if each[2] is not None]
    # The one that took its place is sampled in the same second or, with none of these blocks, in a later one.
    assert used == [2.0] or (how == "restart" and used == [2.0, 0.0])
    # Its map is one that every command reads.
    copy = folder.parent / "copy.kvmap"
    copy.write_bytes(box["map.kvmap"])
    reader = MapReader(copy)
    snapshot = reader.read()
    reader.close()
    assert np.flatnonzero(snapshot.states == 2).tolist() == [1, 2]
    assert snapshot.owners[0].request_id == hash_id(REQUEST)
    assert path.stat().st_mode & 0o777 == 0o600
    if how == "restart":
        again.kill()


def test_no_request_id_is_in_a_box(start_engine: Start, watch: Any) -> None:
    engine = start_engine(total_blocks=50)
    busy(engine)
    ended = engine.open_owner("an-ended-request")
    engine.allocated([10], ended)
    engine.step_ended(2, 0)
    engine.freed([10])
    engine.close_owner(ended)
    engine.step_ended(1, 0)
    watching = watch()
    watching.tick()
    raw = engine.path.read_bytes()
    assert REQUEST.encode() in raw  # the negative control: the map itself has them
    assert SALT.encode() in raw
    engine.kill()
    (path,) = watching.tick()
    everything = b"".join(members(path).values())
    for word in (REQUEST, SALT, "an-ended-request"):
        assert word.encode() not in everything


def test_an_engine_that_was_killed_while_it_published(start_engine: Start, watch: Any) -> None:
    engine = start_engine(total_blocks=50)
    busy(engine)
    watching = watch()
    watching.tick()
    engine.kill()
    with engine.path.open("r+b") as file:
        header = np.frombuffer(file.read(HEADER.itemsize), HEADER)[0]
        file.seek(int(header["live_offset"]))
        file.write((7).to_bytes(8, "little"))  # odd: within a publish
    (path,) = watching.tick()
    box = members(path)
    facts = json.loads(box["box.json"])
    assert ["its last publish never ended" in line for line in facts["left_out"]] == [True]
    assert facts["blocks_by_state"][:5] == [48, 0, 2, 0, 0]  # of the last whole sample
    assert REQUEST.encode() not in b"".join(box.values())
    assert json.loads(box["events.json"])["events"]
    assert "map.kvmap" in box


def test_an_engine_that_ended_while_no_agent_ran_is_boxed_by_the_next(start_engine: Start, watch: Any) -> None:
    engine = start_engine(total_blocks=50)
    busy(engine)
    engine.kill()
    (path,) = watch().tick()
    assert watch().tick() == [path]  # and not again by the one after that
    assert read_facts(path)["state"] == "gone"


def test_the_number_of_boxes_is_bounded_and_the_newest_stay(start_engine: Start, watch: Any) -> None:
    watching = watch(most=2)
    seen = []
    for number in range(4):
        engine = start_engine(total_blocks=8, engine_id=f"engine-{number}")
        engine.step_ended(0, 0)
        watching.tick()
        engine.kill()
        seen = watching.tick()
    assert len(seen) == 2
    assert {read_facts(path)["engine"]["engine_id"] for path in seen} <= {f"engine-{n}" for n in (0, 1, 2, 3)}
    ends = [read_facts(path)["ended_unix"] for path in seen]
    assert ends == sorted(ends)


def test_the_size_of_boxes_is_bounded(start_engine: Start, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.blackbox.keeper.MAX_BYTES", 1)
    watching = watch()
    for number in range(2):
        engine = start_engine(total_blocks=8, engine_id=f"engine-{number}")
        engine.step_ended(0, 0)
        watching.tick()
        engine.kill()
        watching.tick()
    assert len(watching.tick()) == 1


def test_a_map_that_is_too_large_is_left_out_and_that_is_said(
    start_engine: Start, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_MAP_BYTES", 1000)
    engine = start_engine(total_blocks=50)
    busy(engine)
    watching = watch()
    watching.tick()
    engine.kill()
    (path,) = watching.tick()
    box = members(path)
    assert "map.kvmap" not in box
    assert "1,000 are kept" in json.loads(box["box.json"])["left_out"][0]
    (request,) = json.loads(box["requests.json"])["requests"]  # from the last sample, as are the counts
    assert request["request_id"] == hash_id(REQUEST)


def test_a_folder_that_cannot_be_written_is_said_and_tried_again(
    start_engine: Start, watch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(total_blocks=50)
    busy(engine)
    state = tmp_path / "state"
    state.write_text("a file")
    watching = watch()
    watching.tick()
    engine.close()
    engine.kill()
    assert watching.tick() == []
    state.unlink()
    for watched in watching.boxes._watched.values():
        watched.retry_at = 0.0  # the minute has passed
    (path,) = watching.tick()
    assert read_facts(path)["left_out"] == []  # its map was held all the time


def test_marks_are_in_the_box(start_engine: Start, watch: Any) -> None:
    engine = start_engine(total_blocks=50)
    busy(engine)
    asked: list[tuple[str, float, float]] = []

    def marks(id: str, start: float, end: float) -> tuple[Mark, ...]:
        asked.append((id, start, end))
        return (Mark(end, id, "engine", "the engine is live", {"state": "live"}),)

    watching = watch(marks=marks)
    watching.tick()
    engine.kill()
    (path,) = watching.tick()
    assert json.loads(members(path)["marks.json"])["marks"][0]["text"] == "the engine is live"
    assert asked[0][0] == engine.id
    assert asked[0][2] - asked[0][1] >= 86_400


def test_with_none_wanted_none_is_made(start_engine: Start, watch: Any) -> None:
    engine = start_engine(total_blocks=50)
    watching = watch(most=0)
    watching.tick()
    engine.kill()
    assert watching.tick() == []


@pytest.mark.parametrize("damage", ["no magic", "cut", "no owners"])
def test_what_cannot_be_scrubbed_is_not_kept(damage: str, start_engine: Start) -> None:
    engine = start_engine(total_blocks=50)
    busy(engine)
    content = bytearray(engine.path.read_bytes())
    if damage == "no magic":
        content[:4] = b"else"
    elif damage == "cut":
        del content[3000:]
    else:
        at = content.index(b"owners\0")
        content[at : at + 6] = b"nobody"
    with pytest.raises(MapCorrupt):
        scrub_map(content)


def test_a_damaged_box_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(b"\x1f\x8b nothing")
    with pytest.raises((ValueError, OSError)):
        read_facts(path)
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("box.json")
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    with pytest.raises(ValueError, match="no black box"):
        read_facts(path)
