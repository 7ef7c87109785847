"""Every bar of the benchmarks: what it is about, how it is read from a benchmark's JSON, and whom it is compared with.

The numbers are those of the scripts, where they are module-level constants with BAR in their names; a test holds this
list to them. What lies in a benchmark's JSON is read by small pure functions, which raise where a value is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import (
    _soak_verdict,
    agent_cost,
    alert_delivery,
    alert_latency,
    alert_sampling,
    analyze,
    block_copy,
    block_pool,
    compaction,
    dashboard,
    engine_identity,
    fleet,
    metrics,
    recording,
    sglang_allocator,
    transformers_throughput,
    vllm_observer,
    vllm_relocation,
    vllm_throughput,
)
from engine_shim.compaction.run import RunSettings
from engine_shim.compaction.time_share import MAX_TIME_SHARE

WITHOUT_A_BAR = ("history", "kv_quantization", "map_reader", "plan_moves", "vllm_steps")


class NotMeasuredError(Exception):
    """The benchmark ran, but with options that leave this out."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A value to be held against a limit, and a word on it."""

    value: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a benchmark has judged itself: its words, and whether they meet the bar."""

    text: str
    met: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. `read` takes the benchmark's JSON; a limit of None is one in `words`, which the benchmark judged."""

    benchmark: str
    what: str
    read: Callable[[Any], Reading | Verdict]
    limit: float | None
    unit: str = ""
    against: str = ""
    at_least: bool = False  # else: at most
    words: str = ""
    limit_of: Callable[[Any], float] | None = None  # the limit of this run, where an option sets it


def number(value: object) -> float:
    """The value, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a number")
    return value


def at(*path: str) -> Callable[[Any], Reading]:
    """Reads the number that lies at these keys."""

    def read(result: Any) -> Reading:
        for key in path:
            result = result[key]
        return Reading(number(result))

    return read


def row_of(rows: Iterable[dict[str, Any]], **wanted: object) -> dict[str, Any]:
    """The one row with these values."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {wanted}")
    return found[0]


def ratio_at(**wanted: object) -> Callable[[Any], Reading]:
    """Reads the median ratio of the one row with these values; the note is its quartiles."""

    def read(result: Any) -> Reading:
        row = row_of(result["rows"], **wanted)
        low, high = row["quartiles"] if "quartiles" in row else row["ratio_quartiles"]
        return Reading(number(row["ratio"]), f"{low:.2f} to {high:.2f}")

    return read


def highest(readings: Iterable[Reading]) -> Reading:
    """The worst of those that may be at most so much; there must be one."""
    return max(readings, key=lambda one: one.value)


def lowest(readings: Iterable[Reading]) -> Reading:
    """The worst of those that must be at least so much; there must be one."""
    return min(readings, key=lambda one: one.value)


def upper_end(interval: dict[str, Any], middle: str) -> Reading:
    """The upper end of an interval, which is judged: where it lies below the bar, so does all of it. The note is its
    middle, a median or a mean."""
    return Reading(number(interval["high"]), f"middle {interval[middle]:.3f}")


def of_each(rows: Sequence[Any]) -> Sequence[Any]:
    """The rows, of which there must be one: what was counted over none is not 0."""
    if not rows:
        raise LookupError("no rows")
    return rows


# Alerts.
def webhook_faults(*names: str) -> Callable[[Any], float]:
    """Their sum; the benchmark writes down only what it found."""
    assert set(names) <= set(alert_delivery.WEBHOOK_FAULTS)

    def read(result: Any) -> float:
        webhook = result["webhook"]
        number(webhook["messages"])
        return sum(number(webhook.get(name, 0)) for name in names)

    return read


def alerts_lost(result: Any) -> Reading:
    lost = number(result["slack"]["lost"]) + webhook_faults("lost", "never_told")(result)
    return Reading(lost, f"of {number(result['slack']['firings']):,} for each")


def alerts_told_twice(result: Any) -> Reading:
    name = "told_twice_without_cause"
    return Reading(number(result["slack"][name]) + webhook_faults(name)(result))


def alerts_left_open(result: Any) -> Reading:
    still = sum(number(count) for count in result["told_open_at_the_end"].values())
    return Reading(still + webhook_faults("resolved_before_fired", "left_open")(result))


def undurable(result: Any) -> Reading:
    durable = result["always_durable"]
    if not isinstance(durable, bool):
        raise TypeError(f"{durable!r} is neither true nor false")
    return Reading(int(not durable))


def sampling_ratio(result: Any) -> Reading:
    if not number(result["requests_left_unanswered"]):
        raise ValueError("no request was left unanswered")
    return Reading(number(result["p99_ratio"]))


# Blocks.
def analysis_ms(pool: str) -> Callable[[Any], Reading]:
    return lambda result: Reading(number(row_of(result["rows"], pool=pool)["median_ms"]))


def copy_share(shape: str) -> Callable[[Any], Reading]:
    return lambda result: lowest(
        Reading(number(row["share"]), row["model"]) for row in result["rows"] if row["pool"] == shape
    )


def of_runs(name: str, blocks: int) -> Callable[[Any], Reading]:
    """What runs cost in the pool of so many blocks."""
    return lambda result: Reading(number(row_of(result["costs"], blocks=blocks)[name]))


def budget_ms(result: Any) -> float:
    (budget,) = {number(one["budget_ms"]) for one in result["costs"]}
    return budget


def time_share_bound(result: Any) -> float:
    (bound,) = {number(one["time_share_bound"]) for one in result["costs"]}
    return bound


def blocks_that_differ(result: Any) -> Reading:
    """Contents of a model are in its tokens alone, and are not compared."""
    compared = [number(one["mismatches"]) for one in result["costs"] if one["mismatches"] is not None]
    if not compared:
        raise NotMeasuredError("no contents were compared")
    return Reading(sum(compared) + number(result["gain"]["mismatches"]))


def traces_that_differ(result: Any) -> Reading:
    rows = of_each(result["rows"])
    return Reading(sum(bool(row["difference"]) for row in rows), f"of {len(rows)}")


def wrong_contents(result: Any) -> Reading:
    rows = of_each(result["rows"])
    return Reading(sum(number(row[policy]["mismatched_blocks"]) for row in rows for policy in engine_identity.POLICIES))


# Agent and dashboard.
def scrape_p99(result: Any) -> Reading:
    ratio = result.get("render_over_prometheus_client")
    return Reading(number(result["p99_ms"]), "" if ratio is None else f"rendering {ratio:.2f} of its time")


def worst_view(name: str) -> Callable[[Any], Reading]:
    return lambda result: highest(Reading(number(each[name]), view) for view, each in result["views"].items())


def first_paint(kind: str) -> Callable[[Any], Reading]:
    def read(result: Any) -> Reading:
        if result["first_paint_ms"] == {}:
            raise NotMeasuredError("needs --paints")
        return Reading(number(result["first_paint_ms"][kind]))

    return read


def scrapes_missing(result: Any) -> Reading:
    found = result["scrapes"]
    due = int(result["seconds"] / result["scrape_interval_seconds"])
    targets = result["agents"] - found["targets"]
    return Reading(number(found["failed"]) + targets + max(0, due - found["fewest_of_a_target"]))


def scrape_pause(result: Any) -> Reading:
    return Reading(number(result["scrapes"]["longest_gap_seconds"]) / result["scrape_interval_seconds"])


def operations(result: Any) -> Reading:
    return lowest(Reading(number(one)) for one in result["operations_a_second"])


def not_shown(result: Any) -> Reading:
    return Reading(result["agents"] - number(result["view"]["shown"]), f"of {result['agents']}")


def page_errors(result: Any) -> Reading:
    return Reading(len(result["view"]["page_errors"]))


# Engines.
def transformers_speed(result: Any) -> Reading:
    return upper_end(row_of(result["rows"], what="watched", unit="tokens/s"), "ratio")


def relocation_speed(result: Any) -> Reading:
    return upper_end(result["throughput"], "median")


def server_speed(allocation: str) -> Callable[[Any], Reading]:
    def read(result: Any) -> Reading:
        if result["allocation"] != allocation:
            raise NotMeasuredError(f"needs --allocation {allocation}")
        return upper_end(result["throughput"], "median")

    return read


def gpu_runs_that_differ(result: Any) -> Reading:
    """Processes that failed, or whose tokens, hits or evictions are not those of the first one without the plugin."""
    wrong = count = 0
    for row in of_each(result):
        plain = row_of(result, runner=row["runner"], mode="without")["runs"]
        base: dict[str, Any] = next((one for one in plain if "error" not in one), {})
        for run in row["runs"]:
            count += 1
            same = "error" not in run and all(run[key] == base.get(key) for key in ("tokens", "hits", "evicted"))
            wrong += not same
    return Reading(wrong, f"of {count} runs")


def soak_line(name: str) -> Callable[[Any], Verdict]:
    """A line of the soak's verdict; what it found in detail is left to the soak's own output."""

    def read(result: Any) -> Verdict:
        row = row_of(result["verdict"], name=name)
        if row["met"] is None:
            raise NotMeasuredError(row["value"])
        if not isinstance(row["met"], bool):
            raise TypeError(f"{row['met']!r} is neither true nor false")
        return Verdict(row["value"].partition(": ")[0], row["met"])

    return read


def soak_bars() -> tuple[tuple[str, str], ...]:
    """The name and the bar of each line of the soak's verdict."""
    verdict = _soak_verdict
    return (
        ("alerts of faults told", "all"),
        ("firings left without a resolve", "0"),
        ("alerts that Slack has no message of; messages it refused", "0; 0"),
        (f"gaps over {verdict.GAP_SECONDS:g} s beside faults", "0"),
        ("history lost to a kill -9 of the agent", f"{verdict.KILL_SECONDS:g} s"),
        ("answered changes without an audit entry", "0"),
        *(
            line
            for process, cores in verdict.CORES.items()
            for line in (
                (f"{process}: memory", f"< {verdict.SLOPE_BYTES / 1e6:g} MB/min"),
                (f"{process}: descriptors", f"+{verdict.MORE_DESCRIPTORS} at most"),
                (f"{process}: threads", f"+{verdict.MORE_THREADS} at most"),
                (f"{process}: CPU", f"{cores:g}"),
            )
        ),
        ("console errors", "0"),
        ("longest wait of an engine within a step", f"{verdict.WAITED_MS:g} ms, or twice the unwatched one's"),
        ("engines that ended by themselves, or unlike promised", "0"),
        ("scrapes that failed beside faults", "0"),
    )


BARS: tuple[Bar, ...] = (
    Bar(
        "agent_cost",
        "CPU of the agent at 1 Hz",
        at("cpu_share_of_a_core", "value"),
        agent_cost.CPU_BAR,
        "cores",
    ),
    Bar("agent_cost", "memory of the agent", at("resident_mb", "value"), agent_cost.MEMORY_BAR_MB, "MB"),
    Bar(
        "agent_cost",
        "growth of the agent's memory",
        at("slope_mb_per_minute", "value"),
        agent_cost.SLOPE_BAR_MB_PER_MINUTE,
        "MB/min",
    ),
    Bar("alert_delivery", "firings neither named nor counted", alerts_lost, 0),
    Bar("alert_delivery", "firings told twice without a kill", alerts_told_twice, 0),
    Bar("alert_delivery", "resolves before firings, alerts left open", alerts_left_open, 0),
    Bar("alert_delivery", "messages refused as invalid", at("refused_as_invalid"), 0),
    Bar("alert_delivery", "outbox not durable at some time", undurable, 0),
    *(
        bar
        for sink, name in (("alertmanager", "Alertmanager"), ("slack", "Slack"))
        for bar in (
            Bar(
                "alert_latency",
                f"from a crossing to {name}, p99",
                at(sink, "p99"),
                alert_latency.BAR_SECONDS,
                "s",
            ),
            Bar("alert_latency", f"crossings {name} was not told of", at(sink, "lost"), 0),
        )
    ),
    Bar(
        "alert_sampling",
        "sampling beside silent receivers, p99",
        sampling_ratio,
        alert_sampling.BAR,
        against="nobody to tell",
    ),
    *(Bar("analyze", f"analysis, {pool}", analysis_ms(pool), limit, "ms") for pool, limit in analyze.BARS_MS.items()),
    *(
        Bar(
            "block_copy",
            f"bandwidth of moves, {shape.__name__}, worst model",
            copy_share(shape.__name__),
            block_copy.BAR,
            against="one large torch copy_",
            at_least=True,
        )
        for shape in block_copy.SHAPES
    ),
    *(
        Bar(
            "block_pool",
            f"get and free of {size} blocks, with the map",
            ratio_at(blocks=size, step_operations=block_pool.JUDGED_STEP),
            limit,
            against="vLLM's own BlockPool",
        )
        for size, limit in block_pool.BARS.items()
    ),
    *(
        Bar(
            "compaction",
            f"{what}, {pool}",
            of_runs(name, blocks),
            1e3 * RunSettings().max_step_seconds,
            "ms",
            against,
            limit_of=budget_ms,
        )
        for blocks, pool in compaction.POOLS.items()
        for what, name, against in (
            ("excess of steps of a run, p99", "excess_p99_ms", "median of equal steps"),
            ("the same in CPU time", "excess_cpu_p99_ms", "median of equal steps"),
            ("work of a run in a step, CPU time, p99", "work_cpu_p99_ms", ""),
        )
    ),
    *(
        Bar(
            "compaction",
            f"{what}, {pool}",
            of_runs(name, blocks),
            compaction.BAR_THROUGHPUT,
            against="engine without runs",
            at_least=True,
        )
        for blocks, pool in compaction.POOLS.items()
        for what, name in (
            ("throughput during runs", "throughput_ratio"),
            ("throughput by CPU time", "throughput_cpu_ratio"),
        )
    ),
    *(
        Bar(
            "compaction",
            f"share of CPU time that runs take, {pool}",
            of_runs("time_share_cpu", blocks),
            MAX_TIME_SHARE,
            limit_of=time_share_bound,
        )
        for blocks, pool in compaction.POOLS.items()
    ),
    Bar(
        "compaction",
        "memory given back, by smaps",
        at("gain", "realised_share"),
        compaction.BAR_ELASTIC,
        against="what was predicted",
        at_least=True,
    ),
    Bar("compaction", "blocks whose contents differ afterwards", blocks_that_differ, 0),
    *(
        Bar("dashboard", f"first useful paint, {kind}", first_paint(kind), limit, "ms")
        for kind, limit in dashboard.BAR_PAINT_MS.items()
    ),
    Bar("dashboard", "refresh of the slowest view", worst_view("refresh_ms"), dashboard.BAR_MS, "ms"),
    Bar("dashboard", "whole page of the largest view", worst_view("whole_page_bytes"), dashboard.BAR_BYTES, "B"),
    Bar(
        "engine_identity",
        "traces with other hits or evictions",
        traces_that_differ,
        0,
        against="engine, vLLM's order",
    ),
    Bar("engine_identity", "blocks with wrong contents", wrong_contents, 0),
    Bar("fleet", "scrape of an agent, p99", at("scrapes", "p99_ms"), fleet.BAR_MS, "ms"),
    Bar("fleet", "scrapes that failed or are missing", scrapes_missing, 0),
    Bar("fleet", "longest pause between scrapes, intervals", scrape_pause, fleet.BAR_GAP_INTERVALS),
    Bar("fleet", "block operations of the slowest engine", operations, fleet.BAR_OPERATIONS, "/s", at_least=True),
    Bar("fleet", "pools that the Fleet view does not show", not_shown, 0),
    Bar("fleet", "errors on the page of the Fleet view", page_errors, 0),
    Bar(
        "metrics",
        "scrape of an agent with 32 engines, p99",
        scrape_p99,
        metrics.BAR_MS,
        "ms",
        "prometheus_client",
    ),
    Bar("recording", "events lost", at("lost_events"), 0),
    Bar("recording", "CPU of the recorder", at("cpu_share"), recording.BAR_CPU_SHARE, "cores"),
    Bar("recording", "size of the recording", at("mb_per_hour"), recording.BAR_MB_PER_HOUR, "MB/h"),
    *(
        Bar(
            "sglang_allocator",
            f"CPU of a step, {pool}",
            ratio_at(pool=pool),
            sglang_allocator.BAR,
            against="SGLang unwatched",
        )
        for pool in sglang_allocator.POOLS
    ),
    *(Bar("soak", what, soak_line(what), None, words=words) for what, words in soak_bars()),
    Bar(
        "transformers_throughput",
        "tokens a second, upper end of 95 %",
        transformers_speed,
        transformers_throughput.BAR,
        against="Transformers alone",
        at_least=True,
    ),
    Bar(
        "vllm_gpu",
        "runs with other tokens, hits or evictions",
        gpu_runs_that_differ,
        0,
        against="vLLM, no plugin",
    ),
    *(
        Bar(
            "vllm_observer",
            f"get and free of {size} blocks, observed",
            ratio_at(blocks=size, step_operations=vllm_observer.JUDGED_STEP, hashed=False),
            limit,
            against="vLLM's own metrics",
        )
        for size, limit in vllm_observer.BARS.items()
    ),
    Bar(
        "vllm_relocation",
        "throughput, relocating, upper end of 95 %",
        relocation_speed,
        vllm_relocation.BAR,
        against="vLLM not relocating",
        at_least=True,
    ),
    *(
        Bar(
            "vllm_throughput",
            f"throughput, {allocation}, upper end of 95 %",
            server_speed(allocation),
            limit,
            against="vLLM unwatched",
            at_least=True,
        )
        for allocation, limit in vllm_throughput.BARS.items()
    ),
)
