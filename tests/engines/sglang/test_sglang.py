"""SGLang 0.5.23: the maps are its allocators and radix cache, at every step, and no fault of ours is noticed."""

from __future__ import annotations

from typing import Any

import pytest

Report = dict[str, Any]
VARIANTS = ["token", "paged", "sliding", "late", "in use already"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_maps_equal_sglangs_own_objects_at_every_step(allocators: Report, variant: str) -> None:
    report = allocators[variant]
    assert report["differences"] == 0
    assert report["compared"] > 50_000
    assert report["reason"] == ""
    assert report["log"] == []
    assert report["hooks_left"] == 0
    # The run was of the kind that breaks maps: prefixes hit and evicted, pages free, evictable and held.
    assert report["served"] > 50
    assert report["hits"] > 1_000
    assert report["evicted"] > 1_000
    assert min(report["most"]) > 50
    assert report["counters"]["blocks_reused"] > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_evictable_protected_and_free_are_told_apart(allocators: Report, variant: str) -> None:
    report = allocators[variant]
    assert set(report["used_at_rest"]) == {0}
    assert report["cached_is_evictable"]


def test_two_index_spaces_are_two_pools(allocators: Report) -> None:
    assert allocators["sliding"]["pools"] == ["kv-full", "kv-sliding"]
    assert allocators["token"]["pools"] == ["kv"]
    assert (allocators["token"]["block_tokens"], allocators["paged"]["block_tokens"]) == (1, 16)
    assert allocators["token"]["identity"] == ["sglang", "0.5.23", "TokenToKVPoolAllocator"]


def test_a_million_slots_cost_a_byte_each(allocators: Report) -> None:
    report = allocators["large"]
    assert report["same"]
    assert report["used"] > 10_000
    assert report["file_bytes"] < 1_100_000  # and the rest of a map


def test_faults_and_unknown_shapes_leave_sglang_as_it_is(allocators: Report) -> None:
    faults = allocators["faults"]
    assert faults["raising"]["same"]
    assert faults["raising"]["hooks_left"] == 0
    (line,) = faults["raising"]["log"]
    assert "a fault of ours" in line
    assert faults["turned off"] == {"same": True, "hooks_left": 0, "log": ["turned off: the operator said so"]}
    assert not faults["unknown shape"]["attached"]
    (line,) = faults["unknown shape"]["log"]
    assert "inc_lock_ref" in line
    assert not faults["disabled"]["attached"]


def test_sglang_finds_the_plugin_and_only_the_variable_switches_it_on(allocators: Report) -> None:
    assert allocators["registered"] == {"idle": 0, "unasked": 0, "asked": 1, "found": True, "page": 1, "log": []}


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_sglangs_own_loop_ends_with_nothing_running(loops: Report, loop: str) -> None:
    report = loops[loop]
    assert (report["running"], report["waiting"], report["used"]) == (0, 0, 0)
    told, ended = report["steps"]
    assert told == ended
    assert 5 < ended < report["rounds"] - 5
    assert report["reason"] == ""


def test_sglangs_own_loop_tells_of_a_pause(loops: Report) -> None:
    report = loops["paused"]
    assert (report["running"], report["waiting"], report["steps"]) == (0, 3, [4, 4])
    assert report["used"] == 3 * (5 + 4)
    assert loops["wrapped"] == ["process_batch_result", "on_idle", "_record_scheduler_state_for_paused_engine"]


@pytest.mark.parametrize("rule", ["partition", "requests", "faults"])
def test_the_suite_of_every_adapter_holds(conformance: Report, rule: str) -> None:
    report = conformance["rules"][rule]
    assert report["broken"] == []
    assert report["looked"] > 5
    assert conformance["moved"] is None
    assert conformance["noticed"]["partition"]
    assert conformance["noticed"]["requests"]
