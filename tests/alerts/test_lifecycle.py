"""The lifecycle: what fires, what holds, and what is over; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.lifecycle import Lifecycle, LifecycleSettings, Step
from alerts.model import UNRECORDED, ChangeKind, Phase, Severity
from alerts.mutes import Mute
from alerts.readings import Reading
from alerts.rules import Bound, Raise, Rule
from alerts.state import AlertState, StateUnreadable
from alerts.templates import Template
from alerts.units import Unit

LABELS = {"engine_id": "engine-a", "pool": "kv"}
BEGAN = 1_700_000_000.0


def a_rule(name: str = "full", **changes: Any) -> Rule:
    """Enters above 30 %, is over at 20 %."""
    given: dict[str, Any] = {
        "name": name,
        "enter": Bound("share", True, 0.30),
        "exit": 0.20,
        "unit": Unit.RATIO,
        "severity": Severity.WARNING,
        "summary": Template.parse("{engine_id} is at {value} ({threshold})"),
        "meaning": Template.parse("it is so: {reason}"),
        "action": Template.parse("do something"),
        "repeat_seconds": None,
    }
    return Rule(**given | changes)


def a_reading(share: float | None, source: str = "a", **changes: Any) -> Reading:
    given: dict[str, Any] = {
        "source": source,
        "labels": LABELS,
        "numbers": {"share": share},
        "texts": {"reason": "because"},
        "incarnation": "1",
    }
    return Reading(**given | changes)


class World:
    """One second to each evaluation, unless told otherwise."""

    def __init__(self, *rules: Rule, states: Mapping[str, AlertState] | None = None, **changes: Any) -> None:
        self.lifecycle = Lifecycle(rules or (a_rule(),), states or {}, settings=LifecycleSettings(**changes))
        self.now = BEGAN
        self.mutes: tuple[Mute, ...] = ()

    def step(self, *readings: Reading, seconds: float = 1.0, wall: float | None = None) -> Step:
        self.now += seconds if wall is None else wall
        step = self.lifecycle.evaluate(readings, self.now, elapsed_seconds=seconds, mutes=self.mutes)
        self.lifecycle = self.lifecycle.after(step)
        return step

    def see(self, share: float | None, **changes: Any) -> list[ChangeKind]:
        step = self.step(a_reading(share), **changes)
        return [change.kind for change in step.changes]

    def restart(self, *rules: Rule) -> None:
        """As an agent does: from what was written down."""
        states = {id: AlertState.from_json(one.to_json()) for id, one in self.lifecycle.states.items()}
        self.lifecycle = Lifecycle(rules or self.lifecycle.rules, states, settings=self.lifecycle.settings)

    @property
    def state(self) -> AlertState:
        (state,) = self.lifecycle.states.values()
        return state


FIRED, RESOLVED = [ChangeKind.FIRED], [ChangeKind.RESOLVED]
REPEATED, ESCALATED = [ChangeKind.REPEATED], [ChangeKind.ESCALATED]


def kinds(step: Step) -> list[ChangeKind]:
    return [change.kind for change in step.changes]


# Thresholds


def test_hysteresis_between_the_thresholds_nothing_begins_and_nothing_ends() -> None:
    world = World()
    assert world.see(0.30) == []  # at the threshold it is not crossed
    assert world.see(0.31) == FIRED
    assert world.see(0.21) == []
    assert world.see(0.20) == RESOLVED
    assert world.see(0.29) == []
    assert world.see(0.31) == FIRED


def test_one_threshold_alone_would_flap() -> None:
    """The negative control of the one before: without an exit of its own the same numbers fire twice."""
    world = World(a_rule(exit=0.30))
    assert [kind for share in (0.31, 0.29, 0.31) for kind in world.see(share)] == [*FIRED, *RESOLVED, *FIRED]


def test_below_is_the_same_the_other_way_round() -> None:
    world = World(a_rule(enter=Bound("share", False, 0.20), exit=0.30))
    assert [world.see(share) for share in (0.20, 0.19, 0.29, 0.30)] == [[], FIRED, [], RESOLVED]


def test_it_must_last_for_as_long_as_the_rule_says() -> None:
    world = World(a_rule(for_seconds=3.0))
    assert world.see(0.5) == []
    assert world.state.phase is Phase.PENDING
    assert world.see(0.25) == []  # an episode ends at the exit, not at the threshold
    assert world.see(0.5) == []
    step = world.step(a_reading(0.5))
    assert kinds(step) == FIRED
    assert step.changes[0].alert.started_at == BEGAN + 1  # when it began, not when it was told


def test_an_episode_that_ends_before_that_is_not_told() -> None:
    world = World(a_rule(for_seconds=3.0))
    assert [world.see(share) for share in (0.5, 0.5, 0.2, 0.5, 0.5, 0.5)] == [[], [], [], [], [], []]
    assert world.see(0.5) == FIRED


def test_it_goes_on_firing_for_as_long_as_the_rule_says() -> None:
    world = World(a_rule(keep_firing_seconds=2.0))
    assert [world.see(share) for share in (0.5, 0.1, 0.1)] == [FIRED, [], []]
    assert world.see(0.25) == []  # not clear any more: it begins anew
    assert [world.see(share) for share in (0.1, 0.1, 0.1)] == [[], [], RESOLVED]


def test_what_must_also_be_so_is_needed_to_fire_and_not_to_stay() -> None:
    world = World(a_rule(when=(Bound("idle", True, 0.5),), for_seconds=1.0))

    def see(share: float, idle: float | None) -> list[ChangeKind]:
        return kinds(world.step(a_reading(share, numbers={"share": share, "idle": idle})))

    assert see(0.5, 0.0) == []
    assert world.lifecycle.states == {}
    assert see(0.5, 1.0) == []
    assert see(0.5, 0.0) == []  # pending, and no longer
    assert world.lifecycle.states == {}
    assert [see(0.5, 1.0), see(0.5, 1.0)] == [[], FIRED]
    assert see(0.5, 0.0) == []  # firing, and still so
    assert see(0.1, 0.0) == RESOLVED


def test_a_condition_that_is_not_known_holds() -> None:
    world = World(a_rule(when=(Bound("idle", True, 0.5),)))
    assert kinds(world.step(a_reading(0.5, numbers={"share": 0.5}))) == []
    assert world.lifecycle.states == {}


# What is not known


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_neither_fires_nor_resolves(unknown: float | None) -> None:
    world = World()
    assert world.see(unknown) == []
    assert world.lifecycle.states == {}
    world.see(0.5)
    assert [world.see(unknown) for _ in range(5)] == [[]] * 5
    assert world.state.phase is Phase.FIRING
    assert world.state.held
    assert world.see(0.5) == []
    assert world.see(0.1) == RESOLVED


def test_time_in_which_nothing_is_known_counts_for_nothing() -> None:
    world = World(a_rule(for_seconds=2.0))
    world.see(0.5)
    assert [world.see(None) for _ in range(10)] == [[]] * 10
    assert world.see(0.5) == []  # nobody knows what was between
    assert [world.see(0.5), world.see(0.5)] == [[], FIRED]


def test_a_silent_source_silences_its_repeats_and_escalations_too() -> None:
    rule = a_rule(repeat_seconds=5.0, raises=(Raise(Severity.CRITICAL, Bound("share", True, 0.9)),))
    world = World(rule)
    world.see(0.5)
    assert [world.see(None) for _ in range(20)] == [[]] * 20
    assert world.see(0.95) == ESCALATED


def test_a_source_that_ended_in_good_order_takes_its_alerts_with_it() -> None:
    world = World()
    world.see(0.5)
    step = world.step(a_reading(None, numbers={}, void="the engine ended in good order"))
    assert kinds(step) == RESOLVED
    assert step.changes[0].reason == "the engine ended in good order"


def test_a_pause_of_whoever_looks_is_not_time_that_was_observed() -> None:
    world = World(a_rule(for_seconds=30.0), most_elapsed_seconds=3.0)
    world.see(0.5)
    assert world.see(0.5, seconds=3600.0) == []  # stopped for an hour, and two looks
    assert world.state.true_seconds == 3.0


# Clocks


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_is_set_changes_no_duration(jump: float) -> None:
    world = World(a_rule(for_seconds=3.0, keep_firing_seconds=2.0))
    world.see(0.5)
    assert world.see(0.5, wall=jump) == []
    assert [world.see(0.5), world.see(0.5)] == [[], FIRED]
    world.see(0.1, wall=-jump)
    assert [world.see(0.1), world.see(0.1)] == [[], RESOLVED]


def test_an_alert_does_not_end_before_it_began() -> None:
    world = World()
    world.see(0.5)
    (change,) = world.step(a_reading(0.1), wall=-3600.0).changes
    assert change.alert.ended_at == change.alert.started_at


# Sources that come and go


def test_an_engine_that_starts_anew_keeps_what_fires_and_begins_anew_what_pends() -> None:
    world = World(a_rule(for_seconds=2.0))
    world.see(0.5)
    world.see(0.5)
    assert kinds(world.step(a_reading(0.5, incarnation="2"))) == []
    assert world.state.true_seconds == 0.0
    assert [kinds(world.step(a_reading(0.5, incarnation="2"))) for _ in range(2)] == [[], FIRED]
    assert kinds(world.step(a_reading(0.5, incarnation="3"))) == []
    assert kinds(world.step(a_reading(0.1, incarnation="3"))) == RESOLVED


def test_a_source_that_is_not_read_any_more_is_over_in_the_end() -> None:
    world = World(absent_seconds=5.0)
    world.see(0.5)
    steps = [world.step() for _ in range(5)]
    assert [kinds(step) for step in steps] == [[], [], [], [], RESOLVED]
    assert steps[-1].changes[0].reason == "nothing is read of it, and nothing is known of it for 5 s"
    assert world.lifecycle.states == {}


def test_a_source_that_comes_back_in_time_is_not() -> None:
    world = World(absent_seconds=5.0)
    world.see(0.5)
    for _ in range(4):
        world.step()
    assert world.see(0.5) == []
    assert [kinds(world.step()) for _ in range(4)] == [[], [], [], []]


def test_an_engine_that_vanished_while_the_agent_was_down_is_over_with_a_reason() -> None:
    world = World(absent_seconds=5.0)
    world.see(0.5)
    world.restart()
    steps = [world.step(seconds=1.0) for _ in range(6)]
    assert [kind for step in steps for kind in kinds(step)] == RESOLVED


def test_a_source_that_calls_itself_otherwise_is_another_one() -> None:
    """An engine of the same name that serves another model: the alert of the former is over, if only after a time."""
    world = World(absent_seconds=5.0)
    world.see(0.5)
    other = a_reading(0.5, labels={**LABELS, "pool": "other"})
    assert kinds(world.step(other)) == FIRED
    assert [kind for _ in range(5) for kind in kinds(world.step(other))] == RESOLVED
    assert world.state.alert.labels["pool"] == "other"


def test_a_number_that_is_never_known_again_does_not_hold_its_alert_for_ever() -> None:
    world = World(unknown_seconds=5.0)
    world.see(0.5)
    assert [world.see(None) for _ in range(5)] == [[], [], [], [], RESOLVED]
    world.see(0.5)
    for _ in range(4):
        world.see(None)
    assert world.see(0.5) == []
    assert [world.see(None) for _ in range(4)] == [[]] * 4


def test_of_two_sources_that_call_themselves_the_same_the_first_is_meant() -> None:
    world = World()
    assert kinds(world.step(a_reading(0.5, "a"), a_reading(0.1, "b"))) == FIRED
    assert kinds(world.step(a_reading(0.5, "a"), a_reading(0.1, "b"))) == []


# Restarts and rules


def test_after_a_restart_nothing_is_told_again_and_no_end_is_lost() -> None:
    world = World()
    world.see(0.5)
    episode = world.state.alert.episode
    world.restart()
    assert world.see(0.5) == []
    (change,) = world.step(a_reading(0.1)).changes
    assert (change.kind, change.alert.episode) == (ChangeKind.RESOLVED, episode)


def test_what_pends_goes_on_after_a_restart() -> None:
    world = World(a_rule(for_seconds=4.0))
    world.see(0.5)
    world.see(0.5)
    world.restart()
    assert [world.see(0.5), world.see(0.5)] == [[], []]
    assert world.see(0.5) == FIRED


def test_a_rule_that_is_removed_ends_its_alerts() -> None:
    world = World()
    world.see(0.5)
    world.restart(a_rule("other", enter=Bound("nothing", True, 1.0)))
    (change,) = world.step(a_reading(0.5)).changes
    assert change.kind is ChangeKind.RESOLVED
    assert change.reason == "the rule full was removed"


def test_a_rule_that_is_changed_ends_the_old_alert_and_judges_anew() -> None:
    world = World()
    world.see(0.5)
    world.restart(a_rule(enter=Bound("share", True, 0.4)))
    step = world.step(a_reading(0.5))
    assert kinds(step) == [ChangeKind.RESOLVED, ChangeKind.FIRED]
    assert step.changes[0].reason == "the rule full was changed"
    assert step.changes[0].alert.episode != step.changes[1].alert.episode


def test_a_rule_that_has_other_labels_is_another_alert() -> None:
    world = World()
    world.see(0.5)
    world.restart(a_rule(labels={"team": "inference"}))
    assert kinds(world.step(a_reading(0.5))) == [ChangeKind.RESOLVED, ChangeKind.FIRED]


def test_a_rule_that_only_says_it_differently_goes_on() -> None:
    world = World()
    world.see(0.5)
    world.restart(a_rule(action=Template.parse("do something else")))
    assert world.see(0.5) == []
    assert world.state.alert.action == "do something else"


# Severity, repeats and mutes


def test_a_severity_rises_once_and_does_not_fall_while_it_fires() -> None:
    world = World(a_rule(raises=(Raise(Severity.CRITICAL, Bound("share", True, 0.9)),)))
    assert [world.see(share) for share in (0.5, 0.95, 0.5, 0.95)] == [FIRED, ESCALATED, [], []]
    (change,) = world.step(a_reading(0.1)).changes
    assert change.alert.severity is Severity.CRITICAL


def test_a_firing_alert_is_repeated_at_its_interval() -> None:
    world = World(a_rule(repeat_seconds=3.0))
    told = [world.see(0.5) for _ in range(8)]
    assert told == [FIRED, [], [], REPEATED, [], [], REPEATED, []]


def a_mute(at: float, seconds: float, **changes: Any) -> Mute:
    given: dict[str, Any] = {"id": "1", "rule": "full", "engine": None, "author": "ann", "comment": ""}
    return Mute(**given | changes, created_at=at, expires_at=at + seconds)


def test_a_muted_alert_is_told_when_the_mute_ends_before_it_does() -> None:
    world = World()
    world.mutes = (a_mute(BEGAN, 3.5),)
    steps = [world.step(a_reading(0.5)) for _ in range(4)]
    assert [kinds(step) for step in steps] == [[], [], [], FIRED]
    assert steps[-1].changes[0].alert.started_at == BEGAN + 1


def test_of_a_muted_alert_that_was_never_told_no_end_is_told() -> None:
    world = World()
    world.mutes = (a_mute(BEGAN, 100.0),)
    assert [world.see(0.5), world.see(0.1)] == [[], []]
    assert world.lifecycle.states == {}


def test_what_was_told_before_the_mute_is_told_to_be_over() -> None:
    world = World(a_rule(repeat_seconds=1.0))
    world.see(0.5)
    world.mutes = (a_mute(world.now, 100.0),)
    assert [world.see(0.5), world.see(0.5), world.see(0.1)] == [[], [], RESOLVED]


@pytest.mark.parametrize(
    ("mute", "muted"),
    [
        ({"rule": "full", "engine": None}, True),
        ({"rule": None, "engine": "engine-a"}, True),
        ({"rule": "full", "engine": "engine-a"}, True),
        ({"rule": "full", "engine": "engine-b"}, False),
        ({"rule": "other", "engine": None}, False),
    ],
)
def test_a_mute_covers_what_it_names(mute: dict[str, Any], muted: bool) -> None:
    world = World()
    world.mutes = (a_mute(BEGAN, 100.0, **mute),)
    assert world.see(0.5) == ([] if muted else FIRED)


# What is told


def test_an_alert_says_what_where_and_how_much() -> None:
    world = World(a_rule(labels={"team": "inference"}, runbook="full"), runbook_base="https://docs.example/alerts")
    (change,) = world.step(a_reading(0.5, link="http://page/a")).changes
    alert = change.alert
    assert change.sequence == UNRECORDED
    assert alert.summary == "engine-a is at 50 % (over 30 %)"
    assert alert.meaning == "it is so: because"
    assert (alert.value, alert.value_text, alert.threshold_text) == (0.5, "50 %", "over 30 %")
    assert dict(alert.labels) == {**LABELS, "team": "inference"}
    assert (alert.link, alert.runbook_url) == ("http://page/a", "https://docs.example/alerts#full")


def test_its_end_is_told_in_the_words_of_its_beginning() -> None:
    world = World()
    (fired,) = world.step(a_reading(0.5)).changes
    (over,) = world.step(a_reading(0.1, texts={"reason": "all is well"})).changes
    assert (over.alert.summary, over.alert.meaning) == (fired.alert.summary, fired.alert.meaning)
    assert (over.alert.value_text, over.alert.threshold_text) == ("10 %", "at most 20 %")
    assert over.reason == "it is at 10 % now"
    flag = World(a_rule(unit=Unit.FLAG, enter=Bound("share", True, 0.5), exit=0.5))
    flag.see(1.0)
    (over,) = flag.step(a_reading(0.0)).changes
    assert (over.alert.value, over.alert.value_text, over.reason) == (None, "no longer", "it is no longer so")


def test_states_name_what_must_be_written_down() -> None:
    world = World()
    assert world.step(a_reading(0.5)).touched
    assert not world.step(a_reading(0.6)).touched
    assert world.step(a_reading(None)).touched  # held
    assert not world.step(a_reading(None)).touched
    assert world.step(a_reading(0.1)).touched


def test_an_evaluation_changes_nothing_where_it_came_from() -> None:
    lifecycle = Lifecycle((a_rule(),), {})
    first = lifecycle.evaluate([a_reading(0.5)], BEGAN)
    assert lifecycle.states == {}
    assert lifecycle.evaluate([a_reading(0.5)], BEGAN) == first


def test_a_stored_state_that_cannot_be_read_says_so() -> None:
    world = World()
    world.see(0.5)
    text = world.state.to_json()
    assert AlertState.from_json(text) == world.state
    for broken in ("", "{}", "[]", text.replace('"version":1', '"version":2'), text.replace("firing", "flying")):
        with pytest.raises(StateUnreadable):
            AlertState.from_json(broken)


# Whatever comes


READINGS = st.one_of(st.none(), st.just(math.nan), st.floats(0, 1))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(READINGS, st.sampled_from(["1", "2"]), st.booleans(), st.booleans()), max_size=40),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 2.0]),
)
def test_firings_and_ends_alternate_whatever_comes(
    sightings: Sequence[tuple[float | None, str, bool, bool]], for_seconds: float, keep_seconds: float
) -> None:
    """Also over restarts and absences: no end before its firing, none twice, and every one with its episode."""
    world = World(a_rule(for_seconds=for_seconds, keep_firing_seconds=keep_seconds), absent_seconds=3.0)
    firing: str | None = None
    for share, incarnation, present, restart in sightings:
        if restart:
            world.restart()
        step = world.step(*([a_reading(share, incarnation=incarnation)] if present else []))
        for change in step.changes:
            if change.kind is ChangeKind.FIRED:
                assert firing is None
                assert share is not None
                assert share > 0.2
                firing = change.alert.episode
            elif change.kind is ChangeKind.RESOLVED:
                assert change.alert.episode == firing
                assert change.reason
                firing = None
    for _ in range(4):
        for change in world.step().changes:
            assert (change.kind, change.alert.episode) == (ChangeKind.RESOLVED, firing)
            firing = None
    assert firing is None  # in the end nothing is left open
    assert world.lifecycle.states == {}


def test_a_thousand_alerts_at_once_are_a_thousand() -> None:
    world = World()
    readings = [a_reading(0.5, str(n), labels={"engine_id": str(n)}) for n in range(1000)]
    assert len({change.alert.fingerprint for change in world.step(*readings).changes}) == 1000
    calm = [replace(one, numbers={"share": 0.0}) for one in readings]
    assert kinds(world.step(*calm)) == RESOLVED * 1000
