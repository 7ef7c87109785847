"""Black boxes opened again: everything that was put in comes out, and what is damaged is said to be."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.blackbox.keeper import FOLDER, BlackBoxes
from agent.blackbox.privacy import hash_id
from agent.blackbox.reading import BoxDamaged, BoxReader
from agent.client import AgentClient, AgentRefused
from agent.fragmentation import analyze
from agent.history import MemoryHistory
from agent.history.entries import Mark
from agent.sampling.sampler import Sampler
from agent.web.blackbox_routes import describe_box
from agent.wire import blackbox as wire_blackbox
from engine_shim.allocation_map.reader import MapReader
from tests.agent.conftest import PATIENT

Start = Callable[..., Any]


@pytest.fixture
def boxed(start_engine: Start, folder: Path, tmp_path: Path) -> tuple[Any, Path, Any]:
    """An engine that was killed, the folder with its box, and the last sample of it."""
    engine = start_engine(total_blocks=50)
    owner = engine.open_owner("chatcmpl-of-a-customer", lora="adapter", cache_salt="tenant")
    engine.allocated([1, 2, 3, 20], owner)
    engine.progressed([owner], [50])
    engine.freed([3])
    engine.step_ended(1, 0)
    history = MemoryHistory()
    sampler = Sampler(lambda: [folder], MapReader, history, settings=PATIENT)
    happened = Mark(1.0, engine.id, "engine", "the engine is live")
    boxes = BlackBoxes(tmp_path / "state", 20, history, marks=lambda id, start, end: [happened])
    view = sampler.tick()
    boxes.look(view)
    engine.kill()
    boxes.look(sampler.tick())
    sampler.close()
    return engine, boxes.folder, view.samples[engine.id]


def test_what_was_put_in_comes_out(boxed: tuple[Any, Path, Any]) -> None:
    engine, folder, sample = boxed
    (found,), damaged = BoxReader(folder).boxes()
    assert damaged == ()
    told = describe_box(BoxReader(folder).open(found.name), cells=10, events=2)
    assert told.map is not None
    assert (told.summary.id, told.summary.engine_id, told.map_reason) == (engine.id, "engine", "")
    states = sample.snapshot.states
    assert (told.map.total_blocks, told.map.blocks_per_cell, told.map.cells) == (50, 5, 10)
    used = (states == 2).reshape(10, 5).sum(axis=1).tolist()
    assert told.map.counts["used"] == used != [0] * 10
    assert (
        told.map.fragmentation.rate == analyze(states).fragmentation_rate != analyze(np.sort(states)).fragmentation_rate
    )
    (request,) = told.requests
    assert (request.request_id, request.cache_salt) == (hash_id("chatcmpl-of-a-customer"), hash_id("tenant"))
    assert (request.lora, request.tokens, request.blocks) == ("adapter", 50, 4)
    assert request.age_seconds is not None
    assert 0 <= request.age_seconds < 60
    assert told.events_total > len(told.events) == 2
    assert told.events[-1].kind == "free"
    assert told.marks[0].text == "the engine is live"
    assert max(row[2] or 0 for row in told.history.columns["used"]) == 3
    assert told.facts["counters"]["blocks_allocated"] == 4
    assert list(folder.glob(".map-*")) == []


def test_a_box_without_its_map_is_told_without_it(boxed: tuple[Any, Path, Any]) -> None:
    _, folder, _ = boxed
    (path,) = folder.glob("*.tar.gz")
    rewrite(path, lambda name, content: None if name == "map.kvmap" else content)
    told = describe_box(BoxReader(folder).open(path.name), cells=10, events=5)
    assert (told.map, told.map_reason) == (None, "the box has no map")
    assert told.requests
    rewrite(path, lambda name, content: b"x" * 5000 if name == "marks.json" else content)
    with pytest.raises(BoxDamaged):
        BoxReader(folder).open(path.name)


@pytest.mark.parametrize("how", ["cut", "noise", "another", "rows"])
def test_a_damaged_box_is_named_and_hides_no_other(how: str, boxed: tuple[Any, Path, Any]) -> None:
    _, folder, _ = boxed
    (path,) = folder.glob("*.tar.gz")
    whole = path.read_bytes()
    bad = folder / f"20990101T000000Z-{how}.tar.gz"
    if how == "cut":
        bad.write_bytes(whole[:60])
    elif how == "noise":
        bad.write_bytes(b"noise" * 40)
    else:
        bad.write_bytes(whole)
        member = "box.json" if how == "another" else "requests.json"
        rewrite(bad, lambda name, content: b'{"requests": [{"blocks": 1}]}' if name == member else content)
    reader = BoxReader(folder)
    found, damaged = reader.boxes()
    if how == "rows":
        with pytest.raises(BoxDamaged, match="KeyError"):
            describe_box(reader.open(bad.name), cells=10, events=5)
        return
    assert [one.name for one in found] == [path.name]
    assert len(damaged) == 1
    assert bad.name in damaged[0]
    with pytest.raises(BoxDamaged):
        reader.open(bad.name)


def rewrite(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """The same archive with other members."""
    with tarfile.open(path, "r:gz") as archive:
        members = [(one.name, archive.extractfile(one).read()) for one in archive]  # type: ignore[union-attr]
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            if (new := change(name, content)) is not None:
                entry = tarfile.TarInfo(name)
                entry.size = len(new)
                archive.addfile(entry, io.BytesIO(new))


def test_an_agent_tells_of_an_engine_that_died(
    start_engine: Start,
    start_agent: Start,
    client_of: Callable[..., AgentClient],
    wait_until: Callable[..., Any],
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    engine = start_engine(total_blocks=64)
    engine.allocated([1, 2], engine.open_owner("a"))
    engine.step_ended(1, 0)
    client = client_of(start_agent("--interval-seconds", "0.1", environment={"KVATLAS_STATE_DIR": str(state)}))
    wait_until(lambda: client.engines().engines)
    assert client.black_boxes() == wire_blackbox.BoxList(total=0, damaged=[], boxes=[])  # the negative control
    engine.kill()
    (one,) = wait_until(lambda: client.black_boxes(engine.id).boxes)
    assert client.black_boxes("engine").boxes == [one]
    assert client.black_boxes("somebody else").total == 0
    box = client.black_box(one.name, cells=64)
    assert box.summary == one
    assert box.map is not None
    assert [block for block, used in enumerate(box.map.counts["used"]) if used] == [1, 2]
    for name in ("nothing.tar.gz", "../alerts.sqlite", "..%2F..%2Fetc", "*"):
        with pytest.raises(AgentRefused) as refused:
            client.black_box(name)
        assert refused.value.status == 404
    (state / FOLDER / one.name).write_bytes(b"noise")
    with pytest.raises(AgentRefused, match="cannot be read") as refused:
        client.black_box(one.name)
    assert refused.value.status == 503
    assert len(client.black_boxes().damaged) == 1
    json.dumps(box.model_dump(), allow_nan=False)


def test_without_a_state_folder_the_routes_say_what_to_do(
    start_agent: Start, client_of: Callable[..., AgentClient]
) -> None:
    client = client_of(start_agent())
    for ask in (client.black_boxes, lambda: client.black_box("x")):
        with pytest.raises(AgentRefused, match="KVATLAS_STATE_DIR") as refused:
            ask()
        assert (refused.value.status, refused.value.error) == (404, "not_kept")
