"""The settings of compaction: which engines, within which limits, and what is wrong with those that contradict."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from agent.compaction.model import PolicySettings
from agent.compaction.settings import DriverSettings, Scope
from agent.config import AgentSettings, load_settings
from agent.sampling.crew import Crew
from engine_shim.errors import SettingsError
from engine_shim.snapshot import EngineIdentity, MapSnapshot


@pytest.fixture
def theirs(make_snapshot: Any) -> EngineIdentity:
    snapshot: MapSnapshot = make_snapshot([0, 2], kind="vllm", engine_id="theirs")
    return snapshot.identity


@pytest.mark.parametrize(
    ("text", "ours", "named"),
    [
        pytest.param("reference", True, False, id="the default"),
        pytest.param("off", False, False, id="nobody"),
        pytest.param("all", True, True, id="everybody"),
        pytest.param("theirs", False, True, id="by name alone"),
        pytest.param("x, theirs", False, True, id="among others"),
    ],
)
def test_whom_the_agent_may_change(theirs: EngineIdentity, text: str, ours: bool, named: bool) -> None:
    scope = Scope.parse(text)
    own = replace(theirs, kind="reference", engine_id="own")
    assert (scope.why_not(own) == "", scope.why_not(theirs) == "") == (ours, named)


@pytest.mark.parametrize("kind", ["sglang", "transformers"])
def test_nobody_is_told_to_name_an_engine_whose_blocks_nothing_moves(theirs: EngineIdentity, kind: str) -> None:
    for text in ("reference", "all", "theirs"):
        assert "watched alone" in Scope.parse(text).why_not(replace(theirs, kind=kind))


def test_the_policy_is_set_as_it_is_documented() -> None:
    assert AgentSettings().compaction_driver() == DriverSettings(scope=Scope.parse("reference"))
    given = {
        "KVATLAS_COMPACTION": "a,b",
        "KVATLAS_COMPACTION_ENTER": "0.5",
        "KVATLAS_COMPACTION_EXIT": "0.4",
        "KVATLAS_COMPACTION_TARGET": "0.2",
        "KVATLAS_COMPACTION_FOR_SECONDS": "3",
        "KVATLAS_COMPACTION_COOLDOWN_SECONDS": "4",
        "KVATLAS_COMPACTION_WRITTEN_SHARE": "0.5",
        "KVATLAS_COMPACTION_RELOCATION": "false",
        "KVATLAS_COMPACTION_RELOCATION_COPIES": "1.5",
        "KVATLAS_COMPACTION_REQUIRE_CONSUMER": "true",
        "KVATLAS_COMPACTION_CONSUMERS": "transfer, elastic,",
    }
    policy = PolicySettings(
        enter=0.5,
        exit=0.4,
        for_seconds=3,
        cooldown_seconds=4,
        written_share=0.5,
        relocation=False,
        relocation_copies_per_block=1.5,
        require_consumer=True,
    )
    expected = DriverSettings(policy=policy, scope=Scope.parse("a,b"), target=0.2, consumers=("transfer", "elastic"))
    assert load_settings({}, environment=given).compaction_driver() == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"compaction": "off,a"}, "give off, reference, all, or engine ids"),
        ({"compaction": ""}, "give off, reference, all, or engine ids"),
        ({"compaction_exit": 0.5}, "compaction_enter=0.3 is below compaction_exit=0.5"),
        ({"compaction_target": 0.4}, "compaction_target=0.4"),
        ({"compaction_enter": 1.5}, "compaction_enter=1.5 on the command line"),
        ({"compaction_relocation": "maybe"}, "compaction_relocation='maybe'"),
    ],
)
def test_wrong_values_are_named(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, environment={})
    assert words in str(caught.value)


def test_a_crew_takes_no_more_than_it_has_hands_for() -> None:
    crew, gate, done = Crew(2), threading.Event(), []

    def work() -> None:
        assert gate.wait(120)
        done.append(1)

    assert crew.free
    assert [crew.start(work, "work") for _ in range(3)] == [True, True, False]
    assert not crew.free
    assert not crew.wait_idle(0)
    gate.set()
    assert crew.wait_idle(30)
    assert len(done) == 2
    assert crew.start(work, "work")
    assert crew.wait_idle(30)
