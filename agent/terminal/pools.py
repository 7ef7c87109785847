"""The table of pools, the worst first: one line for each, as much of it as the terminal is wide. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from agent import wire
from agent.terminal.reading import Look, about, told
from agent.terminal.words import Glyphs, count, rate, seconds, share

NARROWEST_NAME = 24
SOON_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One of the numbers; where the terminal is narrow, the last columns go first."""

    head: str
    width: int
    cell: Callable[[wire.EngineSummary, Look, Glyphs], Cell]


def pool_lines(look: Look, glyphs: Glyphs, width: int, rows: int | None) -> list[Text]:
    """A heading and at most `rows` lines, the chosen one among them."""
    columns = _columns(width)
    name_width = max(8, width - 2 - sum(1 + column.width for column in columns))
    ids = look.ids
    shown = _window(ids, look.chosen, len(ids) if rows is None else rows)
    some = f" ({len(shown)} of {len(ids)})" if len(shown) < len(ids) else ""
    head = Text("  " + glyphs.fit(f"pool{some}", name_width), style="bold underline")
    for column in columns:
        head.append(f" {column.head:>{column.width}}")
    lines = [head]
    by_id = {one.id: one for one in look.engines}
    unmapped = {one.id: one for one in look.listing.unmapped}
    for id in shown:
        here = id == look.chosen
        line = Text(f"{glyphs.chosen if here else ' '} ")
        line.append(glyphs.fit(id, name_width), "bold" if here else "")
        if id in by_id:
            for column in columns:
                cell = column.cell(by_id[id], look, glyphs)
                line.append(f" {cell.text[: column.width]:>{column.width}}", cell.style)
        else:
            line.append(" " + glyphs.fit(_unmapped(unmapped[id], glyphs), max(0, width - name_width - 3)))
        lines.append(line)
    return lines


def exhaustion(engine: wire.EngineSummary, glyphs: Glyphs) -> Cell:
    """What is nearest, in few words: sequences that wait now, the headroom, or the last block."""
    forecast = engine.forecast
    headroom = forecast.headroom_seconds if engine.headroom_blocks else None
    if engine.state != "live" or not forecast.known:
        return Cell("?" if engine.state == "live" else glyphs.dash)
    if forecast.admission_blocked:
        return Cell("waits now", "bold red")
    near = min((one for one in (forecast.exhaustion_seconds, headroom) if one is not None), default=None)
    if near is None:
        return Cell(glyphs.dash)
    return Cell("now" if near <= 0 else seconds(near), "yellow" if near < SOON_SECONDS else "")


def state_style(state: str) -> str:
    return {"live": "green", "sleeping": "blue"}.get(state, "bold red")


def alert_style(severity: str) -> str:
    return {"critical": "bold red", "warning": "yellow"}.get(severity, "")


def _alerts(engine: wire.EngineSummary, look: Look, glyphs: Glyphs) -> Cell:
    if look.alerts is None:
        return Cell("?")
    mine = [one for one in told(look.alerts) if one.state == "firing" and about(one, engine)]
    return Cell(count(len(mine)), alert_style(mine[0].severity)) if mine else Cell(glyphs.dash)


def _fragmentation(engine: wire.EngineSummary, look: Look, glyphs: Glyphs) -> Cell:
    value = engine.fragmentation.rate
    above = value is not None and value > look.listing.agent.threshold
    return Cell(rate(value, glyphs), "yellow" if above else "")


def _in_use(engine: wire.EngineSummary, look: Look, glyphs: Glyphs) -> Cell:
    if engine.state not in ("live", "stale", "stalled"):
        return Cell(glyphs.dash)
    return Cell(share(engine.blocks.used + engine.blocks.pinned, engine.usable_blocks, glyphs))


_ALL = (
    Column("state", 10, lambda engine, look, glyphs: Cell(engine.state, state_style(engine.state))),
    Column("F", 5, _fragmentation),
    Column("in use", 7, _in_use),
    Column("run/wait", 9, lambda one, look, glyphs: Cell(f"{one.running_requests}/{one.waiting_requests}")),
    Column("full in", 9, lambda engine, look, glyphs: exhaustion(engine, glyphs)),
    Column("alerts", 6, _alerts),
    Column("longest", 9, lambda one, look, glyphs: Cell(count(one.fragmentation.largest_allocatable_run))),
)


def _columns(width: int) -> Sequence[Column]:
    columns = list(_ALL)
    while len(columns) > 1 and width - 2 - sum(1 + column.width for column in columns) < NARROWEST_NAME:
        columns.pop()
    return columns


def _window(ids: Sequence[str], chosen: str | None, rows: int) -> Sequence[str]:
    """At most `rows` neighbours, from the worst on unless the chosen one is further down."""
    at = ids.index(chosen) if chosen in ids else 0
    start = max(0, min(at - rows + 1, len(ids) - rows)) if at >= rows else 0
    return ids[start : start + rows]


def _unmapped(engine: wire.UnmappedEngine, glyphs: Glyphs) -> str:
    usage = engine.metrics.values.get("kv_usage_ratio")
    told = f", KV usage {rate(usage, glyphs)}" if usage is not None else ""
    return f"{engine.state}, no block map{told}"
