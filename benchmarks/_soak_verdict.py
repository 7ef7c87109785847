"""Judges what a soak saw: each line a value beside its bar. Pure; the record is plain JSON, times are its seconds.

Record: `seconds`; `faults` [{name, engine, began, ended}], `engine` "" where all are meant; `samples` {engine:
times of the agent's history}; `told` [{at, rule, engine, fingerprint, starts, firings, status, summary}] as the
webhook took them; `expected` [{rules, engine, began}] that a fault must have been told as; `slack` {texts,
refused}; `kills` [{at, kept}], the agent's, with the last sample before each that a new start still knew; `asked`
[{at, route}] changes that the agent answered, `audit` [{at, route}]; `usage` {process: [[at, bytes, descriptors,
threads, CPU seconds]]}; `pages` {view: console errors}; `watched` and `unwatched`, the names of two engines alike;
`engines` {name: {waited_ms, longest_ms, steps, died}}; `surprises` [text]; `scrapes` [[at, status, milliseconds]].
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

GAP_SECONDS = 3.0  # between samples a second apart, on a machine that also runs the load
BEFORE_SECONDS, AFTER_SECONDS = 2.0, 6.0  # that a fault's interval may reach beyond: sampled before, seen again after
KILL_SECONDS = 2.0 + 1.0  # docs/history.md promises two; a bucket of the answer is one wide
SLOPE_BYTES = 0.5e6  # a minute
SETTLED_SHARE = 1 / 3  # of a run that is warm-up
SHORTEST_SECONDS = 60.0  # after warm-up
JUDGED_SECONDS = 1200.0  # that memory must be seen for: each kind of fault costs some when it is met first
MORE_DESCRIPTORS, MORE_THREADS = 5, 3
CORES = {"agent": 0.5, "dashboard": 1.5}
WAITED_MS, MORE_WAITED = 100.0, 2.0  # on a full machine a thread may wait for another of its own that has no core
TOLD_SECONDS = 120.0
BLIND = ("agent killed", "clock stepped", "descriptors")  # faults in which a scrape may fail
UNKEPT = ("disk full",)  # faults in which an audit entry is in memory alone, as the agent's log says


@dataclass(frozen=True, slots=True)
class Line:
    """One bar. `value` and `bar` are for people; `met` is None where the run was too short to tell."""

    name: str
    value: str
    bar: str
    met: bool | None


def judge(record: Mapping[str, Any]) -> list[Line]:
    """Every line, in the order of docs/reliability.md."""
    return [
        *_alerts(record),
        _gaps(record),
        _kills(record),
        _audit(record),
        *_usage(record),
        _pages(record),
        *_engines(record),
        _scrapes(record),
    ]


def gaps(times: Iterable[float], began: float, ended: float) -> list[tuple[float, float]]:
    """Intervals between neighbouring samples, and to both ends, that are longer than GAP_SECONDS."""
    inside = [began, *sorted(one for one in times if began <= one <= ended), ended]
    return [(a, b) for a, b in pairwise(inside) if b - a > GAP_SECONDS]


def explained(gap: tuple[float, float], faults: Sequence[Mapping[str, Any]]) -> bool:
    """Do faults cover it? Those that touch count as one."""
    covered = float("-inf")
    for fault in sorted(faults, key=lambda one: float(one["began"])):
        began, ended = fault["began"] - BEFORE_SECONDS, fault["ended"] + AFTER_SECONDS
        if began <= max(covered, gap[0] + GAP_SECONDS):
            covered = max(covered, ended)
    return covered >= gap[1]


def slope_a_minute(samples: Sequence[Sequence[float]], column: int) -> float:
    """Of a line through (time, column) by least squares, in units a minute."""
    table = np.array(samples, np.float64)
    return float(np.polyfit(table[:, 0], table[:, column], 1)[0] * 60)


def _alerts(record: Mapping[str, Any]) -> Iterable[Line]:
    told = record["told"]
    missing = [
        one
        for one in record["expected"]
        if not any(
            alert["engine"] == one["engine"]
            and alert["rule"] in one["rules"]
            and one["began"] <= alert["at"] <= one["began"] + TOLD_SECONDS
            for alert in told
        )
    ]
    named = ", ".join(f"{'/'.join(one['rules'])} of {one['engine']} at {one['began']:.0f} s" for one in missing)
    expected = len(record["expected"])
    yield Line(
        "alerts of faults told",
        f"{expected - len(missing)} of {expected}" + (f"; not {named}" if named else ""),
        "all",
        expected > 0 and not missing,
    )
    last = {alert["fingerprint"]: alert for alert in told}
    left = sorted(f"{one['rule']} {one['engine']}" for one in last.values() if one["status"] != "resolved")
    told_of: dict[tuple[str, str], int] = {}
    for alert in told:  # one that is told again after a kill is the same one
        key = (alert["fingerprint"], alert["starts"])
        told_of[key] = max(told_of.get(key, 0), alert["firings"])
    episodes = sum(told_of.values())
    yield Line(
        "firings left without a resolve", f"{len(left)} of {episodes}" + _named(left), "0", bool(told) and not left
    )
    slack = record["slack"]
    texts = [_without_values(text) for text in slack["texts"]]
    summaries = {_without_values(alert["summary"]) for alert in told}
    lost = sorted(one for one in summaries if not any(one in text for text in texts))
    yield Line(
        "alerts that Slack has no message of; messages it refused",
        f"{len(lost)} of {len(summaries)}; {slack['refused']} of {len(texts)}" + _named(lost),
        "0; 0",
        not lost and not slack["refused"] and bool(texts),
    )


def _without_values(text: str) -> str:
    """What differs between two messages of one alert: numbers that stand alone or carry a unit, not those of names."""
    return re.sub(r"(?<![\w.-])[\d.,]+(?![\w-])", "#", text)


def _gaps(record: Mapping[str, Any]) -> Line:
    unexplained, count = [], 0
    for engine, times in record["samples"].items():
        faults = [one for one in record["faults"] if one["engine"] in ("", engine)]
        count += len(times)
        unexplained += [
            f"{engine} {gap[0]:.0f}-{gap[1]:.0f} s"
            for gap in gaps(times, record["watched_from"], record["seconds"])
            if not explained(gap, faults)
        ]
    value = f"{len(unexplained)} in {count} samples" + _named(unexplained)
    return Line(f"gaps over {GAP_SECONDS:g} s beside faults", value, "0", count > 0 and not unexplained)


def _kills(record: Mapping[str, Any]) -> Line:
    lost = [one["at"] - one["kept"] for one in record["kills"]]
    worst = max(lost, default=float("inf"))
    value = f"{worst:.1f} s at worst of {len(lost)} kills"
    return Line("history lost to a kill -9 of the agent", value, f"{KILL_SECONDS:g} s", worst <= KILL_SECONDS)


def _audit(record: Mapping[str, Any]) -> Line:
    unkept = [one for one in record["faults"] if one["name"] in UNKEPT]
    asked = [one for one in record["asked"] if not any(f["began"] - 2 <= one["at"] <= f["ended"] + 2 for f in unkept)]
    kept = Counter(one["route"] for one in record["audit"])
    wanted = Counter(one["route"] for one in asked)
    missing = {route: count - kept[route] for route, count in wanted.items() if kept[route] < count}
    value = f"{sum(missing.values())} of {len(asked)}" + _named([*missing])
    return Line("answered changes without an audit entry", value, "0", bool(asked) and not missing)


def _usage(record: Mapping[str, Any]) -> Iterable[Line]:
    for process, rows in record["usage"].items():
        settled = [row for row in rows if row[0] >= record["seconds"] * SETTLED_SHARE]
        span = settled[-1][0] - settled[0][0] if settled else 0.0
        if span < SHORTEST_SECONDS:
            yield Line(f"{process}: measured after warm-up", f"{span:.0f} s", f"{SHORTEST_SECONDS:g} s", False)
            continue
        yield _memory(process, settled, span)
        for what, column, more in (("descriptors", 2, MORE_DESCRIPTORS), ("threads", 3, MORE_THREADS)):
            sixth = max(1, len(settled) // 4)
            first, last = (
                float(np.median([row[column] for row in part])) for part in (settled[:sixth], settled[-sixth:])
            )
            value = f"{first:.0f} to {last:.0f}, {max(row[column] for row in settled):.0f} at most"
            yield Line(f"{process}: {what}", value, f"+{more} at most", last - first <= more)
        cores = (settled[-1][4] - settled[0][4]) / span
        bar = CORES[process]
        yield Line(f"{process}: CPU", f"{cores:.2f} cores", f"{bar:g}", cores <= bar)


def _memory(process: str, settled: Sequence[Sequence[float]], span: float) -> Line:
    slope, judged = slope_a_minute(settled, 1), span >= JUDGED_SECONDS
    value = f"{slope / 1e6:+.2f} MB/min, {settled[-1][1] / 1e6:.0f} MB"
    return Line(
        f"{process}: memory",
        value if judged else f"{value}, in {span / 60:.0f} of {JUDGED_SECONDS / 60:.0f} min",
        f"< {SLOPE_BYTES / 1e6:g} MB/min",
        slope < SLOPE_BYTES if judged else None,
    )


def _pages(record: Mapping[str, Any]) -> Line:
    errors = [f"{view}: {text}" for view, texts in record["pages"].items() for text in texts]
    value = f"{len(errors)} in {len(record['pages'])} pages" + _named(errors)
    return Line("console errors", value, "0", bool(record["pages"]) and not errors)


def _engines(record: Mapping[str, Any]) -> Iterable[Line]:
    watched, alone = (record["engines"][record[name]] for name in ("watched", "unwatched"))
    bar = max(WAITED_MS, MORE_WAITED * alone["waited_ms"])
    value = (
        f"{watched['waited_ms']:.0f} ms, unwatched {alone['waited_ms']:.0f} ms; longest of {watched['steps']:,} steps"
    )
    met = watched["steps"] > 0 < alone["steps"] and watched["waited_ms"] <= bar
    yield Line("longest wait of an engine within a step", value, f"{WAITED_MS:g} ms, or twice the unwatched one's", met)
    died = [f"{name}: {one['died']}" for name, one in record["engines"].items() if one["died"]]
    wrong = [*died, *record["surprises"]]
    yield Line("engines that ended by themselves, or unlike promised", f"{len(wrong)}" + _named(wrong), "0", not wrong)


def _scrapes(record: Mapping[str, Any]) -> Line:
    blind = [one for one in record["faults"] if one["name"] in BLIND]
    failed = [
        f"{at:.0f} s: {status}"
        for at, status, _ in record["scrapes"]
        if status != 200 and not any(f["began"] - BEFORE_SECONDS <= at <= f["ended"] + AFTER_SECONDS for f in blind)
    ]
    taken = sorted(one[2] for one in record["scrapes"] if one[1] == 200)
    median = taken[len(taken) // 2] if taken else float("inf")
    value = f"{len(failed)} of {len(record['scrapes'])}, median {median:.0f} ms" + _named(failed)
    return Line("scrapes that failed beside faults", value, "0", bool(taken) and not failed)


def _named(things: Sequence[str]) -> str:
    return f": {'; '.join(things[:5])}" if things else ""
