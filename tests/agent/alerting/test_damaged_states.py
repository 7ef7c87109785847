"""States that were damaged in the store: the agent forgets them, says so, and judges on."""

from __future__ import annotations

import json
import logging

import pytest

from tests.agent.alerting.conftest import MakeScene
from tests.agent.alerting.test_evaluator import Keeper, evaluator_of, full


@pytest.mark.parametrize("damage", ["id", "fingerprint", "labels", "rule"])
def test_a_state_by_another_name_is_forgotten_and_found_again(
    scene: MakeScene, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    here, keeper = full(scene), Keeper()
    before = evaluator_of(here, keeper)
    before.tick(here.view)
    id = next(name for name, text in keeper.states.items() if "pool-nearly-full" in text)
    plain = json.loads(keeper.states[id])
    if damage == "labels":
        plain["alert"]["labels"]["model"] = "another"
    elif damage != "id":
        plain["alert"][damage] = "another"
    keeper.states = {"0123" if damage == "id" else id: json.dumps(plain)}
    with caplog.at_level(logging.WARNING):
        evaluator = evaluator_of(here, keeper)
    assert "an open alert was forgotten" in caplog.text
    assert keeper.states == {}
    here.tick()
    evaluator.tick(here.view)
    assert id in keeper.states
