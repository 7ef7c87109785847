"""The coder of frames: whatever the states are, they come back; and what is damaged is said to be."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.history.frames import FrameCorrupt, States, decode_frame, encode_frame, needs_before

few = st.integers(0, 4)
any_state = st.one_of(few, st.just(255), st.integers(0, 255))


@st.composite
def histories(draw: st.DrawFn) -> list[States]:
    """A pool over time: each frame is the one before, with anything from nothing to everything changed."""
    size = draw(st.one_of(st.integers(1, 40), st.integers(300, 700)))
    values = draw(st.sampled_from([few, any_state]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    frames = [rng.integers(0, 5, size).astype(np.uint8)]
    for _ in range(draw(st.integers(0, 6))):
        frame = frames[-1].copy()
        for block in rng.integers(0, size, round(draw(st.sampled_from([0.0, 0.01, 0.05, 0.3, 2.0])) * size)):
            frame[block] = draw(values) if block % 37 == 0 else rng.integers(0, 5)
        frames.append(frame)
    return frames


@given(histories())
def test_frames_come_back(frames: list[States]) -> None:
    kept, before = [], None
    for states in frames:
        kept.append(encode_frame(states, before))
        before = states
    assert not needs_before(kept[0])
    known: States | None = None
    for data, states in zip(kept, frames, strict=True):
        known = decode_frame(data, known)
        assert known.dtype == np.uint8
        assert np.array_equal(known, states)


def test_another_frame_before_gives_another_frame() -> None:
    """The negative control of the test above: a difference is really one."""
    before = np.zeros(1000, np.uint8)
    states = before.copy()
    states[500] = 2
    data = encode_frame(states, before)
    assert needs_before(data)
    other = before.copy()
    other[3] = 1
    assert not np.array_equal(decode_frame(data, other), states)


@pytest.mark.parametrize("changes", [0, 600, 6_000])
def test_what_changed_little_is_short(changes: int) -> None:
    rng = np.random.default_rng(5)
    before = rng.choice(3, 100_000).astype(np.uint8)
    states = before.copy()
    states[rng.integers(0, states.size, changes)] = 1
    assert len(encode_frame(states, before)) < 100 + 2 * changes
    assert len(encode_frame(states)) > 15_000  # entropy: log2(3) bits a block


def test_a_pool_of_unknown_blocks_is_kept() -> None:
    states = np.full(77, 255, np.uint8)
    assert np.array_equal(decode_frame(encode_frame(states)), states)


@given(st.binary(max_size=60))
def test_bytes_of_anything_are_refused(data: bytes) -> None:
    with pytest.raises(FrameCorrupt):
        decode_frame(data, np.zeros(100, np.uint8))


@given(st.integers(0, 400), st.integers(0, 400), st.booleans())
def test_damage_never_breaks_the_reader(cut: int, flip: int, changed: bool) -> None:
    before = np.arange(500, dtype=np.uint8) % 5
    states = before.copy()
    states[::70] = 4
    data = bytearray(encode_frame(states, before if changed else None))
    if flip < len(data):
        data[flip] ^= 0x41
    with suppress(FrameCorrupt):
        assert decode_frame(bytes(data[: max(0, len(data) - cut)]), before).size >= 1


def test_changes_without_the_frame_before_are_refused() -> None:
    before = np.zeros(100, np.uint8)
    data = encode_frame(before, before)
    with pytest.raises(FrameCorrupt, match="need the frame before, and none is there"):
        decode_frame(data)
    with pytest.raises(FrameCorrupt, match="that has 99"):
        decode_frame(data, before[1:])
