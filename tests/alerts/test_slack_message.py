"""Slack messages: everything is said, nothing that a label holds acts, and Slack's limits hold for any text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.model import Severity
from alerts.notice import Entry, News, Notice
from alerts.sinks.base import clean
from alerts.sinks.slack_message import CUT, fit, full_message, short_message
from tests.alerts.conftest import START, make_alert
from tests.alerts.slack_receiver import slack_judge

HOSTILE = (
    "<!channel> <@U012AB3CD> <https://evil.example|click> *bold* _it_ ~no~ `code` & @here :boom: https://evil.example"
)
CONTROL = re.compile(r"<(?!https?://agent\.example/|https://runbooks\.example/)")


def notice(*entries: Entry, **more: Any) -> Notice:
    return Notice(at=START, entries=entries, **more)


def texts(message: Any) -> list[tuple[str, str]]:
    """Kind and text of everything that is shown."""
    found = [("fallback", message["text"])]
    for block in message.get("blocks", []):
        parts = [block["text"]] if "text" in block else block["elements"]
        found += [(part["type"], part["text"]) for part in parts]
    return found


def test_one_firing_says_everything() -> None:
    message = full_message(notice(Entry(make_alert(), News.FIRING, 1), list_url="http://agent.example/v1/alerts"))
    assert message == {
        "text": "WARNING: Pool main of a is nearly full\n"
        "97 % (over 95 %), since 14:12:20 UTC (1 min ago)\n"
        "Send fewer requests, or give the pool more memory.\n"
        "http://agent.example/v1/alerts",
        "blocks": [
            header("WARNING: Pool main of a is nearly full"),
            section(
                "Where: engine_id a · model llama · pool main\n"
                "Value: 97 % (over 95 %)\n"
                "When: since 14:12:20 UTC (1 min ago)"
            ),
            section("What it means: New requests wait, and running ones are soon preempted."),
            section("What to do: Send fewer requests, or give the pool more memory."),
            context("<http://agent.example/engines/a|Show it> · <https://runbooks.example/pool_nearly_full|Runbook>"),
            context("<http://agent.example/v1/alerts|All alerts>"),
        ],
        "mrkdwn": False,
        "unfurl_links": False,
        "unfurl_media": False,
    }


def test_its_resolve_says_how_long_it_lasted_and_why_it_is_over() -> None:
    over = Entry(replace(make_alert(), ended_at=START), News.RESOLVED, 0, "back at 80 %, at most 90 %")
    message = full_message(notice(over))
    assert message["blocks"][:2] == [
        header("RESOLVED: Pool main of a is nearly full"),
        section(
            "Where: engine_id a · model llama · pool main\n"
            "Value: 97 % (over 95 %)\n"
            "When: lasted 1 min, from 14:12:20 UTC to 14:13:20 UTC\n"
            "Over because: back at 80 %, at most 90 %"
        ),
    ]
    assert "What to do" not in json.dumps(message["blocks"])


@pytest.mark.parametrize(
    ("entry", "title"),
    [
        (Entry(make_alert(severity=Severity.CRITICAL), News.FIRING, 1), "CRITICAL: "),
        (Entry(make_alert(), News.REPEATED), "STILL WARNING: "),
        (Entry(make_alert(severity=Severity.CRITICAL), News.ESCALATED), "NOW CRITICAL: "),
        (Entry(replace(make_alert(), ended_at=START), News.BRIEF, 1), "FIRED AND RESOLVED: "),
    ],
)
def test_the_first_word_says_what_is_new(entry: Entry, title: str) -> None:
    assert full_message(notice(entry))["blocks"][0]["text"]["text"].startswith(title)


def test_firings_that_one_entry_stands_for_are_counted() -> None:
    flapped = Entry(make_alert(episode=3), News.FIRING, 3)
    assert "fired 3 times since the last message" in json.dumps(full_message(notice(flapped)))
    once = Entry(replace(make_alert(), ended_at=START), News.RESOLVED, 1)
    assert "fired 1 time since the last message" in json.dumps(full_message(notice(once)))


def many(number: int, **more: Any) -> tuple[Entry, ...]:
    return tuple(Entry(make_alert(f"e{n}", rule=f"rule_{n % 30}", **more), News.FIRING, 1) for n in range(number))


@pytest.mark.parametrize("number", [2, 3, 4, 20, 21, 60, 500, 5000])
def test_any_number_of_alerts_is_one_valid_message(number: int) -> None:
    message = full_message(notice(*many(number, summary="x" * 120), list_url="http://agent.example/v1/alerts"))
    answer = slack_judge(message)
    assert answer.status == 200, answer.headers
    shown = "\n".join(text for _, text in texts(message))
    assert shown.count("x" * 120) >= min(number, 20)
    assert ("more. All by rule:" in shown) is (number > 20)
    assert "agent.example/v1/alerts|All alerts" in shown


def test_the_header_of_many_counts_them_and_names_the_worst() -> None:
    over = Entry(replace(make_alert("o"), ended_at=START), News.RESOLVED)
    worst = Entry(make_alert("w", severity=Severity.CRITICAL), News.FIRING, 1)
    message = full_message(notice(worst, *many(3), over))
    assert message["blocks"][0] == header(
        "1 critical, 3 warning, 1 resolved: Pool main of w is nearly full, and 4 more"
    )


def test_firings_that_nobody_named_are_counted() -> None:
    message = full_message(notice(*many(1), counted={"rule_0": 2, "other": 40}))
    shown = "\n".join(text for _, text in texts(message))
    assert "1 warning, 42 only counted: Pool main of e0 is nearly full" in shown
    assert "other: 40 only counted (40 new firings)" in shown
    assert "rule_0: 1 firing, 2 only counted (3 new firings)" in shown


@pytest.mark.parametrize("count", [1, 3, 10, 60])
@pytest.mark.parametrize("form", [full_message, short_message])
def test_nothing_that_a_label_holds_acts(count: int, form: Any) -> None:
    entries = [
        Entry(
            make_alert(
                f"e{number}",
                rule=HOSTILE,
                labels={"engine_id": HOSTILE, HOSTILE: HOSTILE},
                summary=HOSTILE,
                meaning=HOSTILE,
                action=HOSTILE,
                value_text=HOSTILE,
                threshold_text=HOSTILE,
            ),
            News.FIRING,
            1,
        )
        for number in range(count)
    ]
    message = form(notice(*entries, list_url="http://agent.example/v1/alerts"))
    assert slack_judge(message).status == 200
    for kind, text in texts(message):
        assert not CONTROL.search(text)
        assert "&" not in re.sub(r"&(?:amp|lt|gt);", "", text)
        if kind == "mrkdwn":
            assert HOSTILE[-10:] not in text
            assert "*" not in text
        if kind == "fallback":
            assert "://evil" not in text
            assert "@here" not in text
    assert message["mrkdwn"] is False


def test_a_markup_text_of_ours_would_be_noticed() -> None:
    """A control for the test above."""
    assert CONTROL.search("<!channel>")
    assert CONTROL.search("<https://evil.example|x>")
    assert not CONTROL.search("<http://agent.example/a|x>")


@pytest.mark.parametrize(
    "link",
    ["javascript:alert(1)", "http://", "agent.example", "http://[", "x" * 5000, "http://agent.example/" + "x" * 5000],
)
def test_a_link_that_is_none_is_left_out(link: str) -> None:
    message = full_message(notice(Entry(make_alert(link=link, runbook_url=link), News.FIRING, 1), list_url=link))
    assert slack_judge(message).status == 200
    assert not [block for block in message["blocks"] if block["type"] == "context"]


def test_a_link_cannot_be_broken_out_of() -> None:
    link = "http://agent.example/engines/a|b><!channel>\n?x=1&y=2"
    message = full_message(notice(Entry(make_alert(link=link, runbook_url=None), News.FIRING, 1)))
    [block] = [block for block in message["blocks"] if block["type"] == "context"]
    assert block["elements"][0]["text"] == (
        "<http://agent.example/engines/a%7Cb%3E%3C!channel%3E%0A?x=1&amp;y=2|Show it>"
    )


@given(st.text(), st.integers(min_value=20, max_value=200))
@settings(max_examples=300)
def test_text_is_cut_to_its_escaped_length_and_is_never_empty(text: str, length: int) -> None:
    fitted = fit(text, length)
    assert 1 <= len(fitted.encode("utf-16-le")) // 2 <= length
    assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", fitted)
    assert fitted.endswith(CUT) or html.unescape(fitted) == (clean(text).strip() or "-")


words = st.one_of(st.text(max_size=40), st.text(alphabet="<&>😀\ud800\x00\n ", max_size=5000), st.just(HOSTILE))


@given(st.lists(st.tuples(words, words, st.sampled_from(News), st.integers(0, 3)), max_size=30), words)
@settings(max_examples=100)
def test_slack_takes_whatever_texts_are_made_of(parts: Sequence[tuple[str, str, News, int]], rule: str) -> None:
    entries = []
    for number, (one, two, news, firings) in enumerate(parts):
        ended = START if news in (News.RESOLVED, News.BRIEF) else None
        alert = make_alert(
            f"e{number}",
            rule=rule,
            summary=one,
            meaning=two,
            action=one,
            value_text=two,
            labels={one: two},
            ended_at=ended,
        )
        entries.append(Entry(alert, news, firings, two))
    for form in (full_message, short_message):
        answer = slack_judge(json.loads(json.dumps(form(notice(*entries, counted={rule: 3})))))
        assert answer.status == 200, answer.headers


def header(text: str) -> dict[str, Any]:
    return {"type": "header", "text": {"type": "plain_text", "text": text, "emoji": False}}


def section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "plain_text", "text": text, "emoji": False}}


def context(text: str) -> dict[str, Any]:
    return {"type": "context", "elements": [{"type": "mrkdwn", "text": text, "verbatim": True}]}
