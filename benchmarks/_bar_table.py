"""Holds results against the bars, and writes the one table of them, for a terminal and as Markdown. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, zip_longest
from textwrap import wrap
from typing import Any

from benchmarks._bars import Bar, NotMeasuredError, Reading

COLUMNS = (("what", 41), ("measured", 23), ("bar", 18), ("against", 21), ("result", 7))
LINE = 120  # columns of a terminal, at most
MOST_DECIMALS = 6
UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)  # a JSON that is not as it should be


class Outcome(Enum):
    """What became of a bar; the value is the word in the table."""

    MET = "met"
    MISSED = "misses"
    NOT_RUN = "not run"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Row:
    """One bar beside what was measured, as text."""

    benchmark: str
    what: str
    measured: str
    bar: str
    against: str
    outcome: Outcome


def judge(bars: Iterable[Bar], results: Mapping[str, Any]) -> list[Row]:
    """One row a bar, in their order. `results` is what results.json holds: a benchmark's JSON under its name."""
    return [_row(bar, results) for bar in bars]


def _row(bar: Bar, results: Mapping[str, Any]) -> Row:
    def row(measured: str, outcome: Outcome, limit: str = "") -> Row:
        return Row(bar.benchmark, bar.what, measured, limit or _limit_text(bar, bar.limit), bar.against, outcome)

    if bar.benchmark not in results:
        if bar.benchmark in results.get("failed", ()):
            return row("it failed, without a result", Outcome.ERROR)
        if bar.benchmark in results.get("ran", ()):
            return row("it wrote no result", Outcome.ERROR)
        return row("", Outcome.NOT_RUN)
    result = results[bar.benchmark]
    try:
        found = bar.read(result)
        limit = bar.limit if bar.limit_of is None else bar.limit_of(result)
    except NotMeasuredError as error:
        return row(str(error), Outcome.NOT_RUN)
    except UNREADABLE as error:
        return row(f"no value: {type(error).__name__} {error}", Outcome.ERROR)
    if not isinstance(found, Reading):
        return row(found.text, Outcome.MET if found.met else Outcome.MISSED)
    if limit is None or math.isnan(found.value):
        return row(f"no value: {found.value}", Outcome.ERROR)
    met = _meets(found.value, limit, at_least=bar.at_least)
    text = _value_text(found.value, limit, bar)
    return row(
        f"{text} ({found.note})" if found.note else text,
        Outcome.MET if met else Outcome.MISSED,
        _limit_text(bar, limit),
    )


def _meets(value: float, limit: float, *, at_least: bool) -> bool:
    return value >= limit if at_least else value <= limit


def _value_text(value: float, limit: float, bar: Bar) -> str:
    """With as few decimals as tell on which side of its bar it lies."""
    if not math.isfinite(value):
        return f"{value}"
    if value == int(value):
        return _with_unit(f"{value:,.0f}", bar)
    met = _meets(value, limit, at_least=bar.at_least)
    size = max(abs(value), abs(limit))
    least = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 else 3
    for decimals in range(least, MOST_DECIMALS + 1):
        if _meets(round(value, decimals), limit, at_least=bar.at_least) == met:
            break
    return _with_unit(f"{value:,.{decimals}f}", bar)


def _limit_text(bar: Bar, limit: float | None) -> str:
    if limit is None:
        return bar.words
    text = f"{limit:g}" if limit < 1000 else f"{limit:,.0f}"
    return f"at {'least' if bar.at_least else 'most'} {_with_unit(text, bar)}"


def _with_unit(text: str, bar: Bar) -> str:
    return f"{text} {bar.unit}" if bar.unit else text


def machine_line(machine: Mapping[str, Any]) -> str:
    """What the figures were measured on, in one line."""

    def fact(name: str) -> str:
        return str(machine.get(name, "unknown"))

    load = machine.get("load_average_before")
    before = f"{load:.1f}" if isinstance(load, int | float) else "unknown"
    return (
        f"{fact('cpu')}, {fact('cores')} cores, Linux {fact('kernel')}, Python {fact('python')}, "
        f"load average {before} before"
    )


def summary(rows: Sequence[Row]) -> str:
    """How many bars came out how."""
    counts = {outcome: sum(row.outcome is outcome for row in rows) for outcome in Outcome}
    return (
        f"{len(rows)} bars: {counts[Outcome.MET]} met, {counts[Outcome.MISSED]} missed, "
        f"{counts[Outcome.NOT_RUN]} not run, {counts[Outcome.ERROR]} without a readable value"
    )


def as_text(rows: Sequence[Row], machine: Mapping[str, Any], how_to_run: Mapping[str, str]) -> str:
    """The machine, the table by benchmark, and the counts. `how_to_run` is shown for benchmarks that were not."""
    lines = [*wrap(machine_line(machine), LINE), "", *_cells([name for name, _ in COLUMNS])]
    for benchmark, group in groupby(rows, key=lambda row: row.benchmark):
        own = list(group)
        not_run = all(row.outcome is Outcome.NOT_RUN and not row.measured for row in own)
        lines.append(benchmark + (f"  (not run: {how_to_run[benchmark]})" if not_run else ""))
        for row in own:
            lines += _cells([row.what, row.measured, row.bar, row.against, row.outcome.value])
    return "\n".join([*lines, "", summary(rows)])


def _cells(texts: Sequence[str]) -> list[str]:
    """The lines of one row; what is too long for its column goes on below."""
    columns = [wrap(text, width) for text, (_, width) in zip(texts, COLUMNS, strict=True)]
    return [
        "  " + "  ".join(f"{part:<{width}}" for part, (_, width) in zip(parts, COLUMNS, strict=True)).rstrip()
        for parts in zip_longest(*columns, fillvalue="")
    ]


def as_markdown(rows: Sequence[Row], machine: Mapping[str, Any], how_to_run: Mapping[str, str]) -> str:
    """The same; a benchmark that was not run says how to run it where its value would be."""
    lines = [
        machine_line(machine),
        "",
        "| benchmark | what | measured | bar | against | result |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        missing = row.outcome is Outcome.NOT_RUN and not row.measured
        command, comma, more = how_to_run[row.benchmark].partition(",")
        measured = f"`{command}`{comma}{more}" if missing else row.measured
        cells = (row.benchmark, row.what, measured, row.bar, row.against, row.outcome.value)
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return "\n".join([*lines, "", f"{summary(rows)}."]) + "\n"
