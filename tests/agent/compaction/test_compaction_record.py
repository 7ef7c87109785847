"""What an agent makes of an engine's status, above all of one that it meets for the first time."""

from __future__ import annotations

from typing import Any

import pytest

from agent.compaction.model import Relocation
from agent.compaction.record import Answer, PoolRecord
from engine_shim.control.messages import StatusReply


def status(**changes: Any) -> StatusReply:
    fields: dict[str, Any] = {"moving": True, "relocation": False, "running": False, "policy": "vllm", "reason": ""}
    return StatusReply(**(fields | changes))


@pytest.mark.parametrize(
    ("details", "relocation"),
    [
        pytest.param({"moving_off_by": "start", "moving_failed": False}, Relocation.OFF, id="started so"),
        pytest.param({}, Relocation.UNAVAILABLE, id="an engine that does not say"),
        pytest.param({"moving_off_by": "switch", "moving_failed": False}, Relocation.UNAVAILABLE, id="kill switch"),
        pytest.param({"moving_off_by": "check", "moving_failed": True}, Relocation.UNAVAILABLE, id="failed check"),
        pytest.param({"moving_failed": True}, Relocation.UNAVAILABLE, id="failed check of an earlier version"),
    ],
)
def test_an_engine_that_was_switched_off_before_the_agent_came_is_left_alone(
    details: dict[str, Any], relocation: Relocation
) -> None:
    pool = PoolRecord("engine", 1)
    pool.take_answer(Answer(0.0, status(moving=False, reason="off it is", details=details), ""))
    assert pool._relocation(False) is relocation
    assert pool._refusal("policy") == "off it is"
    pool.take_answer(Answer(1.0, status(), ""))
    assert pool._relocation(False) is Relocation.OFF
    assert pool._refusal("policy") == ""
