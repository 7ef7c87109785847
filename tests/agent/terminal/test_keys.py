"""Keys from bytes, in one piece and in several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.terminal.keys import Key, KeyReader


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", [Key.QUIT]),
        (b"jk", [Key.DOWN, Key.UP]),
        (b"\x1b[A\x1b[B", [Key.UP, Key.DOWN]),
        (b"\x1bOA\x1bOB", [Key.UP, Key.DOWN]),  # the application mode of cursor keys
        (b"p", [Key.PAUSE]),
        (b"\x1b[1;5Aj", [Key.DOWN]),  # Ctrl and an arrow is another key, and does not end as a letter
        (b"\x1b[200~j\x1b[201~", [Key.DOWN]),
        (b"\x1bq", [Key.QUIT]),  # escape alone means nothing
        ("äxq".encode(), [Key.QUIT]),
        (b"zy\r\n\t", []),
    ],
)
def test_keys(data: bytes, keys: list[Key]) -> None:
    assert KeyReader().feed(data) == keys


@given(st.lists(st.sampled_from([b"q", b"j", b"\x1b[A", b"\x1bOB", b"\x1b[5~", b"x"])), st.data())
def test_pieces_give_the_same_keys(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    reader, found, at = KeyReader(), [], 0
    while at < len(whole):
        size = data.draw(st.integers(1, len(whole) - at))
        found += reader.feed(whole[at : at + size])
        at += size
    assert found == KeyReader().feed(whole)


@given(st.binary(max_size=200))
def test_no_bytes_break_it(data: bytes) -> None:
    reader = KeyReader()
    for at in range(len(data)):
        reader.feed(data[at : at + 1])
    # An unfinished sequence ends in time: a letter that follows is read as one at last.
    assert Key.QUIT in [key for _ in range(40) for key in reader.feed(b"q")]
