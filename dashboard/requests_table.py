"""Live sequences in the words of the page. Pure; whatever comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent.wire import Request, RequestGroup, RequestOrder, RequestPage
from dashboard.widgets import Tile, note_html
from dashboard.wording import NOT_KNOWN, count, counted, duration, escape, shortened, size

GROUPS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table, and how its order is called in the list of orders."""

    order: RequestOrder
    title: str
    words: str  # for the list of orders
    help: str
    text: Callable[[Request, int], str]  # of a request, in a pool with blocks of so many bytes


COLUMNS = (
    Column("blocks", "blocks", "blocks", "In its table, shared ones included.", lambda one, _: count(one.blocks)),
    Column(
        "owned_blocks",
        "first held",
        "blocks first held",
        "Blocks that it was the first to hold: over all sequences each block counts once.",
        lambda one, _: count(one.owned_blocks),
    ),
    Column(
        "exclusive_blocks",
        "alone",
        "blocks held alone",
        "Those of them that nobody else holds: they would be free without it.",
        lambda one, _: count(one.exclusive_blocks),
    ),
    Column("runs", "runs", "runs", "Contiguous runs that those blocks form.", lambda one, _: count(one.runs)),
    Column(
        "tail_waste_tokens",
        "tail waste",
        "tail waste",
        "Token slots of its blocks that hold no token.",
        lambda one, _: count(one.tail_waste_tokens),
    ),
    Column("tokens", "tokens", "tokens", "Tokens so far, the prompt's included.", lambda one, _: count(one.tokens)),
    Column(
        "tokens_per_second",
        "tokens/s",
        "tokens a second",
        "Mean over its life, the prompt's tokens included.",
        lambda one, _: NOT_KNOWN if one.tokens_per_second is None else f"{one.tokens_per_second:,.1f}",
    ),
    Column("age_seconds", "age", "age", "Since it was first seen.", lambda one, _: duration(one.age_seconds)),
    Column(
        "last_block_seconds",
        "last block",
        "time since its last block",
        "Since it last took a block. One that stands still takes none.",
        lambda one, _: duration(one.last_block_seconds),
    ),
)
ORDERS: dict[str, RequestOrder] = {
    **{column.words: column.order for column in COLUMNS},
    "request": "request_id",
    "LoRA adapter": "lora",
    "cache salt": "cache_salt",
}
"""What the table can be sorted by: words of the page, and the API's name."""


def tiles_of(page: RequestPage, block_bytes: int) -> list[Tile]:
    """The headline numbers: of all sequences that match, however many rows are shown."""
    totals = page.totals
    if totals is None:
        return []
    held = None if totals.owned_blocks is None else totals.owned_blocks * block_bytes
    matching = page.matching if page.matching is not None else page.total
    whole = f"of {count(page.total)} in the pool" if matching != page.total else "all of the pool"
    return [
        Tile("Sequences", count(matching), whole, "Live sequences that match the filter."),
        Tile("Blocks held", count(totals.owned_blocks), size(held), "Each block once, with its first holder."),
        Tile(
            "Held alone",
            count(totals.exclusive_blocks),
            "nobody else refers to them",
            "Blocks that only one sequence refers to.",
        ),
        Tile("Tokens", count(totals.tokens), "prompts included", "Tokens of all of them so far."),
        Tile(
            "Tail waste",
            count(totals.tail_waste_tokens),
            "empty token slots",
            "Slots of held blocks without a token.",
        ),
        Tile(
            "Runs",
            count(totals.runs),
            _per_block(totals),
            "Contiguous runs of blocks of one sequence: each is one piece of a transfer.",
        ),
        Tile("Oldest", duration(totals.oldest_seconds), "since it was first seen", "The age of the oldest sequence."),
        Tile("Labels", f"{count(page.lora_groups)} · {count(page.cache_salt_groups)}", "LoRA · salt", "Distinct ones."),
    ]


def table_html(page: RequestPage, block_bytes: int, order: RequestOrder) -> str:
    """One row a sequence, in the order in which the agent gave them."""
    if not page.requests:
        return note_html("No live sequence matches." if page.total else "No sequence is live.")
    heads = "".join(
        f'<th title="{escape(column.help)}"{_sorted_by(column.order, order)}>{escape(column.title)}</th>'
        for column in COLUMNS
    )
    labels = (("request_id", "request"), ("lora", "LoRA"), ("cache_salt", "salt"))
    first = "".join(f'<th class="kv-text"{_sorted_by(name, order)}>{title}</th>' for name, title in labels)
    rows = "".join(
        f"<tr>{_label(one.request_id, 26)}{_label(one.lora, 14)}{_label(one.cache_salt, 14)}"
        + "".join(f"<td>{escape(column.text(one, block_bytes))}</td>" for column in COLUMNS)
        + f"<td>{size(one.blocks * block_bytes)}</td></tr>"
        for one in page.requests
    )
    return (
        '<div class="kv-wide"><table class="kv-table kv-requests">'
        f"<thead><tr>{first}{heads}<th>size</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def rest_text(page: RequestPage) -> str:
    """How many rows are left out, so that nobody takes a part for the whole."""
    matching = page.matching if page.matching is not None else page.total
    left = matching - len(page.requests)
    if left <= 0:
        return (
            "The only one that matches is shown." if matching == 1 else f"All {count(matching)} that match are shown."
        )
    rest = counted(left, "more is", "more are")
    return f"The first {count(len(page.requests))} of {count(matching)} that match; {rest} in the totals."


def groups_html(title: str, groups: Sequence[RequestGroup], total: int, block_bytes: int) -> str:
    """Sequences by one label, those with most blocks first."""
    if not groups:
        return note_html("No sequence matches.")
    rows = "".join(
        f"<tr>{_label(one.label, 24, 'without')}<td>{count(one.requests)}</td><td>{count(one.owned_blocks)}</td>"
        f"<td>{size(None if one.owned_blocks is None else one.owned_blocks * block_bytes)}</td>"
        f"<td>{count(one.tokens)}</td><td>{count(one.tail_waste_tokens)}</td><td>{count(one.runs)}</td></tr>"
        for one in groups[:GROUPS_SHOWN]
    )
    more = total - min(total, GROUPS_SHOWN)
    rest = note_html(f"and {count(more)} more") if more > 0 else ""
    heads = "".join(f"<th>{one}</th>" for one in ("sequences", "blocks", "size", "tokens", "tail waste", "runs"))
    head = f'<tr><th class="kv-text">{escape(title)}</th>{heads}</tr>'
    return f'<table class="kv-table kv-groups">{head}{rows}</table>{rest}'


def rows_of(page: RequestPage) -> list[dict[str, Any]]:
    """What the table shows, as the API has it."""
    return [one.model_dump() for one in page.requests]


def _label(text: str, longest: int, nothing: str = NOT_KNOWN) -> str:
    shown = escape(shortened(text, longest)) if text else nothing
    return f'<td class="kv-text" title="{escape(text)}">{shown}</td>'


def _sorted_by(name: str, order: str) -> str:
    return ' aria-sort="other"' if name == order else ""


def _per_block(totals: RequestGroup) -> str:
    if not totals.runs or not totals.owned_blocks:
        return NOT_KNOWN
    return f"{totals.owned_blocks / totals.runs:.1f} blocks each"
