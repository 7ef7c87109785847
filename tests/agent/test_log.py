"""Logs under a flood: subjects without number, and libraries that repeat themselves."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from agent.log import MAX_REMEMBERED, MAX_TEXTS, EventLog, RepeatFilter, configure_logging


@pytest.fixture
def stream(loggers: None) -> io.StringIO:
    """Where everything is logged to."""
    stream = io.StringIO()
    configure_logging("info", stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_more_subjects_than_are_remembered_are_no_news_at_each_turn(stream: io.StringIO) -> None:
    now = [0.0]
    log = EventLog(logging.getLogger("kvatlas.flood"), lambda: now[0])
    for turn in range(5):
        now[0] = float(turn)
        for index in range(MAX_REMEMBERED + 1000):
            log.on_change("unreadable", f"file {index}", "bad")
    said = lines(stream)
    assert len([one for one in said if one["event"] == "unreadable"]) == MAX_REMEMBERED
    assert [one["event"] for one in said if one["event"] != "unreadable"] == ["subjects left out"]


def test_a_subject_nobody_asked_about_lately_makes_room(stream: io.StringIO) -> None:
    now = [0.0]
    log = EventLog(logging.getLogger("kvatlas.flood"), lambda: now[0])
    for index in range(MAX_REMEMBERED):
        log.on_change("engine", f"old {index}", "gone")
    now[0] = 61.0
    log.on_change("engine", "old 0", "gone")  # still there, and so no news
    log.on_change("engine", "new", "live")
    assert len(lines(stream)) == MAX_REMEMBERED + 1
    assert lines(stream)[-1]["subject"] == "new"


def test_a_library_that_repeats_itself_is_heard_once_a_minute(stream: io.StringIO) -> None:
    loop = asyncio.new_event_loop()
    for _ in range(500):
        loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": OSError(24, "")})
    loop.close()
    (line,) = lines(stream)
    assert (line["logger"], str(line["event"]).splitlines()[0]) == ("asyncio", "socket.accept() out of system resource")


def test_what_was_left_out_is_counted() -> None:
    now = [0.0]
    repeats = RepeatFilter(lambda: now[0])

    def says(text: str) -> logging.LogRecord | None:
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, text, (), None)
        return record if repeats.filter(record) else None

    assert says("a\nfirst")
    assert says("b")
    assert [says("a\nsecond") for _ in range(7)] == [None] * 7
    now[0] = 60.0
    again = says("a\nthird")
    assert again is not None
    assert again.__dict__["fields"] == {"repeats_left_out": 7}


def test_texts_without_number_count_as_one() -> None:
    repeats = RepeatFilter(lambda: 0.0)
    heard = [
        repeats.filter(logging.LogRecord("asyncio", logging.ERROR, "", 0, f"socket {index}", (), None))
        for index in range(1000)
    ]
    assert sum(map(bool, heard)) == MAX_TEXTS + 1
