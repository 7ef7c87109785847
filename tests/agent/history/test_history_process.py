"""The lasting history as it really runs: an engine, agents one after the other, and kill -9 between them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.client import AgentClient, AgentRefused
from agent.history.reading import HistoryReader
from agent.history.tiers import SAMPLE_TIERS
from agent.history.writer import PACE_SECONDS
from agent.sampling.sampler import SamplerSettings

Start = Callable[..., Any]
BAR_SECONDS = 2.0


def sampled(client: AgentClient, id: str) -> list[float]:
    return [one.time_unix for one in client.history(id, "used", 600, points=601).points if one.mean is not None]


def test_what_a_kill_may_cost_is_two_seconds() -> None:
    """The time between two commits, and that between two samples."""
    assert PACE_SECONDS + SamplerSettings().interval_seconds <= BAR_SECONDS


def test_a_kill_costs_only_what_was_not_written_yet(
    tmp_path: Path,
    start_engine: Start,
    start_agent: Start,
    client_of: Callable[..., AgentClient],
    wait_until: Callable[..., Any],
) -> None:
    engine = start_engine(total_blocks=64)
    owner = engine.open_owner("a")
    engine.allocated([1, 2, 3], owner)
    engine.step_ended(0, 0)
    state = tmp_path / "state"
    agent = start_agent(environment={"KVATLAS_STATE_DIR": str(state)})
    client = client_of(agent)
    wait_until(lambda: client.engines().engines)
    path = state / "history.sqlite"

    def written() -> list[float]:
        rows = HistoryReader(path).rows(engine.id, "used", SAMPLE_TIERS[0], 0, time.time())
        return [] if rows is None else rows.starts.tolist()

    wait_until(lambda: len(written()) >= 4)  # written as it goes on, not only when it ends
    before = written()
    agent.process.kill()
    agent.process.wait()

    rows = HistoryReader(path).rows(engine.id, "used", SAMPLE_TIERS[0], 0, time.time())
    assert rows is not None
    assert rows.starts.tolist()[: len(before)] == before
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()

    engine.allocated([10], owner)
    engine.step_ended(0, 0)
    later = start_agent("--gone-seconds", "1", environment={"KVATLAS_STATE_DIR": str(state)})
    client = client_of(later)
    wait_until(lambda: client.engines().engines)
    assert set(rows.starts.tolist()) <= set(sampled(client, engine.id))  # what the first one kept is still told
    # The blocks as the first agent saw them, and as they are now.
    then = client.frame(engine.id, float(rows.starts[-1]))
    assert then.counts["used"] == [1 if 1 <= block <= 3 else 0 for block in range(64)]
    wait_until(lambda: client.frame(engine.id).counts["used"][10] == 1)
    now = client.frame(engine.id)
    assert (now.total_blocks, now.cells, now.blocks_per_cell) == (64, 64, 1)
    assert now.state[10] == 2
    assert now.blocks is not None
    assert now.fragmentation is not None
    assert (now.blocks.used, now.blocks.free) == (sum(now.counts["used"]), sum(now.counts["free"]))
    assert now.fragmentation.largest_free_run == 64 - 11
    assert now.first_unix <= then.time_unix < now.time_unix
    assert client.frame(engine.id, cells=4).blocks_per_cell == 16
    times = client.frame_times(engine.id, now.first_unix, now.time_unix)
    assert (times.first_unix, times.total) == (now.first_unix, len(times.times_unix))
    assert {then.time_unix, now.first_unix, now.time_unix} <= set(times.times_unix)
    assert [client.frame(engine.id, at, cells=1).time_unix for at in times.times_unix[:3]] == times.times_unix[:3]
    thinned = client.frame_times(engine.id, now.first_unix, now.time_unix, limit=2)
    assert (thinned.total, thinned.times_unix[-1], len(thinned.times_unix)) == (times.total, now.time_unix, 2)
    with pytest.raises(AgentRefused, match="is after"):
        client.frame_times(engine.id, now.time_unix, now.first_unix)
    with pytest.raises(AgentRefused, match="no frame") as refused:
        client.frame(engine.id, now.first_unix - 1)
    assert refused.value.status == 404
    marks = wait_until(lambda: client.marks(engine.id, 0, time.time() + 1).marks)
    assert "the engine is live" in [one.text for one in marks]
    assert {one.kind for one in marks} <= {"engine", "decision", "alert"}
    # An engine that left for good is still told of, by the id that it had.
    engine.kill()
    wait_until(lambda: not client.engines().engines)
    with pytest.raises(AgentRefused):
        client.engine(engine.id)
    assert set(rows.starts.tolist()) <= set(sampled(client, engine.id))
    assert client.frame(engine.id).counts["used"][10] == 1
    # One folder for everything that outlives the agent.
    assert (state / "alerts.sqlite").exists()


def test_without_a_state_folder_the_routes_say_what_to_do(
    start_engine: Start, start_agent: Start, client_of: Callable[..., AgentClient], wait_until: Callable[..., Any]
) -> None:
    engine = start_engine(total_blocks=8)
    engine.step_ended(0, 0)
    client = client_of(start_agent())
    wait_until(lambda: client.engines().engines)
    with pytest.raises(AgentRefused, match="KVATLAS_STATE_DIR") as refused:
        client.frame(engine.id)
    assert (refused.value.status, refused.value.error) == (404, "not_kept")
