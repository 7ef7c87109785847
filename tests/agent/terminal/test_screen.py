"""The screen for terminals of any size, from answers of the API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from agent import wire
from agent.terminal.reading import TREND_SECONDS, Look
from agent.terminal.screen import KEYS, Frame, columns_wanted, lay_out
from agent.terminal.words import ASCII, UNICODE, Glyphs

Make = Callable[..., Any]
ADDRESS = "http://127.0.0.1:9477"


def lines_of(frame: Frame, width: int = 80, height: int | None = None, glyphs: Glyphs = UNICODE) -> list[str]:
    return [line.plain for line in lay_out(frame, glyphs, width, height)]


def text_of(look: Look, **options: Any) -> str:
    return "\n".join(lines_of(Frame(look, ADDRESS), **options))


def requests_of(engine: wire.EngineSummary, *names: str) -> wire.RequestPage:
    held = [
        wire.Request(
            request_id=name,
            lora="",
            cache_salt="",
            tokens=40,
            blocks=3,
            exclusive_blocks=3,
            runs=2,
            tail_waste_tokens=8,
            age_seconds=12,
        )
        for name in names
    ]
    return wire.RequestPage(id=engine.id, sequence=2, total=len(held), requests=held)


def test_what_stands_on_it(engine: Make, alert: Make, look: Make) -> None:
    one = engine()
    points = [wire.HistoryPoint(time_unix=at, minimum=m, mean=m, maximum=m) for at, m in enumerate([0.1, None, 0.5])]
    history = wire.History(id=one.id, metric="fragmentation", step_seconds=TREND_SECONDS / 30, points=points)
    text = text_of(look([one], [alert()], requests=requests_of(one, "request-1"), trend=history))
    for expected in (
        "F 0.500 above 0.30, free alone 0.750",
        "▁ ▅ 0.100 to 0.500, rising",
        "longest run 4 (16 KiB) of 9 allocatable in 3 runs, headroom 1",
        "3 running, 1 waiting",
        "used 5 (31.2 %)",
        "pinned 1 (6.2 %)",
        "vllm 0.32 · org/model · policy vllm · 16 blocks x 16 tokens x 4 KiB",
        "warning  engine runs full, for 3 min",
        "  > Send it fewer requests.",
    ):
        assert expected in text
    (row,) = [line for line in text.splitlines() if line.startswith("request-1")]
    assert row.split() == ["request-1", "3", "2", "40", "12", "KiB", "12", "s"]
    assert "unknown" not in text


def test_the_title_of_a_replay_fits_80_columns(engine: Make, look: Make) -> None:
    shown = look([engine()])
    replay = wire.ReplayStatus.model_construct(file="demo.kvrec")
    told = shown.listing.model_copy(update={"agent": shown.listing.agent.model_copy(update={"replay": replay})})
    title = lines_of(Frame(replace(shown, listing=told), ADDRESS))[0]
    assert title.endswith("REPLAY of demo.kvrec")
    assert cell_len(title) <= 80


def test_the_worst_pool_comes_first(engine: Make, alert: Make, look: Make) -> None:
    calm, scattered = engine("calm", fragmentation=engine().fragmentation.model_copy(update={"rate": 0.1})), engine("f")
    waits = engine("waits", forecast=wire.Forecast(exhaustion_seconds=None, reason="", admission_blocked=True))
    hangs = engine("hangs", state="stalled", reason="no step")
    ids = [one.engine_id for one in look([calm, scattered, waits, hangs]).engines]
    assert ids == ["hangs", "waits", "f", "calm"]
    alerted = look([calm, scattered, waits, hangs], [alert("calm"), alert("f", severity="critical")])
    assert [one.engine_id for one in alerted.engines][:2] == ["f", "calm"]
    muted = look([calm, scattered], [alert("calm", state="muted"), alert("calm", state="pending")])
    assert muted.engines[0].engine_id == "f"  # nobody is to be woken by these
    assert "(muted)" in text_of(muted)


@pytest.mark.parametrize(
    ("forecast", "cell"),
    [
        ({"exhaustion_seconds": None, "reason": "r"}, "–"),
        ({"exhaustion_seconds": 30, "reason": "r"}, "30 s"),
        ({"exhaustion_seconds": 30, "headroom_seconds": 12, "reason": "r"}, "12 s"),
        ({"exhaustion_seconds": 30, "headroom_seconds": 0, "reason": "r"}, "now"),
        ({"exhaustion_seconds": None, "reason": "few samples", "known": False}, "?"),
        ({"exhaustion_seconds": 5, "reason": "r", "admission_blocked": True, "admission_reason": "x"}, "waits now"),
    ],
)
def test_when_it_is_full(forecast: dict[str, Any], cell: str, engine: Make, look: Make) -> None:
    found = look([engine(forecast=wire.Forecast(**forecast))])
    assert cell in lines_of(Frame(found, ADDRESS))[2]
    hangs = look([engine(state="stalled", reason="r", forecast=wire.Forecast(**forecast))])
    assert "–" in lines_of(Frame(hangs, ADDRESS))[2]  # its numbers are not those of now


def test_names_from_outside_control_nothing(engine: Make, alert: Make, look: Make) -> None:
    bad = "a\x1b[2Jb\nc\x9bd\u202ee\ud800f\u2028g"
    one = engine(model=bad, kind=bad, reason=bad, state="stalled")
    found = look([one], [alert(summary=bad, action=bad)], requests=requests_of(one, bad), missing={"map": bad})
    for glyphs in (UNICODE, ASCII):
        text = text_of(found, glyphs=glyphs, width=200)
        assert set(text) & {"\x1b", "\x9b", "\u202e", "\ud800", "\u2028"} == set()
        assert "a?[2Jb?c?d?e?f?g" in text
        text.encode(glyphs.encoding)
    assert any(not one.isascii() for one in text_of(found))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(width=st.integers(1, 200), height=st.integers(1, 70), pools=st.integers(0, 30), firing=st.integers(0, 12))
def test_any_size(width: int, height: int, pools: int, firing: int, engine: Make, alert: Make, look: Make) -> None:
    engines = [engine(f"engine-{at:02}-日本") for at in range(pools)]
    found = look(engines, [alert("x", started_unix=0.0) for _ in range(firing)])
    if engines:
        found = look(
            engines, found.alerts.open, chosen=engines[-1].id, requests=requests_of(engines[-1], *"abcdefghij")
        )
    lines = lines_of(Frame(found, ADDRESS, keys=True), width, height)
    assert len(lines) == height
    assert lines[-1] == KEYS
    assert columns_wanted(width, height) % 4 == 0
    if engines and height >= 4:
        assert sum(line.startswith(UNICODE.chosen) for line in lines) == 1  # the chosen one is always in sight
    if width >= 60 and height >= 24 and engines:
        assert all(cell_len(line) <= width for line in lines[1:3])


def test_a_usual_terminal_shows_something_of_everything(engine: Make, alert: Make, look: Make) -> None:
    engines = [engine(f"engine-{at}") for at in range(9)]
    found = look(engines, [alert(f"engine-{at}") for at in range(9)])
    found = look(engines, found.alerts.open, requests=requests_of(engines[0], *"abcdefgh"))
    lines = lines_of(Frame(found, ADDRESS, keys=True), 80, 24)
    assert len(lines) == 24
    assert all(cell_len(line) <= 80 for line in lines)
    assert any(line.startswith("  pool (") and "of 9)" in line for line in lines)
    assert any(line.startswith("alerts that fire (") for line in lines)
    assert any(line.startswith("warning ") for line in lines)
    assert any(line.startswith("a ") for line in lines)


def test_what_is_not_there_is_said(engine: Make, look: Make) -> None:
    assert "No engine found. The agent looks for allocation maps in /run/kvatlas." in text_of(look([]))
    assert "other is not listed" in text_of(look([engine()], chosen="other"))
    asleep = text_of(look([engine(state="sleeping")]))
    assert "No blocks are shown: the engine is sleeping." in asleep
    assert "longest run" not in asleep
    lacking = text_of(look([engine()], alerts=None, missing={"alerts": "busy", "map": "gone"}))
    assert "alerts not known: busy" in lacking
    assert "no map: gone" in lacking
    assert "no alert fires" not in lacking


def test_without_an_answer_no_number_is_shown() -> None:
    waiting = lines_of(Frame(None, ADDRESS, keys=True), 80, 24)
    assert waiting[1] == "asking the agent ..."
    failed = lines_of(Frame(None, ADDRESS, "no answer", keys=True), 80, 24)
    assert failed[1] == "no answer"
    assert "asked again" in failed[2]
    assert failed[-1] == KEYS
