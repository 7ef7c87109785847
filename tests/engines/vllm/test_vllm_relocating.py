"""Relocating allocation in vLLM 0.32: the tokens, hits and evictions of stock vLLM, at low addresses."""

from __future__ import annotations

from typing import Any

import pytest

Report = dict[str, Any]
SAME = ("tokens", "cached_tokens", "evicted")
MEMORY_WARNING = "not in memory"


def said(report: Report) -> list[str]:
    return [line for line in report["log"] if MEMORY_WARNING not in line]


def assert_sound(report: Report) -> None:
    """Its map was the pool at every step, and vLLM's own objects fitted together."""
    assert report["first"] == []
    assert report["faults"] == []
    assert report["repairs"] == 0
    assert report["watched"] == ""
    assert report["zeroed_sources"] == 0
    assert report["written_twice"] == 0


def same(one: Report, other: Report) -> list[str]:
    return [name for name in SAME if one[name] != other[name]]


@pytest.mark.parametrize("variant", ["full", "hybrid", "tight"])
def test_tokens_hits_and_evictions_are_those_of_stock_vllm(relocating: Report, variant: str) -> None:
    stock, ours = relocating["compared"][variant]["stock"], relocating["compared"][variant]["relocating"]
    assert same(stock, ours) == []
    assert ours["served"] == (60 if variant == "tight" else 120)
    assert_sound(stock)
    assert_sound(ours)
    assert said(ours) == []
    assert ours["reason"] == ""
    assert ours["copies"] > 500
    assert ours["counted_copies"] == ours["copied"]
    # The run was of the kind that shows a difference.
    assert ours["duplicates"] > 0
    assert ours["evictions"] > 500
    assert ours["most_shared"] > 20


def test_the_tight_pool_preempts_and_cuts_prompts(relocating: Report) -> None:
    tight = relocating["compared"]["tight"]["relocating"]
    assert tight["preemptions"] >= 5
    assert tight["live_share"] > 0.7


@pytest.mark.parametrize("variant", ["full", "hybrid"])
def test_what_is_in_use_lies_together(relocating: Report, variant: str) -> None:
    stock, ours = relocating["compared"][variant]["stock"], relocating["compared"][variant]["relocating"]
    assert 0.25 < ours["live_share"] <= 0.45
    assert stock["fragmentation_p50"] > 0.6
    assert ours["fragmentation_p50"] <= 0.15
    assert ours["runs_per_prompt"] * 4 <= stock["runs_per_prompt"]


def test_without_the_copies_the_tokens_differ(relocating: Report) -> None:
    full = relocating["compared"]["full"]
    assert "tokens" in same(full["stock"], full["without copies"])


def test_without_the_exclusion_of_other_groups_hits_the_tokens_differ(relocating: Report) -> None:
    hybrid = relocating["compared"]["hybrid"]
    assert_sound(hybrid["with exclusion"])
    assert "tokens" in same(hybrid["with exclusion"], hybrid["without exclusion"])


def test_with_two_batches_in_flight(relocating: Report) -> None:
    reports = relocating["two_in_flight"]
    assert same(reports["stock"], reports["relocating"]) == []
    assert_sound(reports["relocating"])
    assert reports["relocating"]["copies"] > 500


def test_kv_events_and_residency_metrics_are_those_of_stock_vllm(relocating: Report) -> None:
    stock, ours = relocating["told"]["stock"], relocating["told"]["relocating"]
    assert same(stock, ours) == []
    assert ours["copies"] > 500
    assert ours["events"] == stock["events"]
    assert ours["removals"] == ours["evictions"]
    assert ours["sampled"] == stock["sampled"]
    assert ours["accesses"] == stock["accesses"]
    assert sum(ours["accesses"]) > 0


def test_the_copies_of_a_step_are_bounded(relocating: Report) -> None:
    bounded = relocating["bounded"]
    assert same(bounded["stock"], bounded) == []
    assert_sound(bounded)
    assert 0 < bounded["most_copies_a_step"] <= 16  # 1 MiB of blocks of 64 KiB each
    assert bounded["runs_per_prompt"] < bounded["stock"]["runs_per_prompt"]


def test_it_is_switched_over_the_control_socket(relocating: Report) -> None:
    report = relocating["switched"]
    assert same(relocating["compared"]["full"]["stock"], report) == []
    assert_sound(report)
    on, while_on, off, while_off = report["replies"]
    assert (on["on"], off["on"]) == (True, False)
    assert (while_on["relocation"], while_on["policy"]) == (True, "relocating")
    assert (while_off["relocation"], while_off["policy"]) == (False, "vllm")
    assert (report["first_flag"], report["flags"], report["last_flag"]) == (False, [False, True], False)
    assert report["copies"] > 100


def test_a_copy_on_write_after_a_hit_was_moved_is_of_where_it_lay(relocating: Report) -> None:
    report = relocating["copied_twice"]
    assert report == {"pulled": True, "from_before_the_step": True, "hit_copied": True, "faults": []}


def test_what_it_cannot_work_with_is_refused_with_the_reason(relocating: Report) -> None:
    zeroing = relocating["refused"]["zeroing"]
    assert not zeroing["relocator"]
    (line,) = said(zeroing)
    assert "zeroed" in line
    assert not zeroing["on"]
    assert "zeroed" in zeroing["reason"]
    for name, word in (("HiSparse", "HiSparse"), ("another pool", "HostPool"), ("another device", "tpu"),
                       ("another scheduler", "scheduler")):  # fmt: skip
        assert word in relocating["refused"][name]
    assert relocating["refused"]["nothing"] == ""
    unknown = relocating["refused"]["unknown"]
    assert not unknown["relocator"]
    (line,) = said(unknown)
    assert "sideways" in line


@pytest.mark.parametrize(
    "fault", ["choosing", "pulling", "between hashes and queue", "between two blocks", "composing"]
)
def test_a_fault_of_ours_costs_relocation_and_nothing_else(relocating: Report, fault: str) -> None:
    stock, ours = relocating["broken"]["stock"], relocating["broken"][fault]
    assert ours["tokens"] == stock["tokens"]
    assert_sound(ours)
    assert "a fault of ours" in ours["reason"]
    (line,) = said(ours)
    assert "vLLM allocates by itself" in line
    assert (ours["policy"], ours["flag"]) == ("vllm", False)
    assert ours["hooks_left"] == []
    assert ours["copies"] > 0


def test_copies_that_were_promised_are_made_though_observation_ends_in_between(relocating: Report) -> None:
    stock, ours, control = (relocating["broken"][name] for name in ("stock", "observer", "copies lost"))
    assert ours["watched"] != ""
    assert same(stock, ours) == []
    assert ours["faults"] == []
    assert "tokens" in same(stock, control)


def test_without_mending_a_fault_would_give_wrong_tokens(relocating: Report) -> None:
    broken = relocating["broken"]
    assert broken["not mended 61"]["tokens"] != broken["stock"]["tokens"]
    assert broken["not mended 101"]["tokens"] != broken["stock"]["tokens"]


def test_a_connector_that_saves_and_loads_finds_what_it_saved(relocating: Report) -> None:
    stock, ours = relocating["restored"]["stock"], relocating["restored"]["relocating"]
    assert same(stock, ours) == []
    assert_sound(ours)
    assert ours["copies"] > 100
    assert ours["layers_restored"] == ours["layers_equal"] == stock["layers_restored"]
    assert ours["layers_restored"] >= 100
    assert ours["fragmentation_p50"] < stock["fragmentation_p50"]
    assert ours["runs_per_prompt"] < stock["runs_per_prompt"]


def test_a_connector_may_fill_blocks_before_the_copies_of_their_step_are_made(relocating: Report) -> None:
    reports = relocating["restored"]
    assert same(reports["stock"], reports["filled at once"]) == []
    assert reports["filled at once"]["copies"] > 100
    assert reports["filled at once, without care"]["tokens"] != reports["stock"]["tokens"]


@pytest.mark.parametrize("variant", ["relocating", "moving"])
def test_a_language_model_under_vllms_defaults_says_the_same(language_model: Report, variant: str) -> None:
    stock, ours = language_model["stock"], language_model[variant]
    assert same(stock, ours) == []
    assert ours["texts"] == stock["texts"]
    assert all(text.strip() for text in ours["texts"])
    assert ours["faults"] == []
    assert ours["reason"] == ""
    assert ours["repairs"] == 0
    # Prefixes were hit and evicted, and something was moved.
    assert sum(ours["cached_tokens"]) > 0
    assert len(ours["evicted"]) > 10
    assert ours["copies" if variant == "relocating" else "moved"] > 0
    assert ours["fragmentation"] <= stock["fragmentation"]
