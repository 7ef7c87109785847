"""When an engine is live, stalled, stale, sleeping or gone, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.judgement import Limits, judge
from engine_shim.snapshot import MapFlags, MapSnapshot

PUBLISHED = 1_700_000_100  # as make_snapshot has it
LIMITS = Limits(stall_seconds=3, stale_seconds=5, publish_seconds=10)


@pytest.mark.parametrize(
    ("case", "state", "reason"),
    [
        pytest.param({}, "live", "", id="all fresh"),
        pytest.param({"age": 2.9, "running": 1}, "live", "", id="a slow step"),
        pytest.param({"age": 3600, "heartbeat": 0.5}, "live", "", id="idle for an hour"),
        pytest.param({"age": 3, "running": 2, "heartbeat": 0.5}, "stalled", "2 requests run and no step", id="hung"),
        pytest.param({"age": 5, "running": 1, "heartbeat": 5}, "stalled", "the process is stopped", id="stopped"),
        pytest.param({"age": 5, "heartbeat": 5}, "stale", "no heartbeat for 5 s", id="stopped while idle"),
        pytest.param({"flags": MapFlags(sleeping=True)}, "sleeping", "given its KV memory back", id="sleeping"),
        pytest.param(
            {"flags": MapFlags(sleeping=True), "running": 1, "age": 9, "heartbeat": 1},
            "sleeping",
            "",
            id="asleep at work",
        ),
        pytest.param(
            {"flags": MapFlags(sleeping=True), "age": 9, "heartbeat": 9},
            "stale",
            "no heartbeat",
            id="asleep and stopped",
        ),
        pytest.param({"alive": False}, "gone", "without closing", id="killed"),
        pytest.param({"alive": False, "flags": MapFlags(closing=True)}, "gone", "in good order", id="closed"),
        pytest.param({"age": 9, "running": 1, "alive": False}, "gone", "without closing", id="gone beats stalled"),
        pytest.param({"age": 4, "running": 1, "torn": 4}, "live", "", id="a restless writer"),
        pytest.param(
            {"age": 6, "running": 1, "torn": 6}, "stale", "no whole snapshot", id="a restless writer for long"
        ),
        pytest.param(
            {"age": 4, "running": 1, "heartbeat": 4, "torn": 4}, "stalled", "no step", id="stopped while it published"
        ),
        pytest.param(
            {"age": 11, "running": 1, "step": 0.5, "heartbeat": 0.5}, "stale", "nothing published", id="steps unseen"
        ),
    ],
)
def test_judge(case: dict[str, object], state: str, reason: str, make_snapshot: Callable[..., MapSnapshot]) -> None:
    age = float(case.get("age", 0))  # type: ignore[arg-type]
    now = PUBLISHED + age
    snapshot = make_snapshot([0, 2], running_requests=case.get("running", 0))
    snapshot = replace(
        snapshot,
        flags=case.get("flags", MapFlags()),  # type: ignore[arg-type]
        heartbeat_unix_ns=int((now - float(case.get("heartbeat", 0))) * 1e9),  # type: ignore[arg-type]
        last_step_unix_ns=int((now - float(case.get("step", age))) * 1e9),  # type: ignore[arg-type]
    )
    judgement = judge(
        snapshot,
        writer_alive=bool(case.get("alive", True)),
        now_unix=now,
        limits=LIMITS,
        torn_seconds=float(case.get("torn", 0)),  # type: ignore[arg-type]
    )
    assert judgement.state == state
    assert reason in judgement.reason
    assert (judgement.reason == "") == (state == "live")


def test_a_clock_that_went_back_is_no_stall(make_snapshot: Callable[..., MapSnapshot]) -> None:
    snapshot = make_snapshot([0], running_requests=1)
    assert judge(snapshot, writer_alive=True, now_unix=PUBLISHED - 50, limits=LIMITS).state == "live"
