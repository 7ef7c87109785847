"""The window that a pickle streams through, and the quick way over parts of it that are not wanted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from agent.allocator.errors import SnapshotError

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 4096
MAX_KEPT_TEXT = 64  # of a text in a part that is passed over: it may be a key that the rest refers to
MAX_KEPT_TEXTS = 65_536  # of those parts: names come first, and texts without end must not fill the memory
_LOW_BYTES = 4096  # fewer than this left: read on, so that a whole opcode is there


@dataclass(slots=True, eq=False)
class Skipped:
    """Stands for a value that was passed over. `entries`: it is a dict, or had one in it."""

    entries: bool = False


SKIPPED: Final = Skipped()  # for single values


class Window:
    """A part of the file at a time, read in order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.data = b""
        self.at = 0
        self._before = 0  # bytes of the file before `data`
        self._ended = False

    @property
    def offset(self) -> int:
        """Of the next byte, in the file."""
        return self._before + self.at

    def fill(self, wanted: int) -> None:
        """Have at least that many bytes ahead, where the file has them."""
        while len(self.data) - self.at < wanted and not self._ended:
            more = self._file.read(max(CHUNK_BYTES, wanted))
            self._before += self.at
            self.data, self.at = self.data[self.at :] + more, 0
            self._ended = not more

    def byte(self) -> int:
        """The next one. Raises SnapshotError where the file has ended."""
        at = self.at
        if at >= len(self.data):
            self.fill(1)
            at = self.at
            if at >= len(self.data):
                raise self.cut_short()
        self.at = at + 1
        return self.data[at]

    def take(self, size: int) -> bytes:
        """The next bytes, all of them. Raises SnapshotError where the file ends before."""
        end = self.at + size
        if end > len(self.data):
            self.fill(size)
            end = self.at + size
            if end > len(self.data):
                raise self.cut_short()
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def length(self, size: int) -> int:
        """An unsigned number of that many bytes."""
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        """The text up to the next newline, which is passed."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.fill(MAX_LINE_BYTES)
            end = self.data.find(b"\n", self.at)
        if not 0 <= end - self.at <= MAX_LINE_BYTES:
            raise SnapshotError("this is no whole pickle: a line does not end. Copy the file again")
        return self.take(end - self.at + 1)[:-1].decode("latin-1")

    def pass_over(self, size: int) -> None:
        """Leave out bytes without keeping them. Raises SnapshotError where the file ends before."""
        while size > len(self.data) - self.at:
            size -= len(self.data) - self.at
            self.at = len(self.data)
            self.fill(1)
            if self.at == len(self.data):
                raise self.cut_short()
        self.at += size

    def cut_short(self) -> SnapshotError:
        return SnapshotError(
            f"this is no whole pickle: it is cut short at byte {self._before + len(self.data):,}. Copy the file again"
        )


# Opcodes of fixed length that push or combine values. In a part that is passed over they mean nothing. A list or tuple
# and the place in the memo that it is put to (q, r) go together, since texts are kept by place.
_FIXED = rb"h.|j.{4}|K.|M..|J.{4}|G.{8}|[N\x88\x89as\x85-\x87]|\x95.{8}|[\])](?:q.|r.{4})" + b"".join(
    b"|\x8a\\x%02x.{%d}" % (size, size) for size in range(1, 10)
)
_RUN = re.compile(rb"(?:" + _FIXED + rb"){1,256}", re.DOTALL)
# An entry of a trace, as torch and Python write it: a dict of numbers and of texts that stand in the memo.
_ENTRY = re.compile(rb"\}(?:\x94|q.|r.{4}|)\((?:" + _FIXED + rb"){0,64}u", re.DOTALL)
_STARTS = b"hjKMJGNas\x88\x89\x85\x86\x87\x95"  # of what _RUN takes: left only where the file is cut short in them
_TEXTS = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8}  # by the bytes of their length
_BYTES = (0x43, 0x42, 0x8E)
_LINES = b"ILFVg"


class Passing:
    """The memo, and the way over parts that are not wanted, which must keep count of it."""

    def __init__(self, window: Window, max_depth: int, max_memo: int) -> None:
        self._window, self._max_depth, self._max_memo = window, max_depth, max_memo
        self.memo: dict[int, Any] = {}
        self._memoized = self._texts = 0
        self._puts = False

    def memoize(self, value: Any) -> None:
        """Keep a value at the next place."""
        self._keep(self._memoized, value)
        self._memoized += 1
        if self._puts:
            raise SnapshotError("refused: the pickle mixes two ways of numbering its memo, which no writer does")

    def put(self, place: int, value: Any) -> None:
        """Keep a value at a place of the file's choosing."""
        self._puts = True
        self._keep(place, value)
        if self._memoized:
            raise SnapshotError("refused: the pickle mixes two ways of numbering its memo, which no writer does")

    def get(self, place: int) -> Any:
        """What is kept there; SKIPPED for what was passed over."""
        return self.memo.get(place, SKIPPED)

    def _keep(self, place: int, value: Any) -> None:
        if len(self.memo) >= self._max_memo:
            raise SnapshotError(f"refused: more than {self._max_memo:,} values to refer to")
        self.memo[place] = value

    def run(self, into: Skipped) -> int:
        """From behind a mark to behind the opcode that closes it, which is returned.

        Raises NotPlain for an opcode that is refused in the parts that are kept as well.
        """
        window, depth = self._window, 1
        text: str | None = None  # the value just passed, where it is a short text
        while True:
            if len(window.data) - window.at < _LOW_BYTES:
                window.fill(_LOW_BYTES)
            data = window.data
            if entry := _ENTRY.match(data, window.at):
                self._memoized += data[window.at + 1] == 0x94
                window.at = entry.end()
                into.entries, text = True, None
                continue
            if run := _RUN.match(data, window.at):
                window.at, text = run.end(), None
                continue
            code = window.take(1)[0]
            if code == 0x28:  # MARK
                depth += 1
                if depth > self._max_depth:
                    raise SnapshotError(f"refused: nested more than {self._max_depth} deep, which no snapshot is")
            elif code in b"uetld1":
                depth -= 1
                into.entries = into.entries or code == 0x64
                if depth == 0:
                    return code
            elif code == 0x94:
                if text is not None and self._room_for_text():
                    self.memoize(text)
                else:
                    self._memoized += 1
            elif code in b"qrp":
                place = self.place(code)
                if text is not None and self._room_for_text():
                    self.put(place, text)
            elif code in _TEXTS:
                text = self._text(window.length(_TEXTS[code]), is_text=code not in _BYTES)
                continue
            elif code in _LINES:
                window.line()
            elif code == 0x7D:  # EMPTY_DICT
                into.entries = True
            elif code in b"\x8a\x8b":
                window.pass_over(window.length(1 if code == 0x8A else 4))
            elif code in _STARTS:
                raise window.cut_short()
            elif code not in b"])02":
                raise NotPlain(code)
            text = None

    def _room_for_text(self) -> bool:
        self._texts += 1
        return self._texts <= MAX_KEPT_TEXTS

    def place(self, code: int) -> int:
        """The place in the memo that an opcode that puts or gets names: on a line of its own, or in 1 or 4 bytes."""
        if code not in b"pg":
            return self._window.length(1 if code in b"qh" else 4)
        text = self._window.line()
        if len(text) > 12 or not text.isdecimal():
            raise SnapshotError("this is no whole pickle: it names no place in the memo. Copy the file again")
        return int(text)

    def _text(self, size: int, *, is_text: bool) -> str | None:
        if is_text and size <= MAX_KEPT_TEXT:
            return self._window.take(size).decode("utf-8", "replace")
        self._window.pass_over(size)
        return None


class NotPlain(Exception):
    """An opcode that is refused, in a part that was to be passed over."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
