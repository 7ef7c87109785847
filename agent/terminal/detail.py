"""The chosen pool: its blocks as a bar, its numbers, and who holds most of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from agent import wire
from agent.terminal.bar import STRIPES, rows_of, states_of
from agent.terminal.pools import exhaustion, state_style
from agent.terminal.reading import MEANINGFUL, TREND_SECONDS, Look
from agent.terminal.words import STATE_ORDER, STYLES, Glyphs, count, fold, rate, seconds, share, size

STEADY = 0.02  # a change of F within a trend that is none


@dataclass(frozen=True, slots=True)
class Detail:
    """Lines that are all needed, and those of holders, of which a small screen shows fewer."""

    lines: list[Text]
    holders: list[Text]
    holders_head: Text | None


def detail(look: Look, glyphs: Glyphs, width: int) -> Detail:
    """What there is to say of what is chosen; of what is not known, why."""
    engine, unmapped = look.engine, look.unmapped
    if engine is not None:
        return _pool(engine, look, glyphs, width)
    if unmapped is not None:
        return Detail(_folded(_unmapped(unmapped, glyphs), width), [], None)
    if look.chosen is not None:
        what = f"{glyphs.plain(look.chosen)} is not listed: its engine ended, or its map was removed. Choose another."
        return Detail(fold(Text(what, "yellow"), width), [], None)
    folders = glyphs.plain(", ".join(look.listing.agent.folders)) or "no folder"
    what = f"No engine found. The agent looks for allocation maps in {folders}."
    todo = "Start an engine with the shim, as the same user and with the same KVATLAS_DIR; kvatlas doctor checks."
    return Detail(_folded([Text(what), Text(todo)], width), [], None)


def _pool(engine: wire.EngineSummary, look: Look, glyphs: Glyphs, width: int) -> Detail:
    name = glyphs.fit(engine.id, max(8, min(cell_len(glyphs.plain(engine.id)), width - 12)))
    head = Text.assemble((name, "bold"), (f"  {engine.state}", state_style(engine.state)))
    if engine.degraded:
        head.append("  degraded: its shim has stopped following the pool", "bold red")
    elif engine.reason:
        head.append(f": {glyphs.plain(engine.reason)}")
    dot = f" {glyphs.dot} "
    parts = (
        f"{engine.kind} {engine.version}".strip(),
        engine.model,
        f"policy {engine.policy}" if engine.policy else "",
        f"{count(engine.total_blocks)} blocks x {engine.block_tokens} tokens x {size(engine.block_bytes)}",
    )
    about = Text(dot.join(glyphs.plain(part) for part in parts if part), "dim")
    lines = _folded([head, about], width)
    if engine.state not in MEANINGFUL:
        lines.append(Text(f"No blocks are shown: the engine is {engine.state}."))
        return Detail(lines, [], None)
    if look.cells is not None:
        lines += _bar(look.cells, glyphs, width)
    lines += _legend(engine, look.cells, glyphs, width)
    lines += _folded(_numbers(engine, look, glyphs), width)
    missing = {part: why for part, why in look.missing.items() if part != "alerts"}  # those have a line of their own
    lines += _folded((Text(f"no {part}: {glyphs.plain(why)}", "yellow") for part, why in missing.items()), width)
    rows, shown_head = _holders(engine, look.requests, glyphs, width)
    return Detail(lines, rows, shown_head)


def bar_columns(width: int) -> int:
    """Columns of a row of the bar: whole cells."""
    return max(STRIPES, width // STRIPES * STRIPES)


def _bar(cells: wire.MapCells, glyphs: Glyphs, width: int) -> Iterator[Text]:
    for row in rows_of(states_of(cells), bar_columns(width)):
        line = Text()
        for state, same in groupby(row):
            line.append(glyphs.states[state] * len(list(same)), STYLES[state])
        yield line


def _legend(engine: wire.EngineSummary, cells: wire.MapCells | None, glyphs: Glyphs, width: int) -> list[Text]:
    parts = []
    for state in STATE_ORDER:
        blocks = getattr(engine.blocks, state)
        if blocks or state in ("used", "cached", "free"):
            amount = f" {state} {count(blocks)} ({share(blocks, engine.total_blocks, glyphs)})"
            parts.append(Text.assemble((glyphs.states[state], STYLES[state]), amount))
    if cells is not None and cells.blocks_per_cell > 1:
        parts.append(Text(f"{count(cells.blocks_per_cell)} blocks in {STRIPES} columns, each state there at least one"))
    elif cells is not None:
        parts.append(Text("one block a column"))
    return flow(parts, width, gap="  ")


def _numbers(engine: wire.EngineSummary, look: Look, glyphs: Glyphs) -> Iterator[Text]:
    fragmentation, limit = engine.fragmentation, look.listing.agent.threshold
    above = fragmentation.rate is not None and fragmentation.rate > limit
    line = Text("F ")
    line.append(rate(fragmentation.rate, glyphs), "bold yellow" if above else "bold")
    line.append(f" {'above' if above else 'limit'} {limit:.2f}, free alone {rate(fragmentation.strict_rate, glyphs)}")
    yield line
    if look.trend is not None:
        yield Text(f"F of the last {seconds(TREND_SECONDS)} {trend(look.trend, glyphs)}")
    run, allocatable = fragmentation.largest_allocatable_run, engine.blocks.free + engine.blocks.cached
    yield Text(
        f"longest run {count(run)} ({size(run * engine.block_bytes)}) of {count(allocatable)} allocatable"
        f" in {count(fragmentation.allocatable_runs)} runs, headroom {count(engine.headroom_blocks)}"
    )
    waiting = Text(f"{count(engine.running_requests)} running, {count(engine.waiting_requests)} waiting")
    if engine.forecast.queue_grows:
        waiting.append(" and ever more", "yellow")
    if engine.tail_waste_bytes is not None:
        waiting.append(f"   tail waste {size(engine.tail_waste_bytes)}")
    waiting.append(f"   snapshot {seconds(engine.snapshot_age_seconds)} old")
    yield waiting
    yield _exhaustion(engine, glyphs)


def _exhaustion(engine: wire.EngineSummary, glyphs: Glyphs) -> Text:
    forecast, cell = engine.forecast, exhaustion(engine, glyphs)
    line = Text("pool full: " if cell.text in (glyphs.dash, "?", "now", "waits now") else "pool full in ")
    line.append("not in sight" if cell.text == glyphs.dash else cell.text, cell.style or "bold")
    why = forecast.admission_reason if forecast.admission_blocked else forecast.reason
    line.append(f" ({glyphs.plain(why)})" if why else "")
    return line


def trend(history: wire.History, glyphs: Glyphs) -> str:
    """A sparkline from 0 to 1, the range, and whether it rises."""
    means = [point.mean for point in history.points]
    known = [mean for mean in means if mean is not None]
    if not known:
        return glyphs.dash
    steps = len(glyphs.levels)
    line = "".join(
        glyphs.undefined if mean is None else glyphs.levels[min(steps - 1, int(max(0.0, mean) * steps))]
        for mean in means
    )
    change = known[-1] - known[0]
    word = "steady" if abs(change) < STEADY else "rising" if change > 0 else "falling"
    return f"{line.strip()} {min(known):.3f} to {max(known):.3f}, {word}"


def _holders(
    engine: wire.EngineSummary, page: wire.RequestPage | None, glyphs: Glyphs, width: int
) -> tuple[list[Text], Text | None]:
    if page is None:
        return [], None
    held = [one for one in page.requests if one.blocks]
    if not held:
        return [Text("No sequence is known to hold a block.", "dim")], None
    columns = (("blocks", 9), ("runs", 6), ("tokens", 9), ("size", 9), ("age", 10))
    name = max(12, width - sum(1 + wide for _, wide in columns))
    number = "1 sequence" if page.total == 1 else f"{count(page.total)} sequences"
    head = Text(glyphs.fit(f"holders: {number}", name), "bold underline")
    head.append("".join(f" {label:>{wide}}" for label, wide in columns))
    rows = []
    for one in held:
        cells: Sequence[str] = (
            count(one.blocks),
            glyphs.dash if one.runs is None else count(one.runs),
            count(one.tokens),
            size(one.blocks * engine.block_bytes),
            seconds(one.age_seconds),
        )
        shown = "".join(f" {cell:>{wide}}" for cell, (_, wide) in zip(cells, columns, strict=True))
        rows.append(Text(glyphs.fit(one.request_id, name) + shown))
    return rows, head


def _unmapped(engine: wire.UnmappedEngine, glyphs: Glyphs) -> Iterator[Text]:
    why = f": {glyphs.plain(engine.reason)}" if engine.reason else ""
    yield Text.assemble((glyphs.plain(engine.id), "bold"), (f"  {engine.state}", state_style(engine.state)), why)
    yield Text("No block map: this is what the engine says of itself. Run the shim in it to see its blocks.")
    yield Text(f"{glyphs.plain(engine.metrics.source)}, read {seconds(engine.metrics.age_seconds)} ago", "dim")
    for name, value in engine.metrics.values.items():
        yield Text(f"  {glyphs.plain(name)} {value:,.3f}".removesuffix(".000"))


def _folded(lines: Iterable[Text], width: int) -> list[Text]:
    return [part for line in lines for part in fold(line, width)]


def flow(parts: Sequence[Text], width: int, gap: str) -> list[Text]:
    """Parts one behind the other, on as many lines as they take."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1].append(gap).append_text(part)
        else:
            lines.append(part.copy())
    return lines
