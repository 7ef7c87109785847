"""Alerts as text of the page: nothing from outside is read as HTML, and every case has words."""

from __future__ import annotations

from typing import Any

import pytest

from agent.wire.alerts import AlertList, AlertRecord, MuteRecord, SinkRecord
from dashboard import alert_cards, firing

NOW = 1_700_000_000.0
BAD = "<script>alert('x')</script>"


def alert(**changes: Any) -> AlertRecord:
    fields: dict[str, Any] = {
        "fingerprint": "1" * 16,
        "rule": "pool-nearly-full",
        "severity": "warning",
        "state": "firing",
        "held": "",
        "labels": {"engine_id": "vllm-7", "pool": "kv", "rank": "dp0.tp0.pp0", "model": "org/model"},
        "value": 0.99,
        "value_text": "99 %",
        "threshold_text": "above 97 %",
        "summary": "vllm-7 runs full",
        "meaning": "New requests wait.",
        "action": "Send it fewer.",
        "started_unix": NOW - 200,
        "ended_unix": None,
        "reason": "",
        "link": None,
        "runbook_url": None,
    }
    return AlertRecord(**{**fields, **changes})


def listing(*records: AlertRecord, **changes: Any) -> AlertList:
    given: dict[str, Any] = {
        "now_unix": NOW,
        "open": [one for one in records if one.state != "resolved"],
        "recent": [one for one in records if one.state == "resolved"],
        "mutes": [],
        "sinks": [],
        "kept": True,
        "rules": ["pool-nearly-full"],
    }
    return AlertList(**{**given, **changes})


def test_a_card_says_what_where_since_when_how_bad_and_what_to_do() -> None:
    text = alert_cards.cards_html([alert()], NOW, "none")
    for part in ("vllm-7 runs full", "vllm-7.dp0.tp0.pp0.kv · model org/model", "99 % (above 97 %)", "Send it fewer."):
        assert part in text
    assert "since 2023-11-14 22:10:00 UTC, 3 min 20 s ago" in text
    assert "held" in alert_cards.cards_html([alert(held="the map is stale")], NOW, "")
    assert "nobody was told" in alert_cards.cards_html([alert(state="muted")], NOW, "")
    assert "none" in alert_cards.cards_html([], NOW, "none")


def test_alerts_of_no_pool_have_a_place_too() -> None:
    assert alert_cards.where(alert(labels={"gpu": "GPU-1"})) == "gpu GPU-1"
    assert alert_cards.pool_of(alert(labels={"gpu": "GPU-1"})) is None
    assert alert_cards.where(alert(labels={})) == "the agent"


def test_nothing_from_outside_is_markup() -> None:
    bad = alert(rule=BAD, summary=BAD, meaning=BAD, action=BAD, held=BAD, reason=BAD, labels={BAD: BAD}, value_text=BAD)
    over = bad.model_copy(update={"state": "resolved", "ended_unix": NOW})
    sink = SinkRecord(name=BAD, waiting=1, failing_seconds=3, last_failure=BAD, outcomes={BAD: 1})
    found = listing(bad, over, sinks=[sink])
    text = (
        alert_cards.cards_html(found.open, NOW, "")
        + alert_cards.history_html(found.recent)
        + alert_cards.sinks_html(found.sinks)
        + alert_cards.links_html(found.open)
        + firing.firing_html(found)
    )
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("https://book.example/alerts#x", '<a href="https://book.example/alerts#x">Runbook: pool-nearly-full</a>'),
        ("javascript:alert(1)", ""),
        (None, "docs/runbook.md, pool-nearly-full"),
    ],
)
def test_runbooks_are_links_where_they_may_be(url: str | None, part: str) -> None:
    text = alert_cards.links_html([alert(runbook_url=url)], agent="2")
    assert part in text
    assert "javascript" not in text
    assert '<a href="?agent=2&amp;pool=vllm-7.dp0.tp0.pp0.kv">' in text


def test_how_much_there_is() -> None:
    values = {tile.label: tile for tile in alert_cards.tiles_of(listing(alert(), alert(state="pending")))}
    assert [values[name].value for name in ("Firing", "Pending", "Muted", "Over")] == ["1", "1", "0", "0"]
    assert values["Firing"].tone == "bad"
    calm = {tile.label: tile for tile in alert_cards.tiles_of(listing(kept=False))}
    assert (calm["Firing"].value, calm["Firing"].tone) == ("0", "")
    assert "KVATLAS_STATE_DIR" in calm["Receivers"].detail
    recorded = {tile.label: tile for tile in alert_cards.tiles_of(listing(kept=False), replay=True)}
    assert "KVATLAS_STATE_DIR" not in recorded["Receivers"].detail


@pytest.mark.parametrize(
    ("number", "muted", "waiting"),
    [(1, "by 1 mute", "1 change waits to be sent"), (2, "by 2 mutes", "2 changes wait to be sent")],
)
def test_one_mute_and_one_change_are_no_plural(number: int, muted: str, waiting: str) -> None:
    mute = MuteRecord(id="m", rule="r", engine=None, author="ann", comment="", created_unix=NOW, expires_unix=NOW + 9)
    sink = SinkRecord(name="slack", waiting=number, failing_seconds=None, last_failure="", outcomes={})
    values = {tile.label: tile for tile in alert_cards.tiles_of(listing(mutes=[mute] * number, sinks=[sink]))}
    assert (values["Muted"].detail, values["Receivers"].detail) == (muted, waiting)


def test_the_line_above_every_view() -> None:
    assert "1 alert fires" in firing.firing_html(listing(alert()))
    assert firing.firing_html(listing(alert(state="pending"), alert(state="muted"))) == ""
    two = firing.firing_html(listing(alert(severity="critical"), alert()))
    assert "2 alerts fire" in two
    assert "critical: vllm-7 runs full, for 3 min 20 s · and 1 more" in two


def test_a_row_of_a_file_is_flat() -> None:
    (row,) = alert_cards.rows_of(listing(alert()))
    assert row["label_engine_id"] == "vllm-7"
    assert "labels" not in row
