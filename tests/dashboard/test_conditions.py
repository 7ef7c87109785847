"""Banners: each says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.client import AgentClient, AgentRefused, AgentUnavailable
from agent.wire import AgentStatus, EngineSummary, ErrorBody
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


def test_a_live_engine_has_no_banner(summary: Summary) -> None:
    assert conditions.conditions_of(summary()) == []


@pytest.mark.parametrize(
    ("changes", "severity", "says", "drawn"),
    [
        pytest.param(
            {"state": "stale", "snapshot_age_seconds": 12.0}, "error", "nothing new for 12 s", True, id="stale"
        ),
        pytest.param(
            {"state": "stalled", "last_step_age_seconds": 7.0}, "error", "no step has ended", True, id="stalled"
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
    with pytest.raises(AgentUnavailable) as raised, AgentClient(source.agent_url) as client:
        client.engines()
    assert source.reason(raised.value).startswith("no answer from the agent at http://127.0.0.1:1: ")
    assert Source.from_environment({}).reason(raised.value) == str(raised.value)
