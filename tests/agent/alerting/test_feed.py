"""What is known of a pool and what is not, and what counters gain."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.alerting.numbers import CATALOGUE, NUMBERS
from agent.alerting.rule_files import default_rules
from agent.alerting.windows import BestLately, Window, median_bound
from alerts.model import Severity
from engine_shim.layout import HISTOGRAM_BOUNDS_SECONDS

MakeScene = Callable[..., Any]
OF_SOURCE = {"engine_gone", "engine_stalled", "map_stale", "map_torn_ratio", "map_degraded"}


def known(scene: Any, id: str) -> set[str]:
    return {name for name, value in scene.numbers()[id].items() if value is not None}


def test_every_number_is_in_the_catalogue_and_every_other_one_is_fed(scene: MakeScene) -> None:
    here = scene()
    served = here.engine()
    here.tick()
    served.ask(700, 100, number=2)
    here.tick(70)
    fed = known(here, served.id) | known(here, "agent")
    absent = {"engine_metrics_disagreement", "agent_notifications_refused"}  # no metrics are read, nobody is told
    absent |= {
        "nvml_failed",
        "host_memory_available_ratio",
        "cgroup_memory_used_ratio",
        "device_lost",
    }  # no device
    absent |= {"device_memory_free_ratio", "device_memory_unattributed_ratio"}
    assert set(NUMBERS) - fed <= absent
    assert fed <= set(NUMBERS)


@pytest.mark.parametrize("trouble", ["stalled", "stopped", "degraded", "hung"])
def test_of_a_source_in_trouble_nothing_is_known_but_the_trouble(scene: MakeScene, trouble: str) -> None:
    here = scene()
    served = here.engine()
    if trouble == "stalled":
        served.ask(64, 100)
    here.tick(70)
    assert "pool_used_ratio" in known(here, served.id)
    if trouble == "stalled":
        served.steps = 0
    elif trouble == "stopped":
        served.stopped = True
    elif trouble == "degraded":
        served.observer.moved([1], [10**6], live=False)
    here.tick(8, sample=trouble != "hung")
    left = known(here, served.id)
    assert {name for name in left if name.startswith(("pool_", "prefix_", "preemptions_"))} <= {"pool_consumers"}
    assert left & OF_SOURCE == (set() if trouble == "hung" else left & OF_SOURCE)
    assert bool(left & OF_SOURCE) == (trouble != "hung")


def test_one_torn_read_is_a_second_in_which_nothing_is_known(scene: MakeScene) -> None:
    here = scene()
    served = here.engine()
    here.tick(3)
    served.stopped = True
    served.tear(True)
    here.tick()
    assert here.view.samples[served.id].state == "live"
    assert "pool_used_ratio" not in known(here, served.id)
    served.tear(False)
    served.stopped = False
    here.tick()
    assert "pool_used_ratio" in known(here, served.id)


def test_a_sleeping_engine_takes_the_alerts_of_its_pool_with_it(scene: MakeScene) -> None:
    here = scene()
    served = here.engine(headroom=0.0)
    served.engine.pool.allocate(125)
    here.fires("pool-nearly-full")
    served.observer.set_flag(sleeping=True)
    (over,) = here.tick()
    assert "the engine sleeps" in over.reason


def test_an_engine_that_is_gone_for_good_leaves_no_alert_open(scene: MakeScene) -> None:
    """Its pool's alert is held while the map is there, and over a quarter of an hour after it was last read."""
    here = scene()
    served = here.engine(headroom=0.0)
    served.engine.pool.allocate(125)
    here.fires("pool-nearly-full")
    served.closed = True  # killed: the map stays, and nobody holds its lock
    here.fires("engine-gone", most=3)
    here.tick(295)
    assert here.open["pool-nearly-full"].held
    here.tick(920)
    assert here.open == {}
    reasons = {change.alert.rule: change.reason for change in here.changes if not change.alert.firing}
    assert set(reasons) == {"pool-nearly-full", "engine-gone"}
    assert all(
        reason.startswith("nothing is read of it, and nothing is known of it for ") for reason in reasons.values()
    )
    served.closed = False


def test_a_copy_of_a_map_does_not_speak_for_the_engine(scene: MakeScene) -> None:
    """As one is made for a bug report, in the same folder and under a name that comes first."""
    here = scene()
    served = here.engine()
    here.tick(3)
    copy = served.path.with_name(f"a-copy-of-{served.path.name}")
    shutil.copyfile(served.path, copy)
    here.tick(5)
    assert here.view.samples[copy.name.removesuffix(".kvmap")].state == "gone"
    assert here.open == {}
    assert here.numbers()[served.id]["engine_gone"] == 0.0
    served.closed = True  # killed: now both are gone
    here.fires("engine-gone", most=3)
    served.closed = False


def test_an_engine_that_is_started_anew_ends_what_was_so_of_the_old_one(scene: MakeScene) -> None:
    """In good order and between two samples; what its counters gained meanwhile is nobody's."""
    here = scene()
    served = here.engine(headroom=0.0)
    served.engine.pool.allocate(125)
    here.fires("pool-nearly-full")
    served.close()
    here.engine(headroom=0.0)
    (over,) = [change for change in here.tick(2) if not change.alert.firing]
    assert (over.alert.rule, over.reason) == ("pool-nearly-full", "it is at 0 % now")
    assert here.numbers()[served.id].get("preemptions_per_minute") is None
    here.tick(30)
    assert here.open == {}


def test_counters_gain_within_a_window() -> None:
    window = Window(60.0)
    assert window.take(0.0, 1, {"a": 100}, None) is None
    assert window.take(10.0, 1, {"a": 110}, None) is None  # too little of it was watched
    gain = window.take(20.0, 1, {"a": 120}, None)
    assert gain is not None
    assert gain.per_minute("a") == 60.0
    gain = window.take(100.0, 1, {"a": 120}, None)
    assert gain is not None
    assert gain.seconds == 80.0


@pytest.mark.parametrize(
    ("now", "incarnation", "count"), [(30.0, 2, 200), (30.0, 1, 50), (500.0, 1, 200)], ids=["restart", "back", "late"]
)
def test_counters_that_begin_anew_gain_nothing_yet(now: float, incarnation: int, count: int) -> None:
    window = Window(60.0)
    window.take(0.0, 1, {"a": 100}, None)
    assert window.take(now, incarnation, {"a": count}, None) is None


def test_the_median_of_a_histogram_is_a_bound_of_its_bucket() -> None:
    assert median_bound((0, 3, 1), (1.0, 2.0)) == 2.0
    assert median_bound((0, 0, 4), (1.0, 2.0)) is None  # beyond the last bound
    assert median_bound((0, 0, 0), (1.0, 2.0)) is None
    assert len(HISTOGRAM_BOUNDS_SECONDS) > 3


def test_the_best_of_an_hour_is_forgotten_after_it() -> None:
    best = BestLately(seconds=3600.0)
    assert best.take(0.0, 0.9) == 0.9
    assert best.take(1800.0, 0.1) == 0.9
    assert best.take(3700.0, 0.2) == 0.2


def test_the_documentation_has_every_number_and_a_section_on_every_rule(repository_root: Path) -> None:
    text = (repository_root / "docs" / "alerts.md").read_text(encoding="utf-8")
    runbook = (repository_root / "docs" / "runbook.md").read_text(encoding="utf-8")
    for name, number in NUMBERS.items():
        assert f"| `{name}` | {number.unit.value.replace('_', ' ')} | {number.text} |" in text, name
    for name in sorted(CATALOGUE.texts | CATALOGUE.labels):
        assert f"`{name}`" in text, name
    for rule in default_rules():
        assert rule.runbook == rule.name
        assert f"\n## {rule.name}\n" in runbook, rule.name


def test_default_rules_can_end_and_say_what_to_do() -> None:
    for rule in default_rules():
        assert rule.summary.names & {"engine_id", "agent"}, rule.name
        assert rule.meaning.text.endswith("."), rule.name
        assert rule.action.text.endswith("."), rule.name
        assert all(one.to.rank > rule.severity.rank for one in rule.raises)
        assert rule.severity in Severity
