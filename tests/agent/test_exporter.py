"""Our own exposition, parsed: complete, without duplicates, and without what is gone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from agent.compaction.model import Decision
from agent.compaction.tally import OUTCOMES, Tally
from agent.exporter import LABELS, MAX_TEXT_AGE_SECONDS, SCRAPED_LATELY_SECONDS, Exporter, render_text
from agent.forecast import NOT_BLOCKED, Admission, ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.model import EMPTY_VIEW, AgentView, Clock, PoolSample, Waste
from engine_shim.layout import COUNTERS
from engine_shim.snapshot import Histogram, MapFlags, MapSnapshot

NOW = 1_700_000_101.0
CLOCK = Clock(wall=lambda: NOW)
Make = Callable[..., MapSnapshot]

# The design's list, so that a metric that is lost is noticed.
REQUIRED = {
    "pool_blocks": {"state"},
    "pool_block_bytes": set(),
    "pool_fragmentation_ratio": {"set"},
    "pool_largest_run_blocks": {"set"},
    "pool_runs": {"set"},
    "pool_unusable_ratio": {"order"},
    "pool_tail_waste_bytes": set(),
    "pool_headroom_blocks": set(),
    "pool_exhaustion_seconds": set(),
    "pool_admission_blocked": set(),
    "pool_accounting_residual_blocks": set(),
    "pool_oldest_pinned_seconds": set(),
    "engine_up": set(),
    "engine_stalled": set(),
    "engine_heartbeat_age_seconds": set(),
    "engine_info": {"kind", "version", "policy", "medium", "dtype"},
    **{name: set() for name in COUNTERS if name != "shim_cpu_ns"},
    "block_lifetime_seconds": set(),
    "block_idle_before_evict_seconds": set(),
    "block_reuse_gap_seconds": set(),
    "relocation_copies": set(),
    "compactions": {"outcome"},
    "compaction_moved_blocks": set(),
    "compaction_seconds": set(),
    "compaction_decisions": {"decision"},
    "snapshot_age_seconds": set(),
    "snapshots_torn": set(),
    "sample_seconds": set(),
    "sample_age_seconds": set(),
    "shim_cpu_seconds": set(),
}
# Of the parts that have metrics of their own, which the agent adds; they are tested with those parts.
OF_OTHER_PARTS = {
    "gpu_memory_bytes",
    "host_memory_bytes",
    "torch_allocator_bytes",
    "torch_allocator_fragmentation_ratio",
    "alerts",
    "notifications",
}


def sample_of(snapshot: MapSnapshot, **changes: Any) -> PoolSample:
    sample = PoolSample(
        id=f"{snapshot.identity.engine_id}.dp0.tp0.pp0.{snapshot.identity.pool}",
        state="live",
        reason="",
        snapshot=snapshot,
        report=analyze(snapshot.states),
        fragmentation_known=not snapshot.flags.sleeping,
        waste=Waste(10, 2560, 64),
        oldest_pinned_seconds=4.5,
        forecast=ExhaustionForecast(12.0, "falls"),
        tokens_per_second=1.0,
        torn_reads=3,
        read_seconds=0.001,
    )
    return replace(sample, **changes)


def view_of(*samples: PoolSample, generation: int = 1) -> AgentView:
    return AgentView(generation, NOW, MappingProxyType({s.id: s for s in samples}), (), (), 0.002)


def scrape(view: AgentView) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Series by name and labels; fails on duplicates."""
    series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(Exporter(lambda: view, clock=CLOCK).render().decode()):
        for one in family.samples:
            labels = tuple(sorted(one.labels.items()))
            assert labels not in series.setdefault(one.name, {}), f"duplicate {one.name} {labels}"
            series[one.name][labels] = one.value
    return series


@pytest.fixture
def snapshot(make_snapshot: Make) -> MapSnapshot:
    histograms = {
        name: Histogram((0.5, 2.0), (1, 2, 3), 9.5) for name in ("lifetime", "idle_before_evict", "reuse_gap")
    }
    counters = {name: index + 1 for index, name in enumerate(COUNTERS)}
    return make_snapshot([4, 0, 1, 2, 0, 3, 9], histograms=histograms, counters=counters)


def test_every_metric_of_the_list_is_there(snapshot: MapSnapshot) -> None:
    view = replace(view_of(sample_of(snapshot)), taken_monotonic=CLOCK.monotonic())
    text = Exporter(lambda: view, clock=CLOCK).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    missing = {name for name in REQUIRED if f"kvatlas_{name}" not in families}
    assert missing == set()
    twice = {name for name in OF_OTHER_PARTS if f"kvatlas_{name}" in families}
    assert twice == set(), "a part and the exporter itself give the same metric"
    for name, own in REQUIRED.items():
        for one in families[f"kvatlas_{name}"].samples:
            expected = set() if name.startswith("sample_") else own | set(LABELS)
            assert set(one.labels) - {"le"} == expected, name
    assert not {"request", "block", "pid", "engine"} & {
        label for family in families.values() for one in family.samples for label in one.labels
    }


def test_values(snapshot: MapSnapshot) -> None:
    series = scrape(view_of(sample_of(snapshot)))
    base = {"engine_id": "engine", "model": "org/model", "pool": "kv", "rank": "dp0.tp0.pp0"}

    def value(name: str, **labels: str) -> float:
        return series[f"kvatlas_{name}"][tuple(sorted({**base, **labels}.items()))]

    states = ("free", "cached", "used", "pinned", "reserved", "unknown")
    assert [value("pool_blocks", state=state) for state in states] == [2, 1, 1, 1, 1, 1]
    assert value("pool_fragmentation_ratio", set="allocatable") == pytest.approx(1 / 3)
    assert value("pool_fragmentation_ratio", set="free") == 0.5
    assert value("pool_unusable_ratio", order="1") == pytest.approx(1 / 3)
    assert value("tokens_written_total") == 1
    assert value("shim_cpu_seconds_total") == pytest.approx(len(COUNTERS) / 1e9)
    assert value("snapshots_torn_total") == 3
    assert value("snapshot_age_seconds") == pytest.approx(1.0)
    assert [value("block_lifetime_seconds_bucket", le=le) for le in ("0.5", "2.0", "+Inf")] == [1, 3, 6]
    assert value("block_lifetime_seconds_count") == 6
    assert value("block_lifetime_seconds_sum") == 9.5


def test_compaction_s_label_sets_are_closed_and_start_at_zero(snapshot: MapSnapshot) -> None:
    sample, tally = sample_of(snapshot), Tally()
    tally.run_ended("reached", 12, 0.5)
    tally.run_ended("a word of a later engine", 1, 1000.0)
    tally.decisions[Decision.HOLD_HEALTHY] += 3
    text = Exporter(lambda: view_of(sample), clock=CLOCK, tallies=lambda: {sample.id: tally}).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    runs = {one.labels["outcome"]: one.value for one in families["kvatlas_compactions"].samples}
    assert runs == {**dict.fromkeys(OUTCOMES, 0), "reached": 1, "other": 1}
    decisions = {one.labels["decision"]: one.value for one in families["kvatlas_compaction_decisions"].samples}
    assert decisions == {**{one.name.lower(): 0 for one in Decision}, "hold_healthy": 3}
    assert [one.value for one in families["kvatlas_compaction_moved_blocks"].samples] == [13]
    seconds = {one.labels.get("le", one.name): one.value for one in families["kvatlas_compaction_seconds"].samples}
    assert (seconds["0.3"], seconds["1.0"], seconds["100.0"], seconds["+Inf"]) == (0, 1, 1, 2)
    assert seconds["kvatlas_compaction_seconds_sum"] == 1000.5


def test_what_is_gone_is_absent(snapshot: MapSnapshot, make_snapshot: Make) -> None:
    """An engine that restarted under another name leaves no series behind."""
    old, new = sample_of(snapshot, state="gone"), sample_of(make_snapshot([0], engine_id="new"))
    for series in scrape(view_of(old, new)).values():
        assert not any(("engine_id", "engine") in labels for labels in series)
    assert "kvatlas_engine_up" in scrape(view_of(new))
    assert set(scrape(EMPTY_VIEW)) == {"kvatlas_sample_seconds"}


def test_a_sampler_that_hangs_is_seen_though_all_its_numbers_stand_still(snapshot: MapSnapshot) -> None:
    view, now = replace(view_of(sample_of(snapshot)), taken_monotonic=100.0), [100.5]
    exporter = Exporter(lambda: view, clock=Clock(wall=CLOCK.wall, monotonic=lambda: now[0]))
    for at, age in ((100.5, 0.5), (400.0, 300.0)):
        now[0] = at
        families = text_string_to_metric_families(exporter.render().decode())
        values = {one.name: one.value for family in families for one in family.samples}
        assert values["kvatlas_sample_age_seconds"] == age
        assert values["kvatlas_engine_up"] == 1.0


def test_undefined_is_absent(make_snapshot: Make) -> None:
    full = sample_of(
        make_snapshot([2, 2]), waste=None, oldest_pinned_seconds=None, forecast=ExhaustionForecast(None, "no trend")
    )
    series = scrape(view_of(full))
    for name in ("fragmentation_ratio", "unusable_ratio", "tail_waste_bytes", "oldest_pinned_seconds"):
        assert f"kvatlas_pool_{name}" not in series
    assert "kvatlas_pool_exhaustion_seconds" not in series
    assert "kvatlas_pool_blocks" in series


@pytest.mark.parametrize("blocked", [True, False])
def test_a_pool_that_admits_no_new_sequence_says_so(snapshot: MapSnapshot, blocked: bool) -> None:
    admission = Admission(True, "137 wait; 0 blocks above the headroom") if blocked else NOT_BLOCKED
    series = scrape(view_of(sample_of(snapshot, admission=admission)))
    assert list(series["kvatlas_pool_admission_blocked"].values()) == [float(blocked)]


@pytest.mark.parametrize(
    ("state", "up", "stalled", "pool"),
    [("live", 1, 0, True), ("stalled", 1, 1, True), ("stale", 0, 0, True), ("unreadable", 0, 0, False)],
)
def test_states_of_an_engine(state: str, up: int, stalled: int, pool: bool, snapshot: MapSnapshot) -> None:
    series = scrape(view_of(sample_of(snapshot, state=state)))
    assert list(series["kvatlas_engine_up"].values()) == [up]
    assert list(series["kvatlas_engine_stalled"].values()) == [stalled]
    assert ("kvatlas_pool_blocks" in series) is pool


def test_a_sleeping_engine_is_up_and_has_no_pool(make_snapshot: Make) -> None:
    asleep = sample_of(make_snapshot([0, 2], flags=MapFlags(sleeping=True)), state="sleeping")
    series = scrape(view_of(asleep))
    assert list(series["kvatlas_engine_up"].values()) == [1]
    assert "kvatlas_pool_fragmentation_ratio" not in series


def test_two_maps_that_call_themselves_the_same(snapshot: MapSnapshot) -> None:
    one = sample_of(snapshot)
    scrape(view_of(one, replace(one, id="a copy under another name")))


def test_equals_the_library_s_own_rendering(snapshot: MapSnapshot) -> None:
    awkward = replace(snapshot.identity, model='quo"te\\back\nline', version="ü")
    exporter = Exporter(lambda: view_of(sample_of(replace(snapshot, identity=awkward))), clock=CLOCK)
    ours = list(text_string_to_metric_families(exporter.render().decode()))
    theirs = list(text_string_to_metric_families(generate_latest(exporter.registry).decode()))
    assert ours == theirs
    odd = [
        GaugeMetricFamily("a", "help with \\ and \n in it", value=float("inf")),
        CounterMetricFamily("b", "", value=1e300, labels=None),
    ]
    assert next(iter(text_string_to_metric_families(render_text(odd).decode()))).documentation == odd[0].documentation


def test_two_exporters_in_one_process(snapshot: MapSnapshot) -> None:
    view = view_of(sample_of(snapshot))
    assert Exporter(lambda: view, clock=CLOCK).render() == Exporter(lambda: view, clock=CLOCK).render()


def test_a_text_serves_until_the_next_sample_or_for_a_moment(snapshot: MapSnapshot) -> None:
    state = {"monotonic": 0.0, "wall": NOW}
    clock = Clock(wall=lambda: state["wall"], monotonic=lambda: state["monotonic"])
    exporter = Exporter(lambda: view_of(sample_of(snapshot)), clock=clock)

    def pass_time(seconds: float) -> None:
        state["wall"] += seconds
        state["monotonic"] += seconds

    first = exporter.render()
    pass_time(MAX_TEXT_AGE_SECONDS / 2)
    assert exporter.render() is first
    exporter.refresh()  # a new sample
    second = exporter.render()
    assert second != first
    # A sampler that hangs publishes nothing new, yet ages must grow.
    pass_time(MAX_TEXT_AGE_SECONDS + 0.1)
    third = exporter.render()
    assert third != second
    # Where nobody scrapes, nothing is rendered for nobody.
    pass_time(SCRAPED_LATELY_SECONDS + 1)
    collected: list[int] = []
    exporter.registry.register(_Counting(collected))
    exporter.refresh()
    assert collected == []
    exporter.render()
    exporter.refresh()
    assert collected == [1, 1]


class _Counting(Collector):
    """Notes each time that it is collected."""

    def __init__(self, collected: list[int]) -> None:
        self._collected = collected

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        self._collected.append(1)
        return []


def test_promtool_finds_nothing(snapshot: MapSnapshot, promtool: Path) -> None:
    text = Exporter(lambda: view_of(sample_of(snapshot)), clock=CLOCK).render()
    found = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (found.returncode, found.stdout + found.stderr) == (0, b"")
    # A control: the tool does complain about a counter without _total.
    wrong = b"# HELP a_count x\n# TYPE a_count counter\na_count 1\n"
    assert subprocess.run([promtool, "check", "metrics"], input=wrong, capture_output=True, check=False).returncode != 0
