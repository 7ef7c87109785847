"""Compaction in words: decisions with their reasons, and predicted beside realised."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent.wire import compaction as wire_compaction
from dashboard import compaction_table

BAD = "<script>alert(1)</script>"


def state(**changes: Any) -> wire_compaction.CompactionState:
    values: dict[str, Any] = {
        "id": "pool",
        "automatic": True,
        "automatic_reason": "",
        "target": 0.1,
        "enter": 0.3,
        "exit": 0.2,
        "fragmentation_rate": 0.91,
        "decision": "hold_backoff",
        "reason": "2 runs did not last",
        "running": False,
        "undone_runs": 2,
        "settled": False,
        "budget": wire_compaction.CompactionBudget(
            moved_bytes=3 << 20,
            reserved_bytes=0,
            allowance_bytes=8 << 20,
            left_bytes=5 << 20,
            written_share=0.01,
            relocation_copies_per_block=2.0,
        ),
        "engine": wire_compaction.EngineMoving(
            asked=True, moving=True, relocation=None, running=False, policy="vllm", reason=""
        ),
        "verdicts": [
            wire_compaction.CompactionVerdict(
                since_unix=1_700_000_000 + i, decision="hold_backoff", acts=False, reason=f"no. {i}"
            )
            for i in range(20, 0, -1)
        ],
        "last_run": None,
        "plan": None,
        "next_run_seconds": 90.0,
        "undone_reason": "F was back",
        "consumers": ["transfer"],
    }
    return wire_compaction.CompactionState(**(values | changes))


def entry(**changes: Any) -> wire_compaction.AuditRecord:
    values: dict[str, Any] = {
        "time_unix": 1_700_000_000.0,
        "route": "POST /v1/engines/{id}/compaction",
        "access": "token",
        "address": "10.0.0.1",
        "action": "compact",
        "engine": "pool",
        "parameters": {"target": 0.1},
        "outcome": "reached",
        "reason": "",
        "seconds": 3.0,
        "result": {
            "planned_moves": 12,
            "moved_blocks": 11,
            "moved_bytes": 11 << 20,
            "fragmentation_rate_before": 0.9,
            "fragmentation_rate_after": 0.09,
            "largest_allocatable_run_before": 20,
            "largest_allocatable_run_after": 190,
            "details": {
                "seconds": 0.25,
                "longest_stall_seconds": 0.0021,
                "predicted": {"fragmentation": 0.08, "largest_run": 200, "sequence_runs": 40},
                "after": {"sequence_runs": 42},
                "cached_lost": 1,
                "cached_lost_predicted": 0,
            },
        },
    }
    return wire_compaction.AuditRecord(**(values | changes))


def tile(shown: wire_compaction.CompactionState, label: str) -> tuple[str, str]:
    found = next(one for one in compaction_table.tiles_of(shown) if one.label == label)
    return found.value, found.detail


def test_the_policy_at_one_look() -> None:
    shown = state()
    assert tile(shown, "Fragmentation F") == ("0.910", "acts above 0.30, until 0.20")
    assert tile(shown, "Next run") == ("in 1 min 30 s", "cooldown or back-off")
    assert tile(shown, "Back-off") == ("2", "2 in a row did not last")
    assert tile(shown, "Budget left")[0] == "5.00 MiB"
    assert tile(shown, "Consumers") == ("1", "transfer")
    assert tile(shown, "Engine") == ("moves", "relocation not offered")
    off = state(automatic=False, automatic_reason="the kill switch was used", consumers=[], require_consumer=True)
    assert tile(off, "Acts by itself") == ("no", "why is said below")
    assert "The policy does not act here: the kill switch was used." in compaction_table.notes_of(off)
    assert tile(off, "Next run")[0] == "none by itself"
    assert compaction_table.notes_of(state(undone_reason="")) == []
    many = state(consumers=["transfer", "offload", "pages", "a shrinking pool"])
    assert tile(many, "Consumers") == ("4", "transfer, offload and 2 more")
    assert tile(off, "Consumers") == ("none known", "one is required")
    assert tile(state(settled=True), "Back-off")[1].startswith("settled")


def test_why_the_policy_does_not_act_is_said_once() -> None:
    why = "the setting compaction is off"
    verdict = wire_compaction.CompactionVerdict(since_unix=1_700_000_000, decision="hold_off", acts=False, reason=why)
    off = state(automatic=False, automatic_reason=why, reason=why, decision="hold_off", verdicts=[verdict])
    assert tile(off, "Acts by itself") == ("no", "why is said above")
    parts = [compaction_table.verdict_html(off), *compaction_table.notes_of(off), compaction_table.verdicts_html(off)]
    assert "".join(parts).count(why) == 1


@pytest.mark.parametrize(("decision", "tone"), [("compact", "acts"), ("hold_backoff", "holds"), (None, "holds")])
def test_the_decision_that_stands(decision: str | None, tone: str) -> None:
    html = compaction_table.verdict_html(state(decision=decision, reason=BAD))
    assert f'class="kv-verdict {tone}"' in html
    assert "<script" not in html


def test_decisions_newest_first_and_how_many_more() -> None:
    html = compaction_table.verdicts_html(state())
    assert re.findall(r"no\. (\d+)", html) == [str(i) for i in range(20, 8, -1)]
    assert "and 8 earlier" in html
    assert "Nothing was decided" in compaction_table.verdicts_html(state(verdicts=[]))


def test_runs_are_told_predicted_beside_realised() -> None:
    entries = [entry(), entry(action="hold", outcome="hold_healthy"), entry(action="moving", outcome="off")]
    (run,) = compaction_table.runs_of(entries)
    assert (run.moves_predicted, run.moves_realised, run.seconds) == (12, 11, 0.25)
    assert (run.fragmentation_before, run.fragmentation_predicted, run.fragmentation_realised) == (0.9, 0.08, 0.09)
    assert (run.sequence_runs_predicted, run.sequence_runs_realised, run.cached_lost_realised) == (40, 42, 1)
    html = compaction_table.runs_html([run])
    beside = re.findall(r'title="predicted">(.*?)</span> → <span title="realised">(.*?)<', html)
    assert beside == [("12", "11"), ("0.080", "0.090"), ("200", "190"), ("40", "42"), ("0", "1")]
    assert "2.1 ms" in html
    assert ">API<" in html
    assert "10.0.0.1" not in html
    assert compaction_table.rows_of([run])[0]["moved_bytes"] == 11 << 20


def test_a_run_without_a_report_has_no_figures() -> None:
    (run,) = compaction_table.runs_of([entry(outcome="timeout", reason=BAD, result={}, seconds=75.0)])
    assert (run.moves_realised, run.fragmentation_realised, run.seconds) == (None, None, 75.0)
    html = compaction_table.runs_html([run]) + compaction_table.asked_html([entry(reason=BAD, result={})])
    assert "<script" not in html
    assert "timeout" in html


def test_holds_are_not_what_was_asked_for() -> None:
    html = compaction_table.asked_html([entry(action="hold", reason="healthy"), entry(route="policy", action="decide")])
    assert "healthy" not in html
    assert "the policy" in html


def test_a_plan_and_a_run_of_this_page() -> None:
    plan = wire_compaction.CompactionPlan(
        target=0.1,
        moves=12,
        bytes=12 << 20,
        fragmentation_rate_before=0.9,
        fragmentation_rate_after=0.08,
        largest_allocatable_run_before=20,
        largest_allocatable_run_after=200,
        sequence_runs_before=90,
        sequence_runs_after=40,
        cached_blocks_lost=0,
        reachable=False,
        limited=True,
        reason=BAD,
    )
    html = compaction_table.plan_html(plan)
    assert "12 blocks, 12.0 MiB" in html
    assert "0.900 → 0.080" in html
    assert "out of reach" in html
    assert "cut by the limit" in html
    assert "<script" not in html
    figures = wire_compaction.CompactionFigures(
        moves=12,
        fragmentation_rate=0.08,
        largest_allocatable_run=200,
        sequence_runs=40,
        cached_blocks_lost=0,
        given_back_bytes=None,
    )
    run = wire_compaction.CompactionRun(
        id="pool",
        decision="planned",
        reason="",
        planned_moves=12,
        moved_blocks=0,
        moved_bytes=0,
        fragmentation_rate_before=0.9,
        fragmentation_rate_after=0.08,
        largest_allocatable_run_before=20,
        largest_allocatable_run_after=200,
        predicted=figures,
        realised=figures.model_copy(update={"moves": 0}),
        details={},
    )
    cells = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", compaction_table.run_html(run))
    assert ("moves", "12", "\N{EM DASH}") in cells
    done = run.model_copy(update={"decision": "reached", "realised": figures.model_copy(update={"moves": 11})})
    assert "<td>12</td><td>11</td>" in compaction_table.run_html(done)
