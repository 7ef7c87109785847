"""Alerts as HTML text: cards of those that are open, tables of those that are over and of receivers. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from agent.wire.alerts import AlertList, AlertRecord, MuteRecord, SinkRecord
from dashboard.widgets import Tile, note_html
from dashboard.wording import NOT_KNOWN, count, counted, duration, escape

POOL_LABELS = ("engine_id", "rank", "pool")


def tiles_of(found: AlertList, *, replay: bool = False) -> list[Tile]:
    """How much of what there is. `replay`: of a recording, which tells nobody and keeps nothing."""
    firing = [one for one in found.open if one.state == "firing"]
    worst = firing[0].severity if firing else ""
    failing = [one for one in found.sinks if one.failing_seconds is not None]
    waiting = sum(one.waiting for one in found.sinks)
    return [
        Tile(
            "Firing",
            count(len(firing)),
            f"the worst is {worst}" if worst else "nothing is wrong that a rule knows",
            "Alerts whose number has been beyond its threshold for as long as the rule says.",
            {"critical": "alarm-count", "warning": "bad"}.get(worst, ""),
        ),
        Tile(
            "Pending",
            count(sum(one.state == "pending" for one in found.open)),
            "beyond the threshold, not for long enough yet",
            "They fire when that has lasted for the rule's time.",
        ),
        Tile(
            "Muted",
            count(sum(one.state == "muted" for one in found.open)),
            f"by {counted(len(found.mutes), 'mute')}",
            "They fire, and nobody was told.",
        ),
        Tile("Over", count(len(found.recent)), "since the agent started, the last 100", "Alerts that have ended."),
        Tile(
            "Receivers",
            f"{count(len(failing))} failing" if failing else f"{count(len(found.sinks))} well",
            "a recording tells nobody"
            if replay
            else counted(waiting, "change waits", "changes wait")
            + " to be sent"
            + ("" if found.kept else " · kept in memory alone: set KVATLAS_STATE_DIR"),
            "Who is told; below the state of each.",
            "bad" if failing else "",
        ),
    ]


def cards_html(records: Sequence[AlertRecord], now_unix: float, empty: str) -> str:
    """One card each: what, where, since when, how bad, what to do."""
    if not records:
        return note_html(empty)
    return '<div class="kv-alerts">' + "".join(_card(one, now_unix) for one in records) + "</div>"


def _card(one: AlertRecord, now_unix: float) -> str:
    since = f"since {clock(one.started_unix)}, {duration(max(0.0, now_unix - one.started_unix))} ago"
    threshold = f" ({one.threshold_text})" if one.threshold_text else ""
    facts = [
        ("where", where(one)),
        ("since when", since),
        ("how bad", f"{one.value_text}{threshold}"),
        ("what it means", one.meaning),
        ("what to do", one.action),
    ]
    if one.held:
        facts.append(("held", f"{one.held}: it neither fires anew nor ends until its number is known"))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    muted = " · muted: nobody was told" if one.state == "muted" else ""
    return (
        f'<section class="kv-alert {escape(one.severity)}"><h4><b>{escape(one.severity)}</b> {escape(one.summary)}'
        f"<small>{escape(one.rule)} · {escape(one.state)}{muted}</small></h4><dl>{rows}</dl></section>"
    )


def links_html(records: Sequence[AlertRecord], agent: str | None = None) -> str:
    """To the runbooks and pools of these alerts. Apart from the cards, whose times change with each refresh: what
    is drawn anew loses the keyboard's focus."""
    books = {one.rule: one.runbook_url for one in records}
    pools = dict.fromkeys(pool for one in records if (pool := pool_of(one)) is not None)
    named = {"agent": agent} if agent else {}
    links = [f'<a href="?{escape(urlencode(named | {"pool": pool}))}">Open {escape(pool)}</a>' for pool in pools]
    links += [
        f'<a href="{escape(url)}">Runbook: {escape(rule)}</a>'
        for rule, url in books.items()
        if url is not None and urlsplit(url).scheme in ("http", "https")
    ]
    without = [rule for rule, url in books.items() if url is None]
    if without:
        rules = ", ".join(map(escape, without))
        links.append(f"<span>Runbook: docs/runbook.md, {rules} (KVATLAS_ALERT_RUNBOOK makes it a link)</span>")
    return f'<p class="kv-links">{" ".join(links)}</p>' if links else ""


def history_html(records: Sequence[AlertRecord]) -> str:
    """Alerts that are over, newest first."""
    if not records:
        return note_html("No alert has ended since the agent started.")
    rows = "".join(
        f"<tr><td>{escape(one.severity)}</td><td>{escape(one.summary)}</td><td>{escape(one.rule)}</td>"
        f"<td>{clock(one.started_unix)}</td><td>{NOT_KNOWN if one.ended_unix is None else clock(one.ended_unix)}</td>"
        f"<td>{duration(None if one.ended_unix is None else one.ended_unix - one.started_unix)}</td>"
        f"<td>{escape(one.reason)}</td></tr>"
        for one in records
    )
    names = ("severity", "what", "rule", "began", "ended", "lasted", "why it is over")
    return f'<table class="kv-table kv-words">{_head(names)}{rows}</table>'


def sinks_html(sinks: Sequence[SinkRecord]) -> str:
    """Who is told, and whether that works."""
    if not sinks:
        return note_html(
            "No receiver is set up. Give the agent KVATLAS_SLACK_WEBHOOK_URL_FILE, KVATLAS_ALERTMANAGER_URL or "
            "KVATLAS_WEBHOOK_URL."
        )
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{_standing(one)}</td><td>{count(one.waiting)}</td>"
        f"<td>{escape(_outcomes(one))}</td></tr>"
        for one in sinks
    )
    return f'<table class="kv-table kv-words">{_head(("receiver", "state", "to be sent", "so far"))}{rows}</table>'


def mute_text(one: MuteRecord, now_unix: float) -> str:
    """One mute in words."""
    what = " at ".join(part for part in (one.rule, one.engine) if part)
    why = f": {one.comment}" if one.comment else ""
    return f"{what}, for {duration(max(0.0, one.expires_unix - now_unix))} more, by {one.author}{why}"


def rows_of(found: AlertList) -> list[dict[str, Any]]:
    """Every alert as one flat row, for a file."""
    return [
        {name: value for name, value in one.model_dump().items() if name != "labels"}
        | {f"label_{name}": value for name, value in one.labels.items()}
        for one in (*found.open, *found.recent)
    ]


def pool_of(one: AlertRecord) -> str | None:
    """Id of the pool that an alert is of; None where it is of none."""
    parts = [one.labels.get(name) for name in POOL_LABELS]
    return ".".join(part for part in parts if part) if all(parts) else None


def where(one: AlertRecord) -> str:
    """The labels, a pool's as its id."""
    pool = pool_of(one)
    others = [f"{name} {text}" for name, text in one.labels.items() if pool is None or name not in POOL_LABELS]
    return " · ".join([pool, *others] if pool is not None else others) or "the agent"


def clock(unix: float) -> str:
    """A time of the day, UTC, with its date."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))


def _standing(one: SinkRecord) -> str:
    if one.failing_seconds is None:
        return "works" if one.outcomes.get("sent") else "nothing sent yet"
    return f"fails for {duration(one.failing_seconds)} ({escape(one.last_failure)})"


def _outcomes(one: SinkRecord) -> str:
    return ", ".join(f"{word.replace('_', ' ')} {count(number)}" for word, number in one.outcomes.items() if number)


def _head(names: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
