"""Moves of live blocks in vLLM 0.32: the tokens, hits and evictions of an engine where nothing is ever moved."""

from __future__ import annotations

from typing import Any

import pytest

Report = dict[str, Any]
SAME = ("tokens", "cached_tokens", "evicted")


def same(one: Report, other: Report) -> list[str]:
    return [name for name in SAME if one[name] != other[name]]


def assert_sound(report: Report) -> None:
    """Its map was the pool at every step, and after each move tables, references and the free queue fitted together."""
    assert report["first"] == []
    assert report["faults"] == []
    assert report["faults_after_a_move"] == []
    assert report["repairs"] == 0
    assert report["watched"] == ""
    assert report["off"] == ""
    assert report["reasons"] == []
    assert report["counted_moves"] == report["moved"]


@pytest.mark.parametrize(
    ("variant", "moving"),
    [
        ("tight", "often"),
        ("tight", "relocating too"),
        ("hybrid", "often"),
        ("hybrid", "verified"),
        ("two in flight", "often"),
    ],
)
def test_moves_change_nothing_that_a_request_could_see(compacting: Report, variant: str, moving: str) -> None:
    never, often = compacting["moved"][variant]["never"], compacting["moved"][variant][moving]
    assert same(never, often) == []
    assert_sound(often)
    print(f"{variant}, {moving}:", {name: often[name] for name in ("moved", "shared", "prefilling", "preemptions")})
    assert often["moved"] >= 500
    assert often["onto_cached"] > 100  # what was cached where a block went is cached still


def test_what_moves_is_of_every_kind(compacting: Report) -> None:
    often = compacting["moved"]["tight"]["often"]
    assert often["shared"] >= 50
    assert often["prefilling"] >= 50
    assert often["preemptions"] >= 5
    assert often["copied"] == 0
    assert compacting["moved"]["tight"]["relocating too"]["copied"] > 100


@pytest.mark.parametrize("without", ["not_copied", "not_put_back", "not_renamed"])
def test_without_a_part_of_a_move_the_tokens_differ(compacting: Report, without: str) -> None:
    assert "tokens" in same(compacting["controls"]["never"], compacting["controls"][without])


@pytest.mark.parametrize("fault", ["a rank does not copy", "a rank copies less"])
def test_a_chunk_that_was_not_begun_costs_its_run(compacting: Report, fault: str) -> None:
    never, ours = compacting["broken"]["never"], compacting["broken"][fault]
    assert ours["tokens"] == never["tokens"]
    assert ours["faults"] == []
    assert ours["first"] == []
    assert ours["outcomes"]["failed"] == 1
    assert (ours["off"], ours["failed"]) == ("", False)
    assert ours["moved"] > 100


@pytest.mark.parametrize(
    "fault",
    [
        "before the first block",
        "between two blocks",
        "within a block",
        "between tables",
        "a rank settles in part",
        "contents differ",
    ],
)
def test_a_chunk_that_was_half_done_ends_all_moves(compacting: Report, fault: str) -> None:
    never, ours = compacting["broken"]["never"], compacting["broken"][fault]
    assert ours["tokens"] == never["tokens"]
    assert ours["faults"] == []
    assert ours["repairs"] == 0
    assert ours["failed"]
    assert ours["off"] != ""
    assert ours["served"] == never["served"]


def test_without_giving_up_its_blocks_the_tokens_would_differ(compacting: Report) -> None:
    assert compacting["broken"]["not given up"]["tokens"] != compacting["broken"]["never"]["tokens"]


def test_it_is_asked_for_over_the_control_socket(compacting: Report) -> None:
    report = compacting["asked_for"]
    replies = report["replies"]
    plan, run, refused = replies["70 plan"], replies["75 compact"], replies["95 compact"]
    assert plan["decision"] == "planned"
    assert plan["planned_moves"] > 0
    assert plan["details"]["cached_lost"] == 0
    assert run["moved_blocks"] > 0
    assert run["details"]["verified_blocks"] == run["moved_blocks"]
    assert run["fragmentation_rate_after"] < run["fragmentation_rate_before"]
    assert not replies["90 moving"]["on"]
    assert (refused["decision"], refused["moved_blocks"]) == ("refused", 0)
    assert replies["100 moving"]["on"]
    assert (replies["110 status"]["moving"], replies["110 status"]["reason"]) == (True, "")
    assert replies["130 turn_off"] == {
        "schema": "kvatlas.control/v1", "reply": "switch", "on": False, "reason": "the operator said so",
    }  # fmt: skip
    assert report["reason"] == "the operator said so"
    assert report["hooked"] == []
    assert report["tokens_served"] == report["tokens"]


def test_what_is_not_proven_is_refused_with_the_reason(compacting: Report) -> None:
    refused = dict(compacting["refused"])
    assert refused.pop("plain") == ""
    assert refused.pop("worker") == ""
    assert [name for name, reason in refused.items() if not reason] == []
    assert "connector" in refused["a connector"]
    assert "MambaManager" in refused["state groups"]
    assert "speculative" in refused["speculative decoding"]
    assert "cpu.model_runner.CPUModelRunner" in refused["the second runner"]
    assert "somewhere.else" in refused["unknown runner"]
