"""Keys from the bytes that a terminal sends, also where a sequence arrives in pieces. Pure."""

from __future__ import annotations

from enum import Enum


class Key(Enum):
    QUIT = "quit"
    UP = "up"
    DOWN = "down"
    PAUSE = "pause"


_LETTERS = {b"q": Key.QUIT, b"Q": Key.QUIT, b"k": Key.UP, b"j": Key.DOWN, b"p": Key.PAUSE, b"P": Key.PAUSE}
# Normal and application mode of the cursor keys (ECMA-48; xterm's control sequences).
_SEQUENCES = {b"\x1b[A": Key.UP, b"\x1b[B": Key.DOWN, b"\x1bOA": Key.UP, b"\x1bOB": Key.DOWN}
_LONGEST = 32  # of a sequence; what is longer is none


class KeyReader:
    """Feed it what was read; it keeps the beginning of a sequence until the rest has come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Key]:
        """Keys that are complete now; what means nothing is left out."""
        data, self._rest = self._rest + data, b""
        found: list[Key] = []
        at = 0
        while at < len(data):
            length = _length(data, at)
            if length is None:
                self._rest = data[at:] if len(data) - at < _LONGEST else b""
                break
            part = data[at : at + length]
            key = _LETTERS.get(part) or _SEQUENCES.get(part)
            if key is not None:
                found.append(key)
            at += length
        return found


def _length(data: bytes, at: int) -> int | None:
    """Bytes of the character or sequence that begins there; None where its end has not come yet."""
    if data[at] != 0x1B:
        return 1
    if at + 1 == len(data):
        return None
    if data[at + 1] == ord("O"):
        return 3 if at + 2 < len(data) else None
    if data[at + 1] != ord("["):
        return 1  # the escape key alone, and then something else
    for end in range(at + 2, len(data)):
        if 0x40 <= data[end] <= 0x7E:  # a final byte
            return end + 1 - at
    return None
