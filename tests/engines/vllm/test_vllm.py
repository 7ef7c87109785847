"""vLLM 0.32 with the shim beside it: the map is the pool, at every step, and no fault of ours reaches a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Report = dict[str, Any]
MEMORY_WARNING = "not in memory"


def said(report: Report) -> list[str]:
    """What our logger said, apart from where the maps lie."""
    return [line for line in report["log"] if MEMORY_WARNING not in line]


@pytest.mark.parametrize("variant", ["full", "hybrid"])
def test_the_map_equals_the_pool_at_every_step(in_process: Report, variant: str) -> None:
    report = in_process[variant]
    assert report["first"] == []
    assert report["differences"] == 0
    assert report["counters"]["repairs"] == 0
    assert report["reason"] == ""
    assert said(report) == []
    # The run was of the kind that breaks maps.
    assert report["steps"] > 150
    assert report["blocks_compared"] > 5_000
    assert report["owned"] > report["blocks_compared"] // 2
    assert report["most_shared"] > 4
    assert report["counters"]["preemptions"] >= 5
    assert report["counters"]["blocks_reused"] >= 10
    assert report["counters"]["blocks_evicted"] >= 100
    assert report["aborts"] >= 3
    assert report["resets"] >= 2
    assert report["used_at_rest"] == 0


def test_the_groups_and_the_identity_are_told(in_process: Report) -> None:
    assert in_process["full"]["groups"] == [["full", 0, 4]]
    assert sorted(in_process["hybrid"]["groups"]) == [["full", 0, 2], ["sliding", 96, 2]]
    # 2 (key, value) x 2 heads x 32 numbers of 4 bytes x 32 tokens a layer; hybrid groups lie in the same memory.
    layer_bytes = 2 * 2 * 32 * 4 * 32
    assert in_process["full"]["block_bytes"] == 4 * layer_bytes
    assert in_process["hybrid"]["block_bytes"] == 2 * layer_bytes
    assert in_process["full"]["identity"] == {
        "kind": "vllm",
        "version": "0.32.0",
        "runner": "cpu_model_runner.CPUModelRunner",
        "medium": "cpu",
        "dtype": "float32",
    }


def test_counters_follow_the_scheduler(in_process: Report) -> None:
    counters = in_process["full"]["counters"]
    assert counters["steps"] <= in_process["full"]["steps"]
    assert counters["tokens_written"] > 0
    assert 0 < counters["prefix_hit_tokens"] < counters["prefix_query_tokens"]
    assert counters["allocation_failures"] >= counters["preemptions"]
    # Every block that was taken has gone back: with a prefix cache that was reset at times, some as evictions.
    assert counters["blocks_allocated"] + counters["blocks_reused"] == counters["blocks_freed"]


def test_the_map_equals_the_pool_with_two_batches_in_flight(in_process: Report) -> None:
    report = in_process["async"]
    assert report["scheduler"] == "AsyncScheduler"
    assert report["batches"] == 2
    assert report["first"] == []
    assert report["counters"]["repairs"] == 0
    assert report["counters"]["preemptions"] > 0
    assert report["steps"] > 80
    assert report["reason"] == ""
    assert report["tokens"] == in_process["tokens"]


def test_both_ends_of_a_copy_on_write_are_followed(in_process: Report) -> None:
    report = in_process["copies"]
    assert report["differences"] == []
    assert report["steps"] == 4
    assert report["references_of_the_source"] == [2, 1]
    assert report["copies"] == 1
    assert report["loras"] == ["adapter-of-a-tenant"]


def test_a_wrong_map_is_noticed_and_repaired(in_process: Report) -> None:
    """The control: without it, a comparison that looks at nothing would pass as well."""
    report = in_process["controls"]
    assert report["noticed"] > 0
    assert report["repairs"] == 1
    assert report["after_repair"] == []
    assert len(said(report)) == 1


def test_blocks_kept_for_a_connector_are_pinned_until_it_lets_go(in_process: Report) -> None:
    report = in_process["connector"]
    assert report["first"] == []
    assert report["reason"] == ""
    assert report["most_pinned"] > 3
    assert report["oldest_pinned_seconds"] > 0
    assert report["pinned_seen"] > 100
    assert report["unnamed_holders"] == 0
    assert report["pinned_at_rest"] == 0
    assert report["repairs"] == 0


def test_sleep_shows_and_waking_makes_a_new_map(in_process: Report) -> None:
    report = in_process["sleep"]
    assert report["sleeping"] == [False, True, False]
    assert report["cached"][0] > 0
    assert report["cached"][1:] == [0, 0]
    assert report["incarnations"] == 2
    assert report["steps"] > 3
    assert report["differences"] == []


def test_request_ids_can_be_hashed(in_process: Report) -> None:
    import hashlib

    report = in_process["hashed"]
    assert report["shown"] == [hashlib.sha256(name.encode()).hexdigest() for name in report["requests"]]


@pytest.mark.parametrize("fault", ["vanished folder", "raising observer", "turned off", "no room", "unknown shape"])
def test_vllm_serves_on_whatever_befalls_us(in_process: Report, disabled: Report, fault: str) -> None:
    assert in_process["faults"][fault]["same"]
    assert in_process["tokens"] == disabled["tokens"]


def test_each_fault_is_said_once_and_leaves_no_hook(in_process: Report) -> None:
    faults = in_process["faults"]
    assert faults["vanished folder"]["reason"] == ""
    raising = faults["raising observer"]
    assert raising["degraded"]
    assert raising["hooks_left"] == 0
    assert [line for line in said(raising) if "a fault of ours" in line] == said(raising)
    assert len(said(raising)) == 1
    off = faults["turned off"]
    assert off["reason"] == "the operator said so"
    assert off["hooked"] == []
    assert not off["map_left"]
    assert not faults["no room"]["attached"]
    (line,) = said(faults["no room"])
    assert "no room" in line


def test_an_unknown_shape_is_left_alone_with_one_line(in_process: Report) -> None:
    unknown = in_process["faults"]["unknown shape"]
    assert not unknown["attached"]
    (line,) = said(unknown)
    assert "BlockPool.touch" in line
    assert "0.32" in line


def test_what_is_known_is_watched_where_a_part_is_not(in_process: Report) -> None:
    part = in_process["faults"]["part of the shape unknown"]
    assert part["same"]
    assert part["attached"]
    assert part["differences"] == []
    (line,) = said(part)
    assert "record_prefix_cache_stats" in line


def test_registering_twice_hooks_once(in_process: Report) -> None:
    assert in_process["registered_twice"] == 1


def test_an_engine_core_of_its_own_publishes_and_nobody_else(serving: Report, disabled: Report) -> None:
    assert serving["maps"] == ["under-test.dp0.tp0.pp0.kv.kvmap"]
    assert serving["engine_core"]
    assert serving["kind"] == "vllm"
    assert serving["tokens"] == disabled["tokens"]
    assert serving["repairs"] == 0


def test_a_stopped_worker_shows_as_stalled_and_no_request_is_lost(serving: Report) -> None:
    assert serving["stuck_running"] > 0
    assert serving["stuck_used"] > 0
    assert serving["heartbeat_after_last_step_ns"] > 0  # the process lives, its steps do not
    assert serving["served_after"] == serving["tokens"]
    assert serving["used_at_rest"] == 0
    assert not serving["degraded"]


def test_blocks_are_moved_in_a_worker_of_its_own_while_it_serves(serving: Report) -> None:
    assert serving["moved"] >= 20
    assert serving["verified"] == serving["moved"]
    assert "failed" not in serving["decisions"]
    assert serving["same_when_moved"]


def test_an_idle_engine_core_answers_and_can_be_left_alone(serving: Report, disabled: Report) -> None:
    idle = serving["idle"]
    assert idle["plan"]["decision"] == idle["plan_soon_again"]["decision"] == "planned"
    assert idle["compact"]["decision"] == "reached"  # nothing is in use: there is nothing to move
    assert idle["status"]["moving"]
    assert (idle["status"]["relocation"], idle["status"]["policy"]) == (False, "vllm")
    assert (idle["relocation"]["on"], idle["relocation"]["reason"]) == (True, "")
    assert idle["turn_off"]["reason"] == "the operator said so"
    assert serving["sockets_left"] == []
    assert serving["served_without_us"] == disabled["tokens"]


def test_compiled_code_stores_what_numpy_stores(drive: Callable[..., Report]) -> None:
    report = drive("drive_compiled")
    assert report["alone"] == "this process is not an engine core's own"
    assert report["switched_off"] == "KVATLAS_VLLM_COMPILED=0"
    assert report["compiled"] == ""
    assert report["differences"] == []
    assert report["wrong"] == [0, 0]
    assert report["faults"] == ["", ""]
    assert min(report["counters"][name] for name in ("blocks_evicted", "blocks_reused", "blocks_freed")) > 300
    assert "block 9000 is not in a pool of 9000" in report["outside"]
    assert report["untouched"]


def test_disabled_leaves_no_trace(disabled: Report) -> None:
    assert disabled["maps"] == []
    assert not disabled["folder_made"]
    assert disabled["hooked"] == []
    assert disabled["threads"] == []
