"""When an engine is live, stalled, stale, sleeping or gone, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.sampling.judgement import Ages, Limits, Silence, judge
from engine_shim.snapshot import MapFlags, MapSnapshot

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
    snapshot = make_snapshot([0, 2], running_requests=case.get("running", 0))
    snapshot = replace(snapshot, flags=case.get("flags", MapFlags()))  # type: ignore[arg-type]
    age = float(case.get("age", 0))  # type: ignore[arg-type]
    ages = Ages(
        step=float(case.get("step", age)),  # type: ignore[arg-type]
        heartbeat=float(case.get("heartbeat", 0)),  # type: ignore[arg-type]
        publish=age,
    )
    judgement = judge(
        snapshot,
        ages,
        writer_alive=bool(case.get("alive", True)),
        limits=LIMITS,
        torn_seconds=float(case.get("torn", 0)),  # type: ignore[arg-type]
    )
    assert judgement.state == state
    assert reason in judgement.reason
    assert (judgement.reason == "") == (state == "live")


def test_silence_is_measured_by_a_clock_that_is_never_set() -> None:
    """The engine writes at 1000; 50 minutes pass while the wall clock is set an hour back."""
    silence = Silence()
    assert silence.seconds(1000 * 10**9, 1000.5, 70.0) == 0.5
    assert silence.seconds(1000 * 10**9, 1000.5 - 3600, 70.0) == 0.5
    assert silence.seconds(1000 * 10**9, 1000.5 - 600, 70.0 + 3000) == 3000.5
    assert silence.seconds(1000 * 10**9, 9e9, 70.0 + 3001) == 3001.5


def test_a_new_sign_is_no_older_than_the_last_look() -> None:
    silence = Silence()
    silence.seconds(1000 * 10**9, 1000.0, 50.0)
    assert silence.seconds(1001 * 10**9, 1001.25, 51.25) == pytest.approx(0.25)
    assert silence.seconds(1002 * 10**9, 1002.5 + 3600, 52.5) == pytest.approx(1.25)  # set forward: as if just missed
    assert silence.seconds(1003 * 10**9, 1003.5 - 3600, 53.5) == 0.0


def test_the_first_look_believes_the_wall_clock() -> None:
    assert Silence().seconds(1000 * 10**9, 1060.0, 5.0) == 60.0
    assert Silence().seconds(1000 * 10**9, 900.0, 5.0) == 0.0
