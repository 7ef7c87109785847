"""Black boxes in the words of the page. Pure; whatever comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.wire import BlockCounts, MapCells
from agent.wire.blackbox import BlackBox, BoxSummary
from dashboard import widgets
from dashboard.palette import Theme
from dashboard.past import counts_html, moment
from dashboard.wording import NOT_KNOWN, count, counted, duration, escape, rate, shortened, size

REQUESTS_SHOWN = 8


def row_of(box: BoxSummary) -> dict[str, Any]:
    """One line of the list."""
    return {
        "ended (UTC)": moment(box.ended_unix).removesuffix(" UTC"),
        "pool": box.id,
        "how": how_it_ended(box),
        "reason": box.reason,
        "model": box.model,
        "size": size(box.size_bytes),
        "left out": "; ".join(box.left_out),
    }


def how_it_ended(box: BoxSummary) -> str:
    if box.in_good_order:
        return "in good order"
    return {"replaced": "replaced by a new start", "unreadable": "died while it published"}.get(box.state, "died")


def ended_text(box: BoxSummary) -> str:
    """One line: when, how, and why as far as the agent knows."""
    return f"{how_it_ended(box)} at {moment(box.ended_unix)} · {box.reason}"


def facts_html(box: BlackBox) -> str:
    """What it was and had done, in pairs."""
    facts = box.facts
    engine: Mapping[str, Any] = facts.get("engine") or {}
    counters: Mapping[str, Any] = facts.get("counters") or {}
    blocks = f"{count(engine.get('total_blocks'))} × {counted(engine.get('block_tokens'), 'token')}"
    pairs = [
        ("engine", f"{engine.get('kind', '')} {engine.get('version', '')}".strip()),
        ("model", box.summary.model),
        ("policy", str(engine.get("policy") or NOT_KNOWN)),
        ("process", f"pid {engine.get('pid', NOT_KNOWN)}"),
        ("blocks", blocks),
        ("requests", f"{count(facts.get('running_requests'))} running, {count(facts.get('waiting_requests'))} waiting"),
        ("start", box.summary.incarnation),
        ("allocated", counted(counters.get("blocks_allocated"), "block")),
        ("evicted", counted(counters.get("blocks_evicted"), "block")),
        ("failed allocations", count(counters.get("allocation_failures"))),
    ]
    if box.summary.left_out:
        pairs.append(("left out", "; ".join(box.summary.left_out)))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in pairs)
    return f'<dl class="kv-facts">{cells}</dl>'


def cells_of(box: BlackBox) -> MapCells | None:
    """For the block map; None where the box has no map."""
    if box.map is None:
        return None
    return MapCells(
        id=box.summary.id,
        sequence=int(box.facts.get("sequence") or 0),
        snapshot_age_seconds=0.0,
        total_blocks=box.map.total_blocks,
        blocks_per_cell=box.map.blocks_per_cell,
        cells=box.map.cells,
        state=box.map.state,
        counts=box.map.counts,
        references=None,
        age_seconds=None,
        owner=[0] * box.map.cells,
        owners=["not told by a black box"],
    )


def map_numbers_html(box: BlackBox, theme: Theme) -> str:
    """The legend with counts, and fragmentation."""
    if box.map is None:
        return ""
    counts = BlockCounts(
        **{
            name: sum(box.map.counts.get(name, []))
            for name in ("free", "cached", "used", "pinned", "reserved", "unknown")
        }
    )
    f = box.map.fragmentation
    longest = counted(f.largest_allocatable_run, "block")
    words = f"F {rate(f.rate)} · free alone {rate(f.strict_rate)} · largest run {longest}"
    return (
        widgets.heading_html("Blocks at the end")
        + counts_html(counts, box.map.total_blocks, theme)
        + widgets.note_html(words)
    )


def requests_html(box: BlackBox) -> str:
    """Who held most. Ids are hashed in the box; the hash of a known id can be looked for."""
    head = widgets.heading_html("Who held it", "ids are hashed")
    if not box.requests:
        return head + widgets.note_html("No sequence was live.")
    rows = "".join(
        f'<tr><td title="{escape(one.request_id)}">{escape(shortened(one.request_id, 18))}</td>'
        f"<td>{count(one.blocks)}</td><td>{count(one.tokens)}</td><td>{duration(one.age_seconds)}</td></tr>"
        for one in box.requests[:REQUESTS_SHOWN]
    )
    titles = "<tr><th>request</th><th>blocks</th><th>tokens</th><th>age</th></tr>"
    more = box.requests_total - len(box.requests[:REQUESTS_SHOWN])
    rest = widgets.note_html(f"and {count(more)} more") if more > 0 else ""
    return f'{head}<table class="kv-table">{titles}{rows}</table>{rest}'


def event_rows(box: BlackBox) -> list[dict[str, Any]]:
    """Newest first; times relative to the end of the engine, in seconds."""
    return [
        {
            "before its end (s)": round(box.summary.ended_unix - event.time_unix, 3),
            "what": event.kind,
            "block": event.block,
            "blocks": event.count,
            "owner": event.owner,
            "other": event.other,
        }
        for event in reversed(box.events)
    ]


def seen_from(box: BlackBox) -> float | None:
    """When the first bucket begins in which anything was sampled; None where nothing was."""
    used = box.history.columns.get("used") or []
    sampled = (at for at, row in zip(box.history.start_unix, used, strict=False) if row[1] is not None)
    return next(sampled, None)
