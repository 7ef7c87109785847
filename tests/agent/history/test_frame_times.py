"""The instants that a scrubber can go to, and the marks beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent.history.entries import Frame, Mark
from agent.history.reading import HistoryReader
from agent.web.history_routes import thin_out

Make = Callable[..., Any]
POOL = "engine.dp0.tp0.pp0.kv"


def test_every_instant_that_is_listed_has_its_own_frame(make_past: Make) -> None:
    """Over all tiers, each once, and around a gap: what the list says is what a frame can be had of."""
    past = make_past()
    states = np.zeros(64, np.uint8)
    written = []
    for second in range(1500):
        now = past.after(1)
        if not 700 <= second < 760:
            states = states.copy()
            states[second % 64] ^= 1
            past.writer.put(Frame(POOL, now, "a", 2 * second, states))
            written.append(now)
        if second % 50 == 0:
            past.write()
    past.after(61)
    past.write()
    listed = past.reader.frame_times(POOL, 0, past.now)
    assert np.all(np.diff(listed) > 0)
    assert set(listed.tolist()) <= set(written)
    assert listed[-1] == written[-1]
    assert listed.size < len(written)  # the oldest seconds are thinned out by now
    for time_unix in listed[:: listed.size // 25].tolist():
        assert past.reader.frame_at(POOL, time_unix).time_unix == time_unix
    first, last = past.reader.frame_range(POOL)
    assert (listed[0], listed[-1]) == (first, last)
    some = past.reader.frame_times(POOL, float(listed[40]), float(listed[50]))
    assert some.tolist() == listed[40:51].tolist()
    assert past.reader.frame_times("nobody", 0, past.now).size == 0


def test_one_who_goes_on_from_frame_to_frame_sees_what_one_who_asks_for_one_sees(make_past: Make) -> None:
    """Forward, back and forth, and after the file was replaced by one with the same numbers and other blocks."""
    past = make_past()
    rng = np.random.default_rng(5)

    def write(into: Any, incarnation: str) -> dict[float, bytes]:
        kept = {}
        for second in range(130):
            states = rng.integers(0, 3, 200).astype(np.uint8)
            into.writer.put(Frame(POOL, into.after(1), incarnation, 2 * second, states))
            kept[into.now] = states.tobytes()
        into.write()
        return kept

    def seen(reader: HistoryReader, at: float) -> bytes:
        frame = reader.frame_at(POOL, at)
        assert frame is not None
        assert frame.time_unix == at
        return frame.states.tobytes()

    began, kept = past.now, write(past, "a")
    times = sorted(kept)
    for at in (*times, *times[::-7], *rng.permutation(times)[:40].tolist()):
        assert seen(past.reader, at) == kept[at]
    last = times[-1]
    assert seen(past.reader, last) == kept[last]
    past.end()
    for path in past.writer.path.parent.glob("history.sqlite*"):
        path.unlink()
    again = make_past(past.writer.path.parent, start_unix=began)
    replaced = write(again, "b")
    assert sorted(replaced) == times
    assert seen(past.reader, last) == replaced[last] != kept[last]


def test_decisions_to_do_nothing_can_be_left_out(make_past: Make) -> None:
    past = make_past()
    for kind, text in (
        ("decision", "hold: hold_healthy, F 0.10 is not above 0.30"),
        ("decision", "compact: reached"),
        ("alert", "hold: a rule of that name fires"),
        ("engine", "the engine is live"),
    ):
        past.writer.put(Mark(past.after(1), POOL, kind, text))
    past.write()
    assert len(past.reader.marks(POOL, 0, past.now + 1)) == 4
    acted = past.reader.marks(POOL, 0, past.now + 1, holds=False)
    assert [one.kind for one in acted] == ["decision", "alert", "engine"]
    assert acted[0].text == "compact: reached"


@given(
    st.lists(st.integers(0, 10_000), unique=True, max_size=300).map(sorted),
    st.integers(1, 120),
)
def test_instants_are_thinned_out_evenly(times: list[int], limit: int) -> None:
    given_times = np.asarray(times, np.float64)
    step, chosen = thin_out(given_times, 0.0, 10_000.0, limit)
    assert chosen.size <= limit
    assert set(chosen.tolist()) <= set(times)
    if len(times) <= limit:
        assert (step, chosen.tolist()) == (0.0, times)
        return
    assert chosen[-1] == times[-1]
    assert np.all(np.diff(chosen) > 0)
    # Whatever is left out lies within a step of a later one that is not.
    following = chosen[np.searchsorted(chosen, given_times)]
    assert np.all(following - given_times <= step * (1 + 1e-9))
