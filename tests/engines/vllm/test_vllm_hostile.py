"""Real vLLM 0.32 in hostile hands: whatever is done to ours, tokens and prefix hits are those of stock vLLM."""

from __future__ import annotations

from typing import Any

import pytest

Report = dict[str, Any]
REFUSALS = {"bad_request", "unsupported", "too_large"}


@pytest.mark.parametrize("size", ["full", "hybrid", "tiny"])
def test_a_storm_of_orders_changes_no_token_and_no_hit(hostile: Report, size: str) -> None:
    stock, storm = hostile["storms"][size]["stock"], hostile["storms"][size]["storm"]
    assert (storm["tokens"], storm["cached_tokens"]) == (stock["tokens"], stock["cached_tokens"])
    assert storm["faults"] == []
    assert storm["differences"] == []
    assert storm["reason"] == ""
    assert storm["repairs"] == 0
    assert storm["replies"].keys() & REFUSALS


def test_the_storm_moved_blocks_where_there_was_room(hostile: Report) -> None:
    reports = [hostile["storms"][size]["storm"] for size in ("full", "hybrid")]
    assert sum(one["moved"] for one in reports) > 0
    assert sum(one["copies"] for one in reports) > 0
    assert sum(one["preemptions"] for one in reports) > 0


def test_what_is_turned_off_in_the_middle_of_it_leaves_nothing(hostile: Report) -> None:
    stock, left = hostile["storms"]["full"]["stock"], hostile["storms"]["full"]["left"]
    assert (left["tokens"], left["cached_tokens"]) == (stock["tokens"], stock["cached_tokens"])
    assert left["reason"] == "in the middle of it"
    assert left["hooked"] == []
    assert left["faults"] == []


def test_the_storm_with_two_batches_in_flight(hostile: Report) -> None:
    stock, storm = hostile["two_in_flight"]["stock"], hostile["two_in_flight"]["storm"]
    assert storm["tokens"] == stock["tokens"]
    assert storm["faults"] == []
    assert storm["reason"] == ""
    assert storm["repairs"] == 0


def test_whatever_is_missing_in_another_vllm_it_starts_and_serves(hostile: Report) -> None:
    found = hostile["missing"]["found"]
    assert {name: one["raised"] for name, one in found.items() if "raised" in one} == {}
    assert hostile["missing"]["served"] == 1
    # What is of use to observation alone leaves the pool watched; what the pool cannot do without, nothing.
    for name in ("connector", "kv_cache_manager.coordinator", "_preempt_request", "kv_cache_manager.new_step_starts"):
        assert found[name]["watched"], name
    for name in ("schedule", "kv_cache_manager.block_pool.free_block_queue.num_free_blocks"):
        assert not found[name]["watched"], name
        assert "tested with vLLM 0.32" in found[name]["said"][0]
