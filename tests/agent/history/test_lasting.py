"""The history over memory and disk, against a plain list of samples; frames; ages; and the size that is kept."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent.history.entries import Frame, Line, Mark, Sample
from agent.history.model import Bucket
from agent.history.tiers import CHAINS, DAY, FRAME_TIERS, SAMPLE_TIERS

POOL = "engine.dp0.tp0.pp0.kv"
START_UNIX = 1_700_000_000.0  # as the fixture begins
Past = Any
MakePast = Callable[..., Any]


def model(samples: list[tuple[float, float]], start: float, end: float, step: float) -> list[Bucket]:
    """Buckets of a plain list, at whole steps."""
    first, last = math.floor(start / step), math.ceil(end / step)
    inside: dict[int, list[float]] = {}
    for time, value in samples:
        inside.setdefault(math.floor(time / step), []).append(value)
    buckets = []
    for index in range(first, last):
        some = inside.get(index)
        if some:
            buckets.append(Bucket(index * step, min(some), sum(some) / len(some), max(some)))
        else:
            buckets.append(Bucket(index * step, None, None, None))
    return buckets


def assert_equal(found: list[Bucket], wanted: list[Bucket]) -> None:
    assert [one.start_unix for one in found] == [one.start_unix for one in wanted]
    assert [(one.minimum, one.maximum) for one in found] == [(one.minimum, one.maximum) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.mean == (None if other.mean is None else pytest.approx(other.mean, rel=1e-4))


def feed(past: Past, seconds: int, samples: list[tuple[float, float]], interval: int = 1) -> None:
    rng = random.Random(len(samples))
    for number in range(seconds // interval):
        value = float(rng.randrange(1000))
        samples.append((past.after(interval), value))
        past.history.append(POOL, past.now, {"used": value})
        if number % 50 == 0:
            past.write()
    past.write()


@pytest.mark.parametrize(("back", "step"), [(600, 1), (1800, 10), (4000, 60), (7000, 20), (7000, 600), (100, 7)])
def test_a_restart_costs_nothing(back: float, step: float, make_past: MakePast) -> None:
    """Two agents, one after the other: the answer is that of one list of all their samples."""
    samples: list[tuple[float, float]] = []
    first = make_past()
    feed(first, 4003, samples)
    first.end()
    second = make_past(start_unix=first.now + 33)
    feed(second, 2000, samples)
    end = second.now
    found = second.history.query(POOL, "used", end - back, end, step)
    wanted = model(samples, end - back, end, step)
    if step in (1, 10, 60, 20, 600, 7) and back <= 3600:
        assert_equal(found, wanted)
    else:  # where only 10 s are kept, a bucket that is not made of whole ones is right to one of them
        assert_equal(found[1:], wanted[1:])
    # the negative control: what only the second agent has seen is less than that
    if back > 2100:
        assert second.memory.query(POOL, "used", end - back, end, step) != found


@pytest.mark.parametrize("step", [1, 10, 60])
def test_what_is_not_written_yet_comes_from_memory(step: float, make_past: MakePast) -> None:
    """An agent that has just started, and whose disk fails: its own samples are told beside those of the one before."""
    samples: list[tuple[float, float]] = []
    first = make_past()
    feed(first, 205, samples)
    first.end()
    second = make_past(start_unix=first.now + 4)
    for value in range(20):
        samples.append((second.after(1), float(value)))
        second.history.append(POOL, second.now, {"used": float(value)})
    end = second.now
    assert_equal(second.history.query(POOL, "used", end - 240, end + 1, step), model(samples, end - 240, end + 1, step))


def test_older_times_are_kept_ever_more_coarsely(make_past: MakePast) -> None:
    samples: list[tuple[float, float]] = []
    past = make_past()
    feed(past, 2 * 86_400, samples, interval=30)
    past.after(700)
    past.write()
    reader, end = past.reader, past.now
    for tier in SAMPLE_TIERS:
        rows = reader.rows(POOL, "used", tier, 0, end)
        assert rows is not None
        assert rows.starts[0] >= end - tier.keep_seconds - 60 - tier.step_seconds or tier.keep_seconds > 2 * DAY
    assert_equal(past.history.query(POOL, "used", START_UNIX, end, 600)[1:], model(samples, START_UNIX, end, 600)[1:])
    with pytest.raises(KeyError):
        past.history.query("nobody", "used", end - 10, end, 1)
    with pytest.raises(ValueError, match="no metric"):
        past.history.query(POOL, "colour", end - 10, end, 1)


def test_a_pool_that_left_is_still_known(make_past: MakePast) -> None:
    past = make_past()
    feed(past, 30, [])
    past.history.drop(POOL)
    assert past.memory.recent(POOL, "used", 60)[0].size == 0
    assert any(one.mean is not None for one in past.history.query(POOL, "used", past.now - 60, past.now, 1))


def frames_of(past: Past, seconds: int, size: int = 2000, changes: int = 5, restart_at: int = -1) -> dict[float, bytes]:
    """Put a frame a second; returns the states by time."""
    rng, kept = np.random.default_rng(3), {}
    states = rng.choice(3, size).astype(np.uint8)
    for second in range(seconds):
        states = states.copy()
        states[rng.integers(0, size, changes)] = rng.integers(0, 5)
        now = past.after(1)
        past.writer.put(Frame(POOL, now, "b" if 0 <= restart_at <= second else "a", second * 2, states))
        kept[now] = states.tobytes()
        if second % 20 == 0:
            past.write()
    past.write()
    return kept


def test_every_frame_that_is_kept_is_what_was_seen(make_past: MakePast) -> None:
    past = make_past()
    kept = frames_of(past, 3000, restart_at=1500)
    past.after(1)
    past.write()
    for back in (0, 0.5, 1, 59, 60, 61, 599, 700, 1000, 1490, 1510, 2990):
        at = past.now - 1 - back
        frame = past.reader.frame_at(POOL, at)
        assert frame is not None
        assert frame.states.tobytes() == kept[frame.time_unix]
        assert 0 <= at - frame.time_unix < (1.001 if back < 590 else 10)
        assert frame.incarnation == ("b" if frame.time_unix > START_UNIX + 1500 else "a")
        assert frame.previous_unix is None or frame.previous_unix < frame.time_unix
        assert frame.next_unix is None or frame.next_unix > frame.time_unix
    assert past.reader.frame_at(POOL, START_UNIX) is None
    assert past.reader.frame_range(POOL) == (START_UNIX + 1, START_UNIX + 3000)
    assert past.reader.frame_at("nobody", past.now) is None


def test_old_frames_thin_out(make_past: MakePast) -> None:
    past = make_past()
    frames_of(past, 2000, size=50)
    past.after(61)
    past.write()
    counts = dict(past.writer._database._connection.execute("SELECT tier, count(*) FROM frames GROUP BY tier"))
    assert counts[60] == 2000 // 60 + 1
    assert counts[10] == 2000 // 10 + 1
    assert counts[1] <= FRAME_TIERS[0].keep_seconds + 2 * CHAINS[0]


def test_frames_go_on_after_a_restart_and_a_clock_that_was_set_back(make_past: MakePast) -> None:
    first = make_past()
    kept = frames_of(first, 100)
    first.end()
    second = make_past(start_unix=first.now - 3600)
    kept |= frames_of(second, 70)
    for at, states in kept.items():
        frame = second.reader.frame_at(POOL, at)
        assert frame is not None
        assert (frame.time_unix, frame.states.tobytes()) == (at, states)


def test_a_clock_that_jumps_ahead_drops_nothing_at_once(make_past: MakePast) -> None:
    past = make_past()
    feed(past, 900, [])
    right = past.now
    past.now += 400 * DAY  # the wall clock alone
    for _ in range(5):
        past.history.append(POOL, past.after(60), {"used": 1.0})
        past.write()
    past.now -= 400 * DAY
    for _ in range(20):
        past.history.append(POOL, past.after(60), {"used": 2.0})
        past.write()
    rows = past.reader.rows(POOL, "used", SAMPLE_TIERS[2], 0, 2 * past.now)
    assert rows is not None
    assert rows.starts[0] <= right - 900 + 60  # all of it is there
    assert rows.starts[-1] <= past.now  # and by now, what was in the future is not
    assert rows.records["minimum"].max() >= 2.0


def test_a_clock_that_goes_evenly_drops_what_is_old(make_past: MakePast) -> None:
    """The negative control of the test above."""
    past = make_past()
    feed(past, 900, [])
    right = past.now
    for _ in range(20):
        past.after(3 * DAY)
        past.write()
    rows = past.reader.rows(POOL, "used", SAMPLE_TIERS[2], 0, right + 1)
    assert rows is None or rows.starts.size == 0


def test_marks_and_lines(make_past: MakePast) -> None:
    past = make_past()
    for number in range(10):
        past.writer.put(Mark(past.after(1), POOL if number % 2 else "", "decision", f"no. {number}", {"n": number}))
        past.writer.put(Line(f"line {number}"))
    past.writer.put(Mark(past.now, "other", "engine", "of another pool"))
    past.write()
    marks = past.reader.marks(POOL, START_UNIX + 3, past.now + 1)
    assert [one.text for one in marks] == [f"no. {number}" for number in range(2, 10)]
    assert marks[-1].detail == {"n": 9}
    assert [one.text for one in past.reader.marks(POOL, 0, past.now + 1, limit=3)] == ["no. 7", "no. 8", "no. 9"]
    assert past.reader.lines(2) == ("line 8", "line 9")


def test_the_size_is_kept(make_past: MakePast) -> None:
    """Frames of noise, nearly a megabyte in three tiers, to several times the size; the newest stay readable."""
    past = make_past(max_mib=32)
    rng = np.random.default_rng(1)
    size, biggest = 1_800_000, 0
    for number in range(16):
        states = rng.integers(0, 16, size).astype(np.uint8)
        past.writer.put(Frame(POOL, past.after(61), "a", number, states))
        past.writer.put(Sample(POOL, past.now, {"used": float(number)}))
        past.write()
        biggest = max(biggest, sum(one.stat().st_size for one in past.writer.path.parent.iterdir()))
    assert biggest <= 32 * 2**20
    assert past.writer.lost() == {"queue": 0, "disk": 0}
    frame = past.reader.frame_at(POOL, past.now)
    assert frame is not None
    assert np.array_equal(frame.states, states)
    assert frame.first_unix > START_UNIX + 100  # the oldest made room
    rows = past.reader.rows(POOL, "used", SAMPLE_TIERS[2], 0, past.now + 1)
    assert rows is not None
    assert rows.starts.size == 16  # and the samples did not
