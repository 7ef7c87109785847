"""Samples and frames are there for thirty days, and not for longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent.history.entries import Frame
from agent.history.tiers import DAY

POOL = "engine.dp0.tp0.pp0.kv"
MakePast = Callable[..., Any]


def test_what_was_seen_is_there_for_thirty_days(make_past: MakePast) -> None:
    seen = make_past()
    first = seen.after(60)
    states = np.array([0, 1, 2, 3, 4] * 20, np.uint8)
    for _ in range(5):
        seen.history.append(POOL, seen.after(60), {"used": 7.0})
        seen.writer.put(Frame(POOL, seen.now, "a", 1, states))
        seen.write()
    seen.end()
    past = make_past(start_unix=seen.now)  # another agent: nothing of it is in memory
    for _ in range(29):
        past.after(DAY)
        past.write()
    points = past.history.query(POOL, "used", first, first + 360, 60)
    assert {point.mean for point in points if point.mean is not None} == {7.0}
    frame = past.reader.frame_at(POOL, first + 330)
    assert frame is not None
    assert frame.states.tolist() == states.tolist()
    for _ in range(3):
        past.after(DAY)
        past.write()
    assert past.reader.frame_at(POOL, first + 330) is None
    with pytest.raises(KeyError):
        past.history.query(POOL, "used", first, first + 360, 60)
