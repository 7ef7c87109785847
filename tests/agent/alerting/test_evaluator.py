"""The thread that judges: it holds up nobody, loses nothing, and keeps what must outlive it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.alerting.evaluator import Evaluator
from agent.alerting.feed import PoolFeed
from agent.alerting.own import OwnFeed
from agent.alerting.rule_files import default_rules
from agent.history.recorder import Recorder
from agent.sampling.model import Clock
from alerts.model import Change, ChangeKind
from alerts.mutes import Mute
from alerts.state import AlertState
from alerts.store import Store

MakeScene = Callable[..., Any]


class Keeper:
    """Keeps in memory; `gate` is what a commit waits for, `fault` what it raises."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.changes: list[Change] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fault: Exception | None = None
        self.raised = threading.Event()

    def load_states(self) -> Mapping[str, str]:
        return dict(self.states)

    def take_late_states(self) -> Mapping[str, str]:
        return {}

    def commit(self, states_changed: Mapping[str, str | None], changes: Sequence[Change]) -> Sequence[Change]:
        self.entered.set()
        assert self.gate.wait(120.0)
        if (fault := self.fault) is not None:
            self.raised.set()
            raise fault
        for id, text in states_changed.items():
            if text is None:
                self.states.pop(id, None)
            else:
                self.states[id] = text
        self.changes += changes
        return tuple(changes)

    def mutes(self) -> Sequence[Mute]:
        return ()


def evaluator_of(scene: Any, keeper: Any) -> Evaluator:
    pools = PoolFeed(scene.driver.standing_if_known)
    return Evaluator(default_rules(), keeper, pools, OwnFeed("node-1", 1.0, list), clock=scene.clock)


def full(scene: Any) -> Any:
    """A scene whose pool is full, as of its last view."""
    here = scene()
    here.engine(headroom=0.0).engine.pool.allocate(125)
    here.fires("pool-nearly-full")
    return here


def second(here: Any, evaluator: Evaluator) -> list[tuple[str, ChangeKind]]:
    here.tick()
    return [(change.alert.rule, change.kind) for change in evaluator.tick(here.view).changes]


def test_sampling_does_not_wait_for_a_disk_that_hangs(scene: MakeScene) -> None:
    here, keeper = full(scene), Keeper()
    evaluator = evaluator_of(here, keeper)
    here.sampler.subscribe(lambda: evaluator.notice(here.sampler.view))
    keeper.gate.clear()
    thread = threading.Thread(target=evaluator.run, daemon=True)
    thread.start()
    here.now += 1
    here.sampler.tick()
    assert keeper.entered.wait(120.0)
    before = here.view.generation
    for _ in range(20):
        here.now += 1
        here.sampler.tick()
    assert here.view.generation == before + 20
    assert keeper.states == {}
    keeper.gate.set()
    evaluator.stop()
    thread.join(120.0)
    assert not thread.is_alive()


def test_samples_that_take_long_are_late_and_still_judged(scene: MakeScene) -> None:
    """Eight seconds each, at an interval of one: that is an alert, and no reason to know nothing of the pools."""
    here, keeper = full(scene), Keeper()
    evaluator = evaluator_of(here, keeper)
    for number in range(10):
        view = replace(here.view, generation=1000 + number, taken_monotonic=here.clock.monotonic(), sample_seconds=8.0)
        here.now += 8.0
        evaluator.tick(view)
    rules = {change.alert.rule for change in keeper.changes}
    assert {"agent-sampling-late", "pool-nearly-full"} <= rules


def test_what_could_not_be_kept_has_not_happened_and_is_found_again(scene: MakeScene) -> None:
    here, keeper = full(scene), Keeper()
    evaluator = evaluator_of(here, keeper)
    for _ in range(29):
        second(here, evaluator)
    keeper.fault = RuntimeError("a fault of ours")
    for _ in range(5):
        here.tick()
        with pytest.raises(RuntimeError):
            evaluator.tick(here.view)
    keeper.fault = None
    assert ("pool-nearly-full", ChangeKind.FIRED) in second(here, evaluator)
    assert [change.alert.rule for change in keeper.changes] == ["pool-nearly-full"]


def test_an_alert_is_marked_at_the_sample_that_it_was_found_in(scene: MakeScene) -> None:
    """However late the thread comes to it; and what fires at the start is no news."""
    here, keeper = full(scene), Keeper()
    marks: list[Any] = []

    def put(entry: Any) -> bool:
        marks.append(entry)
        return True

    evaluator = evaluator_of(here, keeper)
    evaluator.subscribe(Recorder(put).notice_alerts)
    while ("pool-nearly-full", ChangeKind.FIRED) not in second(here, evaluator):
        assert marks == []
        here.now += 0.4  # since the sample
    (mark,) = marks
    assert mark.text.startswith("pool-nearly-full fires")
    assert mark.time_unix == here.view.taken_unix
    again = evaluator_of(here, keeper)
    again.subscribe(Recorder(put).notice_alerts)
    second(here, again)
    assert len(marks) == 1


def test_the_thread_outlives_a_fault_of_ours(scene: MakeScene, caplog: pytest.LogCaptureFixture) -> None:
    here, keeper = full(scene), Keeper()
    evaluator = evaluator_of(here, keeper)
    keeper.fault = RuntimeError("a fault of ours")
    thread = threading.Thread(target=evaluator.run, daemon=True)
    with caplog.at_level(logging.ERROR):
        thread.start()
        evaluator.notice(here.view)
        assert keeper.raised.wait(120.0)
        keeper.fault = None
        keeper.entered.clear()
        here.tick()
        evaluator.notice(here.view)
        assert keeper.entered.wait(120.0)
    evaluator.stop()
    thread.join(120.0)
    assert "a fault of ours" in str([record.__dict__.get("fields") for record in caplog.records])


def test_before_the_first_sample_nothing_is_absent(scene: MakeScene) -> None:
    here, keeper = full(scene), Keeper()
    keeper.states = {one.fingerprint: one.to_json() for one in here.open.values()}
    fresh = evaluator_of(scene(), keeper)
    for _ in range(2000):
        here.now += 1
        assert fresh.tick(scene().view).changes == ()
    assert len(fresh.standing.open) == 1


def test_a_new_agent_goes_on_where_the_old_one_stood(scene: MakeScene, tmp_path: Path) -> None:
    """Nothing is told again, and durations go on from what was last written down, a minute ago at most."""
    here = full(scene)
    path = tmp_path / "alerts.sqlite"
    first = evaluator_of(here, store := Store(path, clock=here.clock))
    told = [one for _ in range(70) for one in second(here, first)]
    assert told == [("pool-nearly-full", ChangeKind.FIRED), ("leak-suspected", ChangeKind.FIRED)]
    store.close()
    again = evaluator_of(here, store := Store(path, clock=here.clock))
    assert {one.alert.rule for one in again.standing.open if one.told} == {"pool-nearly-full", "leak-suspected"}
    assert [one for _ in range(70) for one in second(here, again)] == []
    store.close()


@pytest.mark.parametrize("over", [False, True])
def test_a_new_agent_goes_on_from_a_store_that_it_can_read_only_later(
    scene: MakeScene, tmp_path: Path, over: bool
) -> None:
    """What still fires is not told again, though it was found anew and is pending; what is over by then is told so."""
    here = scene()
    pool = here.engine(headroom=0.0).engine.pool
    blocks = pool.allocate(125).blocks
    here.fires("pool-nearly-full")
    folder, away = tmp_path / "state", tmp_path / "away"
    first = evaluator_of(here, store := Store(folder / "alerts.sqlite", clock=here.clock))
    told = [one for _ in range(70) for one in second(here, first)]
    assert told == [("pool-nearly-full", ChangeKind.FIRED), ("leak-suspected", ChangeKind.FIRED)]
    store.close()
    folder.rename(away)
    folder.touch()  # in its place, which stops root too
    if over:
        pool.release(blocks)
    again = evaluator_of(here, store := Store(folder / "alerts.sqlite", clock=here.clock, mend_seconds=10.0))
    assert again.standing.open == ()
    assert [one for _ in range(5) for one in second(here, again)] == []
    folder.unlink()
    away.rename(folder)
    rules = {rule for rule, _ in told}
    later = [one for _ in range(400) for one in second(here, again) if one[0] in rules]
    assert store.durable
    assert sorted(later) == ([(rule, ChangeKind.RESOLVED) for rule in sorted(rules)] if over else [])
    store.close()


def test_durations_of_open_alerts_are_written_down_each_minute(scene: MakeScene) -> None:
    here, keeper = full(scene), Keeper()
    evaluator = evaluator_of(here, keeper)
    for _ in range(125):
        second(here, evaluator)
    (kept,) = [
        state for state in map(AlertState.from_json, keeper.states.values()) if state.alert.rule == "pool-nearly-full"
    ]
    assert 30 < kept.quiet_seconds <= 125


def test_a_state_that_cannot_be_read_is_forgotten_with_a_line(
    scene: MakeScene, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper()
    keeper.states = {"x": "{}"}
    with caplog.at_level(logging.WARNING):
        assert evaluator_of(scene(), keeper).standing.open == ()
    assert "an open alert was forgotten" in caplog.text


def test_a_real_clock_will_do(scene: MakeScene) -> None:
    here = full(scene)
    evaluator = Evaluator(
        default_rules(), Keeper(), PoolFeed(here.driver.standing_if_known), OwnFeed("node-1", 1.0, list)
    )
    assert evaluator.tick(here.view).changes == ()
    assert Clock().wall() - time.time() < 60
