"""Live sequences in words: the numbers of the API, nothing left out unsaid, and nothing from outside as markup."""

from __future__ import annotations

import re
from typing import Any, get_args

from agent.wire import Request, RequestGroup, RequestOrder, RequestPage
from dashboard import requests_table

BLOCK_BYTES = 2**20


def request(number: int, **changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": f"request-{number}",
        "lora": "",
        "cache_salt": "",
        "tokens": 1000 + number,
        "blocks": 70 - number,
        "exclusive_blocks": 60 - number,
        "runs": 5,
        "tail_waste_tokens": 7,
        "age_seconds": 12.0,
        "owned_blocks": 65 - number,
        "tokens_per_second": 83.4,
        "last_block_seconds": 0.4,
    }
    return Request(**(values | changes))


def group(label: str = "", **changes: Any) -> RequestGroup:
    values: dict[str, Any] = {
        "label": label,
        "requests": 3,
        "tokens": 3003,
        "owned_blocks": 192,
        "exclusive_blocks": 177,
        "runs": 15,
        "tail_waste_tokens": 21,
        "oldest_seconds": 12.0,
    }
    return RequestGroup(**(values | changes))


def page(requests: list[Request], **changes: Any) -> RequestPage:
    values: dict[str, Any] = {
        "id": "pool",
        "sequence": 2,
        "total": len(requests),
        "requests": requests,
        "matching": len(requests),
        "totals": group(),
    }
    return RequestPage(**(values | changes))


def cells_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html.partition("<tbody>")[2])
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_a_row_has_the_numbers_of_the_api() -> None:
    html = requests_table.table_html(page([request(1, lora="law")]), BLOCK_BYTES, "runs")
    dash = "\N{EM DASH}"
    numbers = ["69", "64", "59", "5", "7", "1,001", "83.4", "12 s", "0.4 s", "69.0 MiB"]
    assert cells_of(html) == [["request-1", "law", dash, *numbers]]
    assert re.findall(r'<th[^>]*aria-sort="other"[^>]*>(\w+)', html) == ["runs"]


def test_what_is_not_known_is_a_dash_and_not_a_zero() -> None:
    nothing = dict.fromkeys(
        ("owned_blocks", "exclusive_blocks", "runs", "tail_waste_tokens", "tokens_per_second", "last_block_seconds")
    )
    (row,) = cells_of(requests_table.table_html(page([request(1, **nothing)]), BLOCK_BYTES, "blocks"))
    assert row.count("\N{EM DASH}") == len(nothing) + 2
    tiles = requests_table.tiles_of(page([], totals=group(owned_blocks=None, runs=None)), BLOCK_BYTES)
    assert {tile.label: tile.value for tile in tiles}["Blocks held"] == "\N{EM DASH}"
    assert requests_table.tiles_of(page([], totals=None), BLOCK_BYTES) == []


def test_what_is_left_out_is_said() -> None:
    assert requests_table.rest_text(page([request(1), request(2)])) == "All 2 that match are shown."
    cut = page([request(1)], matching=4321, total=9000)
    assert requests_table.rest_text(cut) == "The first 1 of 4,321 that match; 4,320 more are in the totals."
    tiles = {tile.label: tile for tile in requests_table.tiles_of(cut, BLOCK_BYTES)}
    assert (tiles["Sequences"].value, tiles["Sequences"].detail) == ("4,321", "of 9,000 in the pool")
    assert (tiles["Blocks held"].value, tiles["Blocks held"].detail) == ("192", "192 MiB")
    assert "No live sequence matches" in requests_table.table_html(page([], total=5), BLOCK_BYTES, "blocks")
    assert "No sequence is live" in requests_table.table_html(page([]), BLOCK_BYTES, "blocks")
    groups = [group(f"lora-{i}") for i in range(20)]
    html = requests_table.groups_html("adapter", groups, 33, BLOCK_BYTES)
    assert html.count("lora-") == 2 * requests_table.GROUPS_SHOWN
    assert f"and {33 - requests_table.GROUPS_SHOWN} more" in html


def test_one_sequence_is_no_plural() -> None:
    assert requests_table.rest_text(page([request(1)])) == "The only one that matches is shown."
    assert requests_table.rest_text(page([request(1)], matching=2)).endswith("; 1 more is in the totals.")
    assert requests_table.rest_text(page([request(1)], matching=3)).endswith("; 2 more are in the totals.")


def test_labels_from_outside_are_text() -> None:
    bad = '<img src=x onerror="alert(1)">'
    html = requests_table.table_html(page([request(1, request_id=bad, lora=bad, cache_salt=bad)]), 1, "blocks")
    html += requests_table.groups_html("salt", [group(bad)], 1, 1)
    assert "<img" not in html
    assert html.count("&lt;img") >= 4


def test_every_order_of_the_api_can_be_chosen() -> None:
    assert sorted(requests_table.ORDERS.values()) == sorted(get_args(RequestOrder))
