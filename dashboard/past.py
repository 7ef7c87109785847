"""Frames and instants of the past in the words of the page. Pure."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from agent.wire import BlockCounts, MapCells
from agent.wire.history import FrameCells, FrameTimes
from dashboard.palette import STATE_MEANINGS, Theme
from dashboard.timeline import Line
from dashboard.widgets import Tile, tiles_html
from dashboard.wording import count, counted, duration, escape, rate, share

KEEP_A_PAST = (
    "Start the agent with KVATLAS_STATE_DIR naming a folder, and frames, marks and black boxes are kept from then on."
)


def before(instants: Sequence[float], at: float) -> float | None:
    """The last of `instants`, which rise, before `at`."""
    index = bisect_left(instants, at)
    return instants[index - 1] if index else None


def after(instants: Sequence[float], at: float) -> float | None:
    """The first of them after `at`."""
    index = bisect_right(instants, at)
    return instants[index] if index < len(instants) else None


def at_or_before(instants: Sequence[float], at: float) -> float | None:
    """The last of them that is not after `at`."""
    index = bisect_right(instants, at)
    return instants[index - 1] if index else None


def moment(time_unix: float) -> str:
    """2026-11-30 02:05:09 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_unix))


def moments(instants: Sequence[float]) -> list[str]:
    """One label for each, all different: the time of day, with the day where they are of several."""
    days = {int(one // 86_400) for one in instants}
    labels = [time.strftime("%H:%M:%S" if len(days) < 2 else "%d %b %H:%M:%S", time.gmtime(one)) for one in instants]
    if len(set(labels)) < len(labels):  # of one second, or a year apart
        return [
            f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(one))}.{round(one % 1 * 1000):03d}" for one in instants
        ]
    return labels


def instants_note(times: FrameTimes, live: bool) -> str:
    """How many instants the scrubber has, and what it leaves out."""
    kept = f"{counted(times.total, 'frame is', 'frames are')} kept of this range"
    if times.step_seconds:
        which = f"{kept}; the last one of each {duration(times.step_seconds)} can be chosen."
    else:
        which = f"{kept}, and can be chosen." if times.total == 1 else f"{kept}, each of them can be chosen."
    return f"{which} {'Live: the newest one is shown.' if live else 'Arrow keys go from one to the next.'}"


def frame_note(frame: FrameCells) -> str:
    """How near the frame is to what was asked for, and whose it is."""
    apart = f"frames of that time are {duration(float(frame.resolution_seconds))} apart"
    if frame.age_seconds > 2 * frame.resolution_seconds:
        return (
            f"No frame was kept for {duration(frame.age_seconds)} before the instant that was asked for: the agent or"
            " the engine did not run then. This is the last one before it;"
            f" {apart}. Start {frame.incarnation} of the engine."
        )
    return (
        f"A frame holds states alone: who owned a block is not kept; {apart}. Start {frame.incarnation} of the engine."
    )


def cells_of(frame: FrameCells) -> MapCells:
    """For the block map, which a frame is a part of."""
    return MapCells(
        id=frame.id,
        sequence=frame.sequence,
        snapshot_age_seconds=frame.age_seconds,
        total_blocks=frame.total_blocks,
        blocks_per_cell=frame.blocks_per_cell,
        cells=frame.cells,
        state=frame.state,
        counts=frame.counts,
        references=None,
        age_seconds=None,
        owner=[0] * frame.cells,
        owners=["not kept"],
    )


def tiles_of(frame: FrameCells) -> list[Tile]:
    """The headline numbers that a frame holds."""
    fragmentation, blocks = frame.fragmentation, frame.blocks
    if fragmentation is None or blocks is None:
        return []
    usable = frame.total_blocks - blocks.reserved
    allocatable = blocks.free + blocks.cached
    return [
        Tile("Fragmentation F", rate(fragmentation.rate), "free + cached", "1 - largest run / all allocatable blocks."),
        Tile("F, free alone", rate(fragmentation.strict_rate), "cached taken", "The same over free blocks."),
        Tile(
            "Largest run",
            count(fragmentation.largest_allocatable_run),
            f"of {count(allocatable)} allocatable",
            "Longest run of free or cached blocks.",
        ),
        Tile(
            "Live share",
            share(blocks.used + blocks.pinned, usable),
            "used + pinned",
            "Used and pinned blocks of all but the reserved ones.",
        ),
    ]


def few_tiles_html(tiles: Sequence[Tile]) -> str:
    """For a narrow column: two in a row."""
    return f'<div class="kv-few">{tiles_html(tiles)}</div>'


def states_html(frame: FrameCells, theme: Theme) -> str:
    """The legend of the map, with the blocks of each state at that instant."""
    return counts_html(frame.blocks, frame.total_blocks, theme) if frame.blocks is not None else ""


def counts_html(blocks: BlockCounts, total: int, theme: Theme) -> str:
    rows = "".join(
        f'<tr title="{escape(STATE_MEANINGS[name][1])}"><td><i style="background:{theme.states[name]}"></i>{name}'
        f"<small>{escape(STATE_MEANINGS[name][0])}</small></td>"
        f"<td>{count(held)}</td><td>{share(held, total)}</td></tr>"
        for name in ("used", "cached", "free", "pinned", "reserved", "unknown")
        if (held := getattr(blocks, name)) or name != "unknown"
    )
    whole = f"<tr class='kv-total'><td>pool</td><td>{count(total)}</td><td>{share(total, total)}</td></tr>"
    head = "<tr><th>state</th><th>blocks</th><th>share</th></tr>"
    return f'<table class="kv-table kv-states">{head}{rows}{whole}</table>'


def rows_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """What the figure of metrics shows, one row for each bucket of each line."""
    return [
        {
            "metric": line.metric.name,
            "time_unix": float(at) / 1000,
            "minimum": _number(line.low[index]) if line.low is not None else None,
            "mean": _number(line.mean[index]),
            "maximum": _number(line.high[index]) if line.high is not None else None,
        }
        for line in lines
        for index, at in enumerate(line.times_ms.tolist())
    ]


def _number(value: Any) -> float | None:
    return None if value != value else float(value)  # NaN alone differs from itself
