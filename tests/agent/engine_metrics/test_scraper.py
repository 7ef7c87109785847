"""Addresses asked on a clock: one that fails costs the others nothing, and what was last good is kept with its age."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.engine_metrics.exposition import parse_exposition
from agent.engine_metrics.fetch import NoAnswer
from agent.engine_metrics.model import FROZEN_SECONDS, STALE_SECONDS, Answer, EngineMetricsView
from agent.engine_metrics.names import Quantity
from agent.engine_metrics.presenter import describe_unmapped, metric_families
from agent.engine_metrics.scraper import MetricsScraper, ScraperSettings
from agent.engine_metrics.sources import MetricsSource, parse_sources
from agent.engine_metrics.writers import WriterWatch
from agent.exporter import LABELS, PREFIX, Exporter
from agent.sampling.model import EMPTY_VIEW, AgentView, Clock
from engine_shim.snapshot import MapSnapshot
from tests.agent.test_exporter import sample_of, scrape

PATIENCE_SECONDS = 120.0
Make = Callable[..., MapSnapshot]
Say = Callable[[], Answer]


def vllm(running: float = 1, usage: float = 0.5, tokens: float = 100, started: float | None = 5.0) -> Answer:
    text = (
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
        f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}\n'
    )
    return parse_exposition(text + ("" if started is None else f"process_start_time_seconds {started}\n"))


class Bench:
    """A scraper without its thread, on a clock that is turned by hand. `say` holds what each address answers."""

    def __init__(self, *addresses: str, **settings: float) -> None:
        self.steady, self.set_to, self.view = 1000.0, 0.0, EMPTY_VIEW  # the clock is set to so much beside the other
        self.say: dict[str, Say] = {}
        self.asked: list[str] = []
        self.scraper = MetricsScraper(
            parse_sources(addresses),
            lambda: self.view,
            settings=ScraperSettings(**settings),
            ask=self._ask,
            clock=Clock(wall=lambda: self.now, monotonic=lambda: self.steady),
        )

    @property
    def now(self) -> float:
        return self.steady + self.set_to

    def _ask(self, source: MetricsSource) -> Answer:
        self.asked.append(source.place)
        return self.say[source.place]()

    def second(self, seconds: float = 1.0) -> EngineMetricsView:
        """One sample of the maps and one tick, with what comes of it."""
        self.steady += seconds
        self.view = replace(self.view, taken_unix=self.now)
        self.scraper.notice()
        self.scraper.tick()
        assert self.scraper.wait_idle(PATIENCE_SECONDS)
        return self.scraper.tick()


def fail(reason: str) -> Answer:
    raise NoAnswer(reason)


def test_a_failure_keeps_the_last_good_answer_with_its_age() -> None:
    """200, 500, 500, 200: nothing becomes 0, and the address is asked less often meanwhile."""
    bench = Bench("http://a:1", "http://b:1", interval_seconds=5.0)
    bench.say = {"a:1": lambda: vllm(running=7), "b:1": lambda: vllm()}
    bench.second()
    bench.say["a:1"] = lambda: fail("HTTP 500")
    for _ in range(60):
        view = bench.second()
    first, second = view.sources
    assert (first.up, first.fault, first.age_seconds(bench.now)) == (False, "HTTP 500", 60.0)
    assert first.engines[0].total[Quantity.RUNNING] == 7
    assert second.up
    assert bench.asked.count("b:1") == 13
    assert bench.asked.count("a:1") == 7  # at first every 5 s, then after 10 and 20
    state = describe_unmapped(view.unmapped[0], bench.now, view.interval_seconds)
    assert (state.state, state.reason) == ("unreachable", "its metrics cannot be read: HTTP 500")
    bench.say["a:1"] = lambda: vllm(running=8)
    for _ in range(30):
        view = bench.second()
    assert view.sources[0].up
    assert view.sources[0].engines[0].total[Quantity.RUNNING] == 8


def test_an_address_that_never_answers_costs_the_others_nothing() -> None:
    bench, hung = Bench("http://a:1", "http://b:1", interval_seconds=1.0), threading.Event()
    bench.say = {"a:1": lambda: vllm(float(hung.wait(PATIENCE_SECONDS))), "b:1": lambda: vllm()}
    try:
        for _ in range(5):
            bench.steady += 1
            bench.scraper.tick()
        deadline = threading.Event()
        for _ in range(6000):
            if bench.scraper.tick().sources[1].up:
                break
            deadline.wait(0.01)
        view = bench.scraper.view
        assert view.sources[1].up
        assert not view.sources[0].up
        assert bench.asked.count("a:1") == 1
    finally:
        hung.set()
        assert bench.scraper.wait_idle(PATIENCE_SECONDS)


def test_old_numbers_leave_our_metrics_and_later_the_api() -> None:
    bench = Bench("http://a:1", keep_seconds=100.0)
    bench.say = {"a:1": lambda: vllm()}
    bench.second()
    text = exported(bench)
    assert ("kvatlas_engine_reported_running_requests", 1.0) in text
    assert ("kvatlas_engine_metrics_up", 1.0) in text
    bench.say["a:1"] = lambda: fail("HTTP 500")
    bench.second(STALE_SECONDS + 1)
    text = exported(bench)
    assert not any(name.startswith("kvatlas_engine_reported") for name, _ in text)
    assert ("kvatlas_engine_metrics_up", 0.0) in text
    assert len(bench.scraper.view.unmapped) == 1
    bench.second(100.0)
    assert not bench.scraper.view.unmapped


def test_a_long_time_between_readings_makes_nothing_stale() -> None:
    bench = Bench("http://a:1", interval_seconds=120.0)
    bench.say = {"a:1": lambda: vllm(running=2)}
    bench.second()
    view = bench.second(119.0)
    assert ("kvatlas_engine_reported_running_requests", 2.0) in exported(bench)
    assert describe_unmapped(view.unmapped[0], bench.now, view.interval_seconds).state == "live"


def exported(bench: Bench) -> set[tuple[str, float]]:
    """Our own metrics, by name and value."""
    clock = Clock(wall=lambda: bench.now, monotonic=lambda: bench.now)
    exporter = Exporter(
        lambda: bench.view,
        clock=clock,
        more=(lambda pools, now: metric_families(bench.scraper.view, pools, now, PREFIX, LABELS),),
    )
    families = text_string_to_metric_families(exporter.render().decode())
    return {(one.name, one.value) for family in families for one in family.samples}


def test_requests_that_run_while_nothing_changes_are_frozen_gauges() -> None:
    bench = Bench("http://a:1", interval_seconds=1.0)
    bench.say = {"a:1": lambda: vllm(running=0)}  # idle, which is no fault
    for _ in range(int(FROZEN_SECONDS) + 5):
        view = bench.second()
    assert (
        describe_unmapped(view.unmapped[0], bench.now, view.interval_seconds).state == "live"
    )  # idle, which is no fault
    bench.say = {"a:1": lambda: vllm(running=2)}
    for _ in range(int(FROZEN_SECONDS) + 5):
        view = bench.second()
    state = describe_unmapped(view.unmapped[0], bench.now, view.interval_seconds)
    assert state.state == "frozen"
    assert "nothing in its metrics has changed for" in state.reason
    counter = iter(range(100, 1000))
    bench.say = {"a:1": lambda: vllm(running=2, tokens=next(counter))}
    for _ in range(3):
        view = bench.second()
    assert describe_unmapped(view.unmapped[0], bench.now, view.interval_seconds).state == "live"


@pytest.mark.parametrize(
    ("answers", "several"),
    [
        pytest.param([vllm(started=5)] * 5, False, id="one process"),
        pytest.param([vllm(started=5), vllm(started=9), vllm(started=9)], False, id="it started anew"),
        pytest.param([vllm(started=5), vllm(started=9), vllm(started=5)], True, id="the former one answers again"),
        pytest.param([vllm(tokens=9, started=None), vllm(tokens=1, started=None)], False, id="counters back once"),
        pytest.param([vllm(tokens=n, started=None) for n in (9, 1, 9, 1)], True, id="counters back and forth"),
    ],
)
def test_several_processes_behind_one_address(answers: list[Answer], several: bool) -> None:
    watch = WriterWatch()
    assert [watch.several(answer) for answer in answers][-1] is several


# ---- with maps -------------------------------------------------------------------------------------------------------


def put_map(bench: Bench, snapshot: MapSnapshot, state: str = "live") -> str:
    sample = sample_of(snapshot, state=state)
    bench.view = AgentView(1, bench.now, MappingProxyType({sample.id: sample}), (), (), 0.001)
    return sample.id


@pytest.fixture
def bench(make_snapshot: Make) -> Bench:
    bench = Bench("http://127.0.0.1:1", interval_seconds=2.0)
    snapshot = make_snapshot([4, 2, 2, 0, 0], kind="vllm", model="m", running_requests=1)
    bench.pool = put_map(bench, snapshot)  # type: ignore[attr-defined]
    bench.say = {"127.0.0.1:1": lambda: vllm(usage=0.5)}
    return bench


def test_metrics_that_agree_with_the_map(bench: Bench) -> None:
    for _ in range(12):
        view = bench.second()
    (id,) = view.by_pool
    comparison = view.by_pool[id].comparison
    assert view.unmapped == ()
    assert {one.quantity for one in comparison.differences} == {Quantity.KV_USAGE, Quantity.RUNNING}
    assert not comparison.disagrees
    assert view.disagreement_ratio(id) == 0.0
    assert view.disagreement_ratio("nobody") is None
    assert ("kvatlas_engine_metrics_disagreement_ratio", 0.0) in exported(bench)


def test_metrics_that_do_not_are_said_with_both_numbers(bench: Bench) -> None:
    bench.say = {"127.0.0.1:1": lambda: vllm(usage=0.9)}
    for _ in range(30):
        view = bench.second()
    ((id, joined),) = view.by_pool.items()
    assert joined.comparison.disagrees
    assert "KV usage: 0.900 by the engine's metrics, 0.500 by its map" in joined.comparison.reason
    assert "nothing in its metrics has changed for" in joined.comparison.reason  # and requests run: frozen gauges
    assert view.disagreement_ratio(id) == pytest.approx(0.4)
    assert dict(exported(bench))["kvatlas_engine_metrics_disagreement_ratio"] == pytest.approx(0.4)


def test_a_clock_that_is_set_back_ends_neither_comparing_nor_ages(bench: Bench) -> None:
    for _ in range(12):
        bench.second()
    bench.set_to = -7200.0
    bench.say = {"127.0.0.1:1": lambda: vllm(usage=0.9)}
    for _ in range(20):
        view = bench.second()
    ((id, joined),) = view.by_pool.items()
    assert joined.comparison.disagrees
    assert len(bench.scraper._points[id]) <= 21  # those from before would stay for two hours
    bench.say = {"127.0.0.1:1": lambda: fail("HTTP 500")}
    bench.second()
    bench.set_to = -2 * 7200.0
    for _ in range(int(STALE_SECONDS) + 5):
        view = bench.second()
    assert view.sources[0].age_seconds(bench.now) == pytest.approx(STALE_SECONDS, abs=10)


def test_a_clock_that_is_ahead_for_a_moment_changes_no_age() -> None:
    bench = Bench("http://a:1", interval_seconds=1.0)
    bench.say = {"a:1": lambda: vllm(running=7)}
    for _ in range(4):
        bench.second()
    bench.say = {"a:1": lambda: fail("HTTP 500")}
    bench.second()
    for bench.set_to in (7200.0, 7200.0, 0.0, 0.0):
        view = bench.second()
        assert view.sources[0].age_seconds(bench.now) == pytest.approx(bench.steady - 1004.0)
    bench.say = {"a:1": lambda: vllm(running=7)}
    for _ in range(40):  # until the address is asked again
        view = bench.second()
    (reading,) = view.sources
    assert reading.frozen_seconds(reading.engines[0], bench.now) < 60


@pytest.mark.parametrize(
    ("state", "answer", "why"),
    [
        ("stalled", lambda: vllm(usage=0.9), "the engine is stalled"),
        ("live", lambda: fail("HTTP 500"), "its metrics cannot be read: HTTP 500"),
    ],
)
def test_what_cannot_be_compared_is_not(bench: Bench, state: str, answer: Say, why: str) -> None:
    bench.second()
    (sample,) = bench.view.samples.values()
    bench.view = replace(bench.view, samples=MappingProxyType({sample.id: replace(sample, state=state)}))  # type: ignore[arg-type]
    bench.say = {"127.0.0.1:1": answer}
    for _ in range(20):
        view = bench.second()
    comparison = view.by_pool[sample.id].comparison
    assert (comparison.why_not, comparison.disagrees, comparison.ratio) == (why, False, None)


def test_several_writers_are_not_compared(bench: Bench) -> None:
    starts = iter([5.0, 9.0] * 50)
    bench.say = {"127.0.0.1:1": lambda: vllm(usage=0.9, started=next(starts))}
    for _ in range(20):
        view = bench.second()
    (joined,) = view.by_pool.values()
    assert "several processes answer at http://127.0.0.1:1/metrics" in joined.comparison.why_not


def test_an_engine_that_shows_its_map_is_asked_at_once(bench: Bench) -> None:
    samples = bench.view.samples
    bench.view = replace(bench.view, samples=MappingProxyType({}))
    bench.say = {"127.0.0.1:1": lambda: fail("no connection")}
    for _ in range(30):
        bench.second()
    asked = len(bench.asked)
    assert asked < 10
    bench.say = {"127.0.0.1:1": lambda: vllm()}
    bench.view = replace(bench.view, samples=samples)
    assert bench.second().sources[0].up
    assert len(bench.asked) == asked + 1


def test_our_exposition_stays_without_duplicates(bench: Bench) -> None:
    bench.second()
    assert scrape(bench.view)
    names = [name for name, _ in exported(bench)]
    assert "kvatlas_pool_blocks" in names
    assert "kvatlas_engine_reported_generation_tokens_total" in names
