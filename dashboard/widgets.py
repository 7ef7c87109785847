"""Small pieces of the page as HTML text. Whatever comes from outside is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.wire import EngineSummary, Request, RequestPage
from dashboard.choices import as_choice
from dashboard.palette import STATE_MEANINGS, Theme
from dashboard.wording import NOT_KNOWN, count, counted, duration, escape, power_of_two, rate, share, shortened, size

HOLDERS_SHOWN = 8
SOON_SECONDS = 60.0  # a forecast below this is coloured


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number. `tone` colours the value: "bad" is above its threshold, "alarm" hurts somebody now.

    `detail_tone` does the same for the detail.
    """

    label: str
    value: str
    detail: str
    help: str
    tone: str = ""
    detail_tone: str = ""


def tiles_of(engine: EngineSummary, threshold: float) -> list[Tile]:
    """The headline numbers of one pool. Absolute sizes stand beside every rate."""
    fragmentation, bytes_each = engine.fragmentation, engine.block_bytes
    allocatable = engine.blocks.free + engine.blocks.cached
    above = fragmentation.rate is not None and fragmentation.rate > threshold
    run = fragmentation.largest_allocatable_run
    waste = engine.tail_waste_tokens
    held_slots = (engine.blocks.used + engine.blocks.pinned) * engine.block_tokens
    return [
        Tile(
            "Fragmentation F",
            rate(fragmentation.rate),
            f"free + cached · {'above' if above else 'limit'} {threshold:.2f}",
            "1 - largest run / all allocatable blocks (free + cached). 0: one run; near 1: scattered.",
            "bad" if above else "",
        ),
        Tile(
            "F, free alone",
            rate(fragmentation.strict_rate),
            f"largest free run {count(fragmentation.largest_free_run)}",
            "1 - largest run of free blocks / all free blocks; cached blocks count as taken.",
        ),
        Tile(
            "Largest run",
            counted(run, "block"),
            f"{counted(run * engine.block_tokens, 'token')} · {size(run * bytes_each)}",
            "Longest run of consecutive free or cached blocks.",
        ),
        Tile(
            "Allocatable",
            counted(allocatable, "block"),
            f"{share(allocatable, engine.usable_blocks)} · {size(allocatable * bytes_each)}"
            f" · headroom {count(engine.headroom_blocks)}",
            "Free + cached blocks. The headroom is the last of them: running sequences may take it, new ones may not.",
        ),
        Tile(
            "Tail waste",
            size(engine.tail_waste_bytes),
            f"{counted(waste, 'slot')} · {share(waste, held_slots)} of held" if waste is not None else "not in the map",
            "Token slots of used blocks that hold no token: the last block of each sequence is rarely full.",
        ),
        _exhaustion(engine),
        _requests(engine),
        Tile(
            "Snapshot age",
            duration(engine.snapshot_age_seconds),
            f"heartbeat {duration(engine.heartbeat_age_seconds)} · step {duration(engine.last_step_age_seconds)}",
            "How old the map on this page is; since the engine's last heartbeat and its last step.",
            "" if engine.state == "live" else "bad",
        ),
    ]


def _exhaustion(engine: EngineSummary) -> Tile:
    """What is nearest: new sequences that wait now, the headroom, or the last block."""
    forecast, help = engine.forecast, "When no block is left, or only the headroom, if the present trend goes on."
    seconds = forecast.exhaustion_seconds
    headroom = forecast.headroom_seconds if engine.headroom_blocks else None  # without one, the same moment twice
    if engine.state != "live" or not forecast.known:
        reason = forecast.reason if engine.state == "live" else f"the engine is {engine.state}"
        return Tile("Exhaustion", NOT_KNOWN, reason, help)
    if forecast.admission_blocked:
        return Tile("Exhaustion", "now: new sequences wait", forecast.admission_reason, help, "alarm")
    reached = headroom is not None and headroom <= 0
    before = "headroom reached · " if reached else f"headroom in {duration(headroom)} · " if headroom else ""
    near = min((each for each in (seconds, headroom) if each is not None), default=SOON_SECONDS) < SOON_SECONDS
    value = "not in sight" if seconds is None else f"in {duration(seconds)}" if seconds > 0 else "now"
    if seconds is None and reached:
        value, before = "headroom reached", "a new sequence would wait · "
    return Tile("Exhaustion", value, before + forecast.reason, help, "bad" if near else "")


def _requests(engine: EngineSummary) -> Tile:
    waiting, grows = f"{count(engine.waiting_requests)} waiting", engine.forecast.queue_grows
    return Tile(
        "Requests",
        f"{count(engine.running_requests)} running",
        f"{waiting}, and ever more" if grows else waiting,
        "As the engine reported with its last step.",
        detail_tone="alarm" if engine.forecast.admission_blocked else "bad" if grows else "",
    )


def tiles_html(tiles: Sequence[Tile]) -> str:
    body = "".join(
        f'<div class="kv-tile" title="{escape(tile.help)}"><div class="kv-label">{escape(tile.label)}</div>'
        f'<div class="kv-value {escape(tile.tone)}">{escape(tile.value)}</div>'
        f'<div class="kv-detail {escape(tile.detail_tone)}" title="{escape(tile.detail)}">{escape(tile.detail)}</div>'
        "</div>"
        for tile in tiles
    )
    return f'<div class="kv-tiles">{body}</div>'


def states_html(engine: EngineSummary, theme: Theme) -> str:
    """The legend of the map, which is also its account: blocks, share of the pool, tokens and bytes by state."""
    counts = engine.blocks
    named = [(name, getattr(counts, name)) for name in ("used", "cached", "free", "pinned", "reserved")]
    if counts.unknown:
        named.append(("unknown", counts.unknown))
    words = {name: meaning[0] for name, meaning in STATE_MEANINGS.items()}
    if engine.oldest_pinned_seconds is not None:
        words["pinned"] = f"oldest {duration(engine.oldest_pinned_seconds)}"
    rows = "".join(
        f'<tr title="{escape(STATE_MEANINGS[name][1])}"><td><i style="background:{theme.states[name]}"></i>{name}'
        f"<small>{escape(words[name])}</small></td>{_amounts(blocks, engine)}</tr>"
        for name, blocks in named
    )
    total = f"<tr class='kv-total'><td>pool</td>{_amounts(engine.total_blocks, engine)}</tr>"
    head = "<tr><th>state</th><th>blocks</th><th>share</th><th>tokens</th><th>size</th></tr>"
    return f'<table class="kv-table kv-states">{head}{rows}{total}</table>'


def _amounts(blocks: int, engine: EngineSummary) -> str:
    cells = (
        count(blocks),
        share(blocks, engine.total_blocks),
        count(blocks * engine.block_tokens),
        size(blocks * engine.block_bytes),
    )
    return "".join(f"<td>{cell}</td>" for cell in cells)


def runs_html(histogram: Sequence[int]) -> str:
    """How long the allocatable runs are: one bar for each power of two, as high as its number of runs."""
    if not any(histogram):
        return note_html("No allocatable run.")
    titles = [f"{counted(runs, 'run')} of {_lengths(2**i)}" for i, runs in enumerate(histogram)]
    return bars_html(histogram, [power_of_two(2**i) for i in range(len(histogram))], titles)


def _lengths(shortest: int) -> str:
    """Of the bar of a power of two, up to the next one."""
    return counted(1, "block") if shortest == 1 else f"{count(shortest)} to {counted(2 * shortest - 1, 'block')}"


def bars_html(heights: Sequence[int], labels: Sequence[str], titles: Sequence[str], *, numbers: bool = True) -> str:
    """Bars beside each other, with their numbers above where there is room for those. A title shows on hover."""
    highest = max(heights, default=0)
    bars = "".join(
        _bar(title, count(height) if height and numbers else "", height / highest if highest else 0.0, label)
        for height, label, title in zip(heights, labels, titles, strict=True)
    )
    return f'<div class="kv-runs">{bars}</div>'


def _bar(title: str, number: str, height: float, label: str) -> str:
    percent = max(round(100 * height), 2) if height else 0  # a single one among thousands must still be seen
    bar = f'<b>{number}</b><i style="height:{percent}%"></i><span>{escape(label)}</span>'
    return f'<div title="{escape(title)}">{bar}</div>'


def holders_html(page: RequestPage, engine_block_bytes: int, chosen: str | None = None) -> str:
    """The sequences that hold most blocks. Each is a choice; the one that is chosen is marked, and can be given up."""
    holders = [request for request in page.requests if request.blocks][:HOLDERS_SHOWN]
    give_up = '<button class="kv-choice kv-give-up" data-choice="">Show the blocks of all</button>' if chosen else ""
    if not holders:
        return give_up + note_html("No sequence holds a block.")
    rows = "".join(_holder(request, engine_block_bytes, chosen) for request in holders)
    head = "<tr><th>request</th><th>blocks</th><th>runs</th><th>tokens</th><th>size</th><th>age</th></tr>"
    more = page.total - len(holders)
    rest = note_html(f"of {counted(page.total, 'sequence')}") if more > 0 else ""
    return f'<table class="kv-table kv-holders">{head}{rows}</table>{rest}{give_up}'


def _holder(request: Request, block_bytes: int, chosen: str | None) -> str:
    name, is_chosen = escape(request.request_id), request.request_id == chosen
    value = "" if is_chosen else as_choice(request.request_id)  # chosen once more, it is given up
    return (
        f'<tr data-choice="{value}" class="{"kv-chosen" if is_chosen else ""}"><td><button class="kv-choice" '
        f'data-choice="{value}" aria-pressed="{str(is_chosen).lower()}" title="{name}: show its blocks on the map">'
        f"{escape(shortened(request.request_id, 22))}</button></td>"
        f"<td>{count(request.blocks)}</td><td>{count(request.runs)}</td><td>{count(request.tokens)}</td>"
        f"<td>{size(request.blocks * block_bytes)}</td><td>{duration(request.age_seconds)}</td></tr>"
    )


def legend_html(legend: Sequence[tuple[str, str]]) -> str:
    """Colours (#rrggbb) and what they mean, in one line."""
    items = "".join(
        f'<span title="{escape(word)}"><i style="background:{colour}"></i>{escape(shortened(word, 20))}</span>'
        for colour, word in legend
    )
    return f'<div class="kv-legend">{items}</div>'


def identity_html(engine: EngineSummary) -> str:
    """One line that says whose pool this is."""
    ranks = "" if engine.rank == "dp0.tp0.pp0" else engine.rank
    blocks, tokens = counted(engine.total_blocks, "block"), counted(engine.block_tokens, "token")
    parts = [
        f"{engine.kind} {engine.version}".strip(),
        engine.model,
        f"policy {engine.policy}" if engine.policy else "",
        engine.medium,
        ranks,
        f"{blocks} × {tokens} × {size(engine.block_bytes)}",
        f"pid {engine.pid}",
    ]
    state = escape(engine.state)
    text = " · ".join(escape(part) for part in parts if part)
    return f'<div class="kv-identity"><b class="kv-state {state}">{state}</b> {text}</div>'


def map_note(blocks_per_cell: int) -> str:
    if blocks_per_cell == 1:
        return "one block a cell, in address order"
    return (
        f"{counted(blocks_per_cell, 'block')} a cell, in address order; stripes are the shares of the states, "
        "at least one for any present"
    )


def note_html(text: str) -> str:
    return f'<p class="kv-note">{escape(text)}</p>'


def heading_html(title: str, note: str = "") -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f'<h3 class="kv-heading">{escape(title)}{small}</h3>'
