"""Banners: each says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.client import AgentClient, AgentRefused, AgentUnavailable
from agent.wire import AgentStatus, EngineSummary, ErrorBody, Forecast, ReplayStatus
from dashboard import conditions
from dashboard.source import Source

Summary = Callable[..., EngineSummary]
AGENT = AgentStatus(
    version="1",
    started_unix=1.0,
    interval_seconds=1.0,
    threshold=0.3,
    folders=["/run/kvatlas", "/dev/shm/kvatlas"],
    unreadable=[],
    writes_enabled=False,
)


def test_a_recording_is_told_from_an_engine() -> None:
    told = ReplayStatus(
        file="night.kvrec",
        id="e.dp0.tp0.pp0.kv",
        recorded_from_unix=1_700_000_000.0,
        recorded_until_unix=1_700_000_100.0,
        position_unix=1_700_000_050.0,
        speed=10.0,
        paused=False,
        at_end=False,
        recording_ended="it was stopped",
        samples=100,
        events=5,
        lost_events=7,
        gaps=[],
        dropped="",
        notes=[],
        fault="",
    )
    shown = conditions.replayed(told)
    assert shown.severity == "warning"
    for words in (
        "A recording, not an engine: night.kvrec at 2023-11-14 22:14:10 UTC",
        "10 times",
        "7 events were lost",
    ):
        assert words in shown.what
    assert "1 event was lost" in conditions.replayed(told.model_copy(update={"lost_events": 1})).what
    assert "stopped" in conditions.replayed(told.model_copy(update={"paused": True})).what
    assert "at its end" in conditions.replayed(told.model_copy(update={"at_end": True})).what
    assert "damaged" in conditions.replayed(told.model_copy(update={"fault": "damaged at byte 9"})).what


def test_a_live_engine_has_no_banner(summary: Summary) -> None:
    assert conditions.conditions_of(summary()) == []


@pytest.mark.parametrize(
    ("changes", "severity", "says", "drawn"),
    [
        pytest.param(
            {"state": "stale", "snapshot_age_seconds": 12.0}, "error", "nothing new for 12 s", True, id="stale"
        ),
        pytest.param(
            {"state": "stalled", "reason": "5 requests run and no step has ended for 7 s"},
            "error",
            "Stalled: 5 requests run and no step has ended for 7 s. The map below",
            True,
            id="stalled",
        ),
        pytest.param({"state": "sleeping"}, "info", "given its KV memory back", False, id="sleeping"),
        pytest.param({"state": "gone", "reason": "killed"}, "error", "Engine gone (killed)", False, id="gone"),
        pytest.param({"state": "unreadable", "reason": "mode 0600"}, "error", "(mode 0600)", False, id="unreadable"),
        pytest.param({"degraded": True}, "warning", "no longer follow the pool", True, id="degraded"),
    ],
)
def test_each_condition_says_what_and_what_to_do(
    summary: Summary, changes: dict[str, object], severity: str, says: str, drawn: bool
) -> None:
    engine = summary(**changes)
    (condition,) = conditions.conditions_of(engine)
    assert condition.severity == severity
    assert says in condition.what
    assert condition.action.endswith(".")
    assert conditions.map_is_meaningful(engine) is drawn


def test_an_engine_that_ended_in_good_order_is_no_alarm(summary: Summary) -> None:
    (ended,) = conditions.conditions_of(summary(state="gone", reason="the engine ended in good order"))
    (lost,) = conditions.conditions_of(summary(state="gone", reason="the engine ended without closing its map"))
    assert (ended.severity, lost.severity) == ("info", "error")
    assert "in good order" in ended.what
    assert "out-of-memory" not in ended.action
    assert "out-of-memory" in lost.action


def test_a_stopped_process_is_resumed_and_a_hung_one_looked_into(summary: Summary) -> None:
    hung, stopped = (
        conditions.conditions_of(summary(state="stalled", heartbeat_age_seconds=age))[0].action for age in (0.4, 6.0)
    )
    assert "py-spy dump --pid 4242" in hung
    assert "kill -CONT" not in hung
    assert stopped.startswith("Resume process 4242: kill -CONT 4242.")
    assert "py-spy" not in stopped


def test_the_page_opens_on_the_pool_most_in_need(summary: Summary) -> None:
    def pool(id: str, rate: float | None = 0.1, **changes: Any) -> EngineSummary:
        return summary(id=id, fragmentation=summary().fragmentation.model_copy(update={"rate": rate}), **changes)

    blocked = Forecast(exhaustion_seconds=None, reason="", admission_blocked=True)
    ranked = [
        pool("stalled", state="stalled"),
        pool("waits", forecast=blocked),
        pool("degraded", degraded=True),
        pool("scattered", 0.9),
        pool("a-calm", 0.1),
        pool("b-calm", 0.1),
        pool("full", None),
        pool("gone", 0.99, state="gone"),
    ]
    for index in range(len(ranked)):
        worst = conditions.most_in_need(ranked[index:][::-1])
        assert worst is ranked[index]
    assert conditions.most_in_need([]) is None


def test_degraded_stands_beside_the_state(summary: Summary) -> None:
    found = conditions.conditions_of(summary(state="stalled", degraded=True))
    assert [condition.severity for condition in found] == ["error", "warning"]


def test_conditions_of_the_agent() -> None:
    unreachable = conditions.unreachable("connection refused")
    assert "connection refused" in unreachable.what
    assert "kvatlas agent" in unreachable.action
    body = ErrorBody(error="not_found", message="no pool 'x'", action="GET /v1/engines lists them")
    assert conditions.refused(AgentRefused(404, body)).action == "GET /v1/engines lists them"
    assert "/run/kvatlas, /dev/shm/kvatlas" in conditions.no_engine(AGENT).what
    assert "and 2 more" in conditions.unreadable_maps(["a", "b", "c", "d", "e"]).what


def test_no_password_of_the_address_is_shown() -> None:
    source = Source.from_environment({"KVATLAS_AGENT_URL": "http://user:secret@127.0.0.1:1/"})
    with pytest.raises(AgentUnavailable) as raised, AgentClient(source.agent_urls[0]) as client:
        client.engines()
    assert source.reason(raised.value).startswith("no answer from the agent at http://127.0.0.1:1: ")
    assert Source.from_environment({}).reason(raised.value) == str(raised.value)
