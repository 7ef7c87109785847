"""Transformers 5.19 with its cache watched: the maps are the cache, at every step, and no fault of ours is noticed."""

from __future__ import annotations

from typing import Any

import pytest

Report = dict[str, Any]
MEMORY_WARNING = "not in memory"
DECIDED = ["tight", "roomy", "forked", "hybrid", "hybrid forked", "prefill first"]  # each run is like the last
VARIANTS = [*DECIDED, "given up"]


def said(report: Report) -> list[str]:
    """What our logger said, apart from where the maps lie."""
    return [line for line in report["log"] if MEMORY_WARNING not in line]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_maps_equal_the_cache_at_every_step(generation: Report, variant: str) -> None:
    report = generation[variant]
    assert report["first"] == []
    assert report["differences"] == 0
    assert report["counters"]["repairs"] == 0
    assert report["reason"] == ""
    assert said(report) == []
    assert report["steps"] > 20
    assert report["blocks_compared"] > 1_000
    assert report["tokens_compared"] > 1_000
    assert report["owned"] == report["blocks_compared"]
    assert report["used_at_rest"] == 0


@pytest.mark.parametrize("variant", DECIDED)
def test_the_tokens_are_those_of_transformers_alone(generation: Report, variant: str) -> None:
    assert generation[variant]["same"]
    assert generation[variant]["answered"] > 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_is_freed_and_its_maps_go_with_it(generation: Report, variant: str) -> None:
    report = generation[variant]
    assert report["processor_freed"]
    assert "under-test.dp0.tp0.pp0.kv.kvmap" in report["maps"]
    assert report["maps_left"] == []


def test_the_runs_were_of_the_kind_that_breaks_maps(generation: Report) -> None:
    tight = generation["tight"]["counters"]
    assert tight["preemptions"] > 10
    assert tight["blocks_evicted"] > 10
    assert tight["allocation_failures"] >= tight["preemptions"] // 2
    assert sum(generation[variant]["counters"]["blocks_reused"] for variant in VARIANTS) > 2
    assert generation["roomy"]["most_shared"] > 4
    assert generation["forked"]["counters"]["copy_on_write"] > 5
    assert generation["forked"]["most_running"] > 8
    assert generation["hybrid"]["counters"]["preemptions"] > 0
    assert generation["hybrid forked"]["most_shared"] > 4
    assert (
        0
        < generation["roomy"]["counters"]["prefix_hit_tokens"]
        < (generation["roomy"]["counters"]["prefix_query_tokens"])
    )


def test_groups_sectors_and_identity_are_told(generation: Report) -> None:
    # 2 (key, value) x 2 heads x 16 numbers of 4 bytes x 8 tokens a layer.
    layer = 2 * 2 * 16 * 4 * 8
    full, hybrid = generation["tight"], generation["hybrid"]
    assert full["groups"] == [["full", 4, 8, 0, 4 * layer]]
    assert full["block_bytes"] == 4 * layer
    assert sorted(hybrid["groups"]) == [["full", 2, 8, 0, 2 * layer], ["sliding", 3, 8, 24, 3 * layer]]
    # A full block is two, a sliding block three of what both are multiples of; both cut a sector of six.
    assert hybrid["block_bytes"] == layer
    assert hybrid["maps"] == ["under-test.dp0.tp0.pp0.kv-sectors.kvmap", "under-test.dp0.tp0.pp0.kv.kvmap"]
    free, used, reserved = 0, 2, 4
    assert hybrid["sector_kinds"] == [[free, 255], [used, 0], [used, 1], [reserved, 255]]
    assert full["maps"] == ["under-test.dp0.tp0.pp0.kv.kvmap"]  # where a sector is a block one map tells it all
    assert full["identity"] == {
        "kind": "transformers",
        "version": "5.19.0",
        "runner": "model_runner.ModelRunner",
        "model": "llama",
        "medium": "cpu",
        "dtype": "float32",
        "engine_id": "under-test",
    }


def test_the_safety_margin_is_the_headroom(generation: Report) -> None:
    assert generation["tight"]["headroom"] == [4, 26]  # 15 % of 24 blocks, and two that are never handed out
    assert generation["prefill first"]["headroom"][0] == 0


def test_a_manager_that_is_kept_keeps_its_map_until_it_is_destroyed(generation: Report) -> None:
    report = generation["kept"]
    assert report["answers"] == [6 * 8, 6 * 8]
    assert report["incarnations"] == 1
    assert report["hits"][1] > report["hits"][0]
    assert report["maps_left"] == 0
    assert report["watched_left"] == 0


def test_a_wrong_map_is_noticed_and_told_anew(generation: Report) -> None:
    """The control: without it, a comparison that looks at nothing would pass as well."""
    report = generation["controls"]
    assert report["noticed"] > 0
    assert report["repairs"] == 2
    assert report["after_repair"] == []
    assert report["reason"] == ""
    assert len(said(report)) == 1


@pytest.mark.parametrize(
    "fault",
    [
        "raising observer", "raising _released", "raising _taken", "vanished folder", "turned off", "no room",
        "unknown shape", "another version",
    ],
)  # fmt: skip
def test_transformers_answers_the_same_whatever_befalls_us(generation: Report, fault: str) -> None:
    assert generation["faults"][fault]["same"]


def test_each_fault_is_said_once_and_leaves_no_hook(generation: Report) -> None:
    faults = generation["faults"]
    for fault in ("raising observer", "raising _released", "raising _taken"):
        (line,) = said(faults[fault])
        assert "a fault of ours" in line
        assert faults[fault]["hooks_left"] == 0
    assert faults["raising observer"]["degraded"]
    assert faults["vanished folder"]["reason"] == ""
    assert said(faults["turned off"]) == ["turned off: the operator said so"]
    assert faults["turned off"]["hooks_left"] == 0
    assert not faults["turned off"]["map_left"]
    (line,) = said(faults["no room"])
    assert "no room" in line
    assert not faults["no room"]["attached"]


def test_an_unknown_shape_is_left_alone_with_one_line(generation: Report) -> None:
    unknown = generation["faults"]["unknown shape"]
    assert not unknown["attached"]
    (line,) = said(unknown)
    assert "fork_blocks" in line
    assert "5.19" in line


def test_another_version_of_the_known_shape_is_watched_and_named(generation: Report) -> None:
    (line,) = said(generation["faults"]["another version"])
    assert "5.19.0" in line
    assert "5.18" in line


def test_request_ids_can_be_hashed(generation: Report) -> None:
    assert generation["hashed"]["shown"] == generation["hashed"]["wanted"]


def test_disabled_leaves_no_trace(generation: Report) -> None:
    assert generation["disabled"] == {"maps": 0, "watched": 0}


def test_a_language_model_answers_the_same_and_its_map_is_the_cache(language_model: Report) -> None:
    report = language_model
    assert report["same"]
    assert report["first"] == []
    assert said(report) == []
    assert all(len(answer) > 20 for answer in report["answers"].values())
    assert report["counters"]["repairs"] == 0
    assert report["counters"]["tokens_written"] > 100
    assert report["blocks_compared"] > 100
    assert report["model"]
    assert report["groups"] == [["full", 30]]
    assert report["block_bytes"] == 30 * 16 * 2 * 3 * 64 * 4  # layers, tokens, key and value, heads, numbers, bytes


def test_the_launcher_watches_a_program_that_does_not_know_of_us(unchanged: Report) -> None:
    assert unchanged["tokens"] == 8
    assert unchanged["maps"] == ["under-test.dp0.tp0.pp0.kv.kvmap"]
    assert unchanged["maps_left"] == []
    assert unchanged["arguments"] == ["drive_unchanged.py", 2]
