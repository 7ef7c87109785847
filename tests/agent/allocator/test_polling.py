"""What the agent makes of engines that tell of their allocator, that cannot, and that are too old to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
from prometheus_client.core import Metric

from agent.allocator.families import allocator_families, stuck_share
from agent.allocator.polling import ASK_AGAIN_SECONDS, AllocatorPoll, AllocatorSample
from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.model import AgentView, PoolSample
from engine_shim.control.messages import AllocatorReply
from engine_shim.errors import ControlMalformed, ControlRefused, ControlUnavailable, KvatlasError
from engine_shim.snapshot import MapSnapshot

TOLD = {"reserved_bytes": 60, "live_bytes": 30, "active_bytes": 34, "stuck_bytes": 13, "retries": 2, "ooms": 1}


class Engine:
    """A control socket that answers as it is told to, and counts how often it is asked."""

    def __init__(self, answer: AllocatorReply | KvatlasError) -> None:
        self.answer, self.asked = answer, 0

    def allocator(self, *, snapshot: bool = False, timeout_seconds: float | None = None) -> AllocatorReply:
        assert not snapshot, "a snapshot costs the engine time, and nobody asked for one"
        self.asked += 1
        if isinstance(self.answer, KvatlasError):
            raise self.answer
        return self.answer


@pytest.fixture
def view(make_snapshot: Callable[..., MapSnapshot]) -> AgentView:
    snapshot = make_snapshot([0, 1, 2])
    sample = PoolSample(
        id="engine.dp0.tp0.pp0.kv",
        state="live",
        reason="",
        snapshot=snapshot,
        report=analyze(snapshot.states),
        fragmentation_known=True,
        waste=None,
        oldest_pinned_seconds=None,
        forecast=ExhaustionForecast(None, ""),
        tokens_per_second=None,
        torn_reads=0,
        read_seconds=0.0,
    )
    # Two pools of one process: it is asked once.
    samples = MappingProxyType({"a": sample, "b": sample})
    return AgentView(1, 0.0, samples, (), (), 0.0)


def poll_of(view: AgentView, engine: Engine, now: list[float]) -> Callable[[], tuple[AllocatorSample, ...]]:
    def control_of(path: Path) -> Engine:
        return engine

    poll = AllocatorPoll(lambda: view, control_of, monotonic=lambda: now[0])
    return lambda: poll.read(lambda doing: None)


def test_an_engine_that_tells_is_asked_each_time(view: AgentView) -> None:
    engine = Engine(AllocatorReply(available=True, backend="native", devices={"0": {**TOLD, "name": "x"}}))
    read = poll_of(view, engine, [0.0])
    (sample,) = read()
    assert sample.devices["0"] == TOLD
    assert (sample.reason, sample.backend) == ("", "native")
    read()
    assert engine.asked == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (AllocatorReply(available=False, reason="no CUDA allocator here"), "no CUDA allocator here"),
        (ControlUnavailable("it is not there"), "it is not there"),
        (ControlRefused("op is 'allocator'; it is one of ...", error="bad_request", field="op"), "too old"),
        (ControlRefused("this user may not", error="refused"), "this user may not"),
        (ControlMalformed("not JSON"), "not JSON"),
    ],
)
def test_one_that_does_not_is_left_alone_for_a_while(
    view: AgentView, answer: AllocatorReply | KvatlasError, reason: str
) -> None:
    engine, now = Engine(answer), [0.0]
    read = poll_of(view, engine, now)
    for _ in range(3):
        (sample,) = read()
        assert reason in sample.reason
        assert sample.devices == {}
    assert engine.asked == 1
    now[0] = ASK_AGAIN_SECONDS
    engine.answer = AllocatorReply(available=True, devices={"0": TOLD})
    assert read()[0].reason == ""
    assert engine.asked == 2


def test_engines_that_are_gone_are_not_asked(view: AgentView) -> None:
    engine = Engine(AllocatorReply(available=True))
    empty = AgentView(2, 0.0, MappingProxyType({}), (), (), 0.0)
    assert poll_of(empty, engine, [0.0])() == ()
    assert engine.asked == 0


def values(families: list[Metric]) -> dict[tuple[str, str], float]:
    return {
        (one.name.removeprefix("kvatlas_torch_allocator_"), one.labels.get("kind", "")): one.value
        for family in families
        for one in family.samples
    }


def test_figures_that_follow_are_worked_out_and_what_is_not_told_is_absent() -> None:
    found = values(allocator_families([AllocatorSample("e", "m", "r", "", "native", {"0": TOLD})]))
    assert found["bytes", "reserved"] == 60
    assert (found["bytes", "live"], found["bytes", "pending"], found["bytes", "free"]) == (30, 4, 26)
    assert found["fragmentation_ratio", ""] == 0.5
    assert found["retries_total", ""] == 2
    little = values(allocator_families([AllocatorSample("e", "m", "r", "", "native", {"0": {"live_bytes": 7}})]))
    assert little == {("bytes", "live"): 7}


def test_nothing_free_has_no_share_that_is_stuck() -> None:
    assert stuck_share({"reserved_bytes": 5, "active_bytes": 5, "stuck_bytes": 0}) is None


def test_two_that_call_themselves_the_same_give_one_series() -> None:
    twice = [AllocatorSample("e", "m", "r", "", "", {"0": TOLD})] * 2
    for family in allocator_families(twice):
        labels = [tuple(sorted(one.labels.items())) for one in family.samples]
        assert len(labels) == len(set(labels))
