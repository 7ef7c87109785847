"""Compaction in the words of the page: the policy's state, its decisions, and runs predicted beside realised. Pure;
whatever comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent.wire.compaction import AuditRecord, CompactionFigures, CompactionPlan, CompactionRun, CompactionState
from dashboard.past import moment
from dashboard.widgets import Tile, note_html
from dashboard.wording import NOT_KNOWN, count, counted, duration, escape, rate, shortened, size

VERDICTS_SHOWN = 12
RUNS_SHOWN = 10
ASKED_SHOWN = 12
ACTING = ("compact", "relocate", "stop_relocating")


@dataclass(frozen=True, slots=True)
class Run:
    """One run that was asked for, whoever did: predicted by its first plan beside what it brought. None: not known."""

    ended_unix: float
    asked_by: str
    outcome: str
    reason: str
    moves_predicted: int | None
    moves_realised: int | None
    moved_bytes: int | None
    fragmentation_before: float | None
    fragmentation_predicted: float | None
    fragmentation_realised: float | None
    largest_run_before: int | None
    largest_run_predicted: int | None
    largest_run_realised: int | None
    sequence_runs_predicted: int | None
    sequence_runs_realised: int | None
    cached_lost_predicted: int | None
    cached_lost_realised: int | None
    given_back_bytes: int | None
    seconds: float | None
    longest_stall_seconds: float | None


def tiles_of(state: CompactionState) -> list[Tile]:
    """The policy at one look."""
    budget, engine = state.budget, state.engine
    above = state.fragmentation_rate is not None and state.fragmentation_rate > state.enter
    back_off = f"{count(state.undone_runs)} in a row did not last" if state.undone_runs else "no run was undone"
    if state.settled:
        back_off = "settled: no more is expected"
    return [
        Tile(
            "Fragmentation F",
            rate(state.fragmentation_rate),
            f"acts above {state.enter:.2f}, until {state.exit:.2f}",
            "Over free + cached blocks, as of the last sample.",
            "bad" if above else "",
        ),
        Tile(
            "Acts by itself",
            "yes" if state.automatic else "no",
            "this agent may" if state.automatic else f"why is said {'above' if _told_above(state) else 'below'}",
            "Whether the agent's policy may act here: the setting compaction, and the kill switch.",
        ),
        Tile(
            "Next run",
            *_next_run(state),
            "When the policy may begin a run again, if it finds one worth it.",
        ),
        Tile(
            "Back-off", count(state.undone_runs), back_off, state.undone_reason or "Runs that F undid within a minute."
        ),
        Tile(
            "Budget left",
            size(budget.left_bytes),
            f"of {size(budget.allowance_bytes)} and {budget.written_share:.0%} of writes"
            if budget.allowance_bytes is not None
            else "not known before the first plan",
            "What live moves may still cost the policy: one full plan, and a share of the KV bytes written.",
        ),
        Tile(
            "Moved so far",
            size(budget.moved_bytes),
            f"{size(budget.reserved_bytes)} by a run under way" if budget.reserved_bytes else "by live moves",
            "Since the agent first saw this start of the engine, whoever asked.",
        ),
        Tile(
            "Consumers",
            count(len(state.consumers)) if state.consumers else "none known",
            _few(state.consumers) or ("one is required" if state.require_consumer else "none is required"),
            "Who profits from contiguous blocks: transfer, offload, elastic memory. Without, a lower F buys nothing.",
        ),
        Tile(
            "Engine",
            _switch(engine.moving, "moves", "moves off"),
            f"relocation {_switch(engine.relocation, 'on', 'off', 'not offered')}",
            "What the engine said when it was last asked: live moves, and relocating allocation.",
        ),
    ]


def notes_of(state: CompactionState) -> list[str]:
    """Reasons that are too long for a tile."""
    notes = []
    if not state.automatic and not _told_above(state):
        notes.append(f"The policy does not act here: {state.automatic_reason}.")
    if state.relocation_held:
        notes.append(f"The policy leaves relocation off: {state.relocation_held}.")
    if state.engine.reason and (state.automatic or state.engine.reason not in state.automatic_reason):
        notes.append(f"The engine says: {state.engine.reason}.")
    if state.undone_reason:
        notes.append(f"The last run did not last: {state.undone_reason}.")
    return notes


def _next_run(state: CompactionState) -> tuple[str, str]:
    if not state.automatic:
        return "none by itself", "a run may be asked for"
    if state.next_run_seconds is None:
        return "now", "no pause"
    return f"in {duration(state.next_run_seconds)}", "cooldown or back-off"


def _told_above(state: CompactionState) -> bool:
    """Whether the decision that stands says already why the policy does not act."""
    return bool(state.automatic_reason) and state.automatic_reason in state.reason


def verdict_html(state: CompactionState) -> str:
    """The decision that stands, in one sentence."""
    word = (state.decision or "nothing decided yet").replace("_", " ")
    acts = "acts" if state.decision in ACTING else "holds"
    return (
        f'<p class="kv-verdict {acts}"><b>{escape(word)}</b> {escape(state.reason)}'
        f"{' A run is under way.' if state.running else ''}</p>"
    )


def verdicts_html(state: CompactionState) -> str:
    """Newest first. Where the policy does not act, the reason that stands over the table is not said there again."""
    if not state.verdicts:
        return note_html("Nothing was decided yet.")
    above = "" if state.automatic else state.reason
    rows = "".join(
        f"<tr><td>{moment(one.since_unix).removesuffix(' UTC')}</td>"
        f'<td class="kv-text">{escape(one.decision.replace("_", " "))}</td>'
        f'<td class="kv-text">{escape("as above" if one.reason == above else one.reason)}</td></tr>'
        for one in state.verdicts[:VERDICTS_SHOWN]
    )
    more = len(state.verdicts) - VERDICTS_SHOWN
    rest = note_html(f"and {count(more)} earlier") if more > 0 else ""
    head = '<tr><th>since (UTC)</th><th class="kv-text">decision</th><th class="kv-text">reason</th></tr>'
    return f'<table class="kv-table">{head}{rows}</table>{rest}'


def runs_of(entries: Sequence[AuditRecord]) -> list[Run]:
    """The runs among them, in their order."""
    return [_run_of(one) for one in entries if one.action == "compact"]


def runs_html(runs: Sequence[Run]) -> str:
    """Predicted beside realised, an arrow between them; newest first."""
    if not runs:
        return note_html("No run was asked for since the audit log began.")
    rows = "".join(
        f'<tr title="{escape(one.reason)}"><td>{moment(one.ended_unix).removesuffix(" UTC")}</td>'
        f'<td class="kv-text">{escape(_who(one.asked_by))}</td><td class="kv-text">{escape(one.outcome)}</td>'
        f"<td>{_beside(count(one.moves_predicted), count(one.moves_realised))}</td>"
        f"<td>{rate(one.fragmentation_before)}</td>"
        f"<td>{_beside(rate(one.fragmentation_predicted), rate(one.fragmentation_realised))}</td>"
        f"<td>{_beside(count(one.largest_run_predicted), count(one.largest_run_realised))}</td>"
        f"<td>{_beside(count(one.sequence_runs_predicted), count(one.sequence_runs_realised))}</td>"
        f"<td>{_beside(count(one.cached_lost_predicted), count(one.cached_lost_realised))}</td>"
        f"<td>{size(one.moved_bytes)}</td><td>{duration(one.seconds)}</td>"
        f"<td>{_milliseconds(one.longest_stall_seconds)}</td></tr>"
        for one in runs[:RUNS_SHOWN]
    )
    titles = (
        "moves",
        "F before",
        "F after",
        "largest run",
        "runs of sequences",
        "cached lost",
        "moved",
        "took",
        "stall",
    )
    heads = "".join(f"<th>{one}</th>" for one in titles)
    more = len(runs) - RUNS_SHOWN
    rest = note_html(f"and {count(more)} earlier") if more > 0 else ""
    return (
        '<div class="kv-wide"><table class="kv-table kv-compactions"><tr><th>ended (UTC)</th>'
        f'<th class="kv-text">asked by</th><th class="kv-text">outcome</th>{heads}</tr>{rows}</table></div>{rest}'
    )


def asked_html(entries: Sequence[AuditRecord]) -> str:
    """What was decided to be done, and asked for, by whom; holds are left out, the table of decisions has them."""
    shown = [one for one in entries if one.action != "hold"]
    if not shown:
        return note_html("Nothing was done or asked for since the audit log began.")
    rows = "".join(
        f"<tr><td>{moment(one.time_unix).removesuffix(' UTC')}</td>"
        f'<td class="kv-text">{escape(_who(one.route))}</td><td class="kv-text">{escape(one.action)}</td>'
        f'<td class="kv-text">{escape(one.outcome.replace("_", " "))}</td>'
        f'<td class="kv-text">{escape(one.reason)}</td></tr>'
        for one in shown[:ASKED_SHOWN]
    )
    more = len(shown) - ASKED_SHOWN
    rest = note_html(f"and {count(more)} earlier") if more > 0 else ""
    titles = "".join(f'<th class="kv-text">{one}</th>' for one in ("who", "what", "outcome", "reason"))
    return f'<table class="kv-table"><tr><th>when (UTC)</th>{titles}</tr>{rows}</table>{rest}'


def plan_html(plan: CompactionPlan) -> str:
    """What a run would do, of the agent's last sample."""
    reach = (
        "reaches the target"
        if plan.reachable
        else "the target is out of reach: pinned or reserved blocks are in the way"
    )
    pairs = (
        ("target", f"F ≤ {plan.target:.2f}"),
        ("moves", f"{counted(plan.moves, 'block')}, {size(plan.bytes)}"),
        ("F", f"{rate(plan.fragmentation_rate_before)} → {rate(plan.fragmentation_rate_after)}"),
        (
            "largest run",
            f"{count(plan.largest_allocatable_run_before)} → {counted(plan.largest_allocatable_run_after, 'block')}",
        ),
        ("runs of sequences", f"{count(plan.sequence_runs_before)} → {count(plan.sequence_runs_after)}"),
        ("cached prefixes lost", count(plan.cached_blocks_lost)),
        ("outcome", reach + (", cut by the limit on moves" if plan.limited else "")),
        ("reason", plan.reason or NOT_KNOWN),
    )
    return facts_html(pairs)


def run_html(run: CompactionRun) -> str:
    """A run that this page asked for, or what it would do, predicted beside realised."""
    planned = run.decision == "planned"
    rows = "".join(
        f"<tr><td>{title}</td><td>{told(run.predicted)}</td>"
        f"<td>{NOT_KNOWN if planned else told(run.realised)}</td></tr>"
        for title, told in _FIGURES
    )
    head = "<tr><th></th><th>predicted</th><th>realised</th></tr>"
    words = f"{run.decision}: {run.reason}" if run.reason else run.decision
    return f'{note_html(words)}<table class="kv-table kv-run">{head}{rows}</table>'


_FIGURES: tuple[tuple[str, Callable[[CompactionFigures], str]], ...] = (
    ("moves", lambda one: count(one.moves)),
    ("F", lambda one: rate(one.fragmentation_rate)),
    ("largest run", lambda one: count(one.largest_allocatable_run)),
    ("runs of sequences", lambda one: count(one.sequence_runs)),
    ("cached prefixes lost", lambda one: count(one.cached_blocks_lost)),
    ("given back", lambda one: size(one.given_back_bytes)),
)


def facts_html(pairs: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in pairs)
    return f'<dl class="kv-facts">{cells}</dl>'


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [asdict(one) for one in runs]


def _run_of(entry: AuditRecord) -> Run:
    result, details = entry.result, _mapping(entry.result.get("details"))
    predicted, after = _mapping(details.get("predicted")), _mapping(details.get("after"))
    return Run(
        ended_unix=entry.time_unix,
        asked_by=entry.route,
        outcome=entry.outcome,
        reason=entry.reason,
        moves_predicted=_whole(result.get("planned_moves")),
        moves_realised=_whole(result.get("moved_blocks")),
        moved_bytes=_whole(result.get("moved_bytes")),
        fragmentation_before=_number(result.get("fragmentation_rate_before")),
        fragmentation_predicted=_number(predicted.get("fragmentation")),
        fragmentation_realised=_number(result.get("fragmentation_rate_after")),
        largest_run_before=_whole(result.get("largest_allocatable_run_before")),
        largest_run_predicted=_whole(predicted.get("largest_run")),
        largest_run_realised=_whole(result.get("largest_allocatable_run_after")),
        sequence_runs_predicted=_whole(predicted.get("sequence_runs")),
        sequence_runs_realised=_whole(after.get("sequence_runs")),
        cached_lost_predicted=_whole(details.get("cached_lost_predicted")),
        cached_lost_realised=_whole(details.get("cached_lost")),
        given_back_bytes=_whole(details.get("given_back_bytes")),
        seconds=_number(details.get("seconds")) if "seconds" in details else entry.seconds,
        longest_stall_seconds=_number(details.get("longest_stall_seconds")),
    )


def _beside(predicted: str, realised: str) -> str:
    return f'<span title="predicted">{predicted}</span> → <span title="realised">{realised}</span>'


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(shortened(name, 18) for name in names[:2]) + more


def _milliseconds(seconds: float | None) -> str:
    return NOT_KNOWN if seconds is None else f"{1000 * seconds:.1f} ms"


def _who(route: str) -> str:
    """A route of the API is somebody's request; the others say who by themselves."""
    return {"policy": "the policy", "cli": "command"}.get(route, "API" if "/v1/" in route else route)


def _switch(value: bool | None, on: str, off: str, unknown: str = NOT_KNOWN) -> str:
    return unknown if value is None else on if value else off


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
