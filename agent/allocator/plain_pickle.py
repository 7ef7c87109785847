"""Reads a pickle that holds nothing but plain values, from anybody, within bounds of memory and time.

A machine of its own rather than a restricted `pickle.Unpickler`, for three reasons: what a stranger's file asks for is
refused at the opcode, before anything is built; nothing is set aside by sizes that the file only claims, such as a memo
of two thousand million places; and parts that are not wanted (stacks and traces, nearly all of a large snapshot) are
passed over as they stream by, so that memory does not grow with the file. Values are None, booleans, numbers, text,
bytes, lists, tuples, and dicts with text as keys; opcodes are those of `pickletools`.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Final

from agent.allocator.errors import SnapshotError
from agent.allocator.skipping import SKIPPED, NotPlain, Passing, Skipped, Window

MAX_NUMBER_BYTES = 16
_MARK: Final = object()
_NAMES = {opcode.code.encode("latin-1")[0]: opcode.name for opcode in pickletools.opcodes}
# What would make anything but a plain value, or reach outside the file.
_DANGERS = frozenset(
    name
    for names in ("GLOBAL STACK_GLOBAL REDUCE BUILD INST OBJ", "NEWOBJ NEWOBJ_EX EXT1 EXT2 EXT4 PERSID BINPERSID")
    for name in names.split()
)


@dataclass(frozen=True, slots=True)
class PickleLimits:
    """What is refused beyond. Passed-over parts do not count for `values`."""

    values: int = 1_500_000  # members of lists, tuples and dicts, over the whole file
    waiting: int = 1_500_000  # values on the stack at once
    depth: int = 32  # lists in lists
    text_bytes: int = 1 << 20  # of one text; a longer one is passed over
    all_text_bytes: int = 32 << 20  # of all texts that are kept
    memo: int = 1_500_000


def load(file: BinaryIO, *, skip: Collection[str] = (), limits: PickleLimits | None = None) -> Any:
    """The value in a file that is open for reading bytes. Values of dict keys in `skip` become `Skipped`.

    Raises SnapshotError for anything that is not plain, is beyond the limits, or is no whole pickle; OSError where the
    file cannot be read.
    """
    return _Machine(Window(file), frozenset(skip), limits or PickleLimits()).run()


class _Machine:
    """The stack machine; one file's."""

    def __init__(self, window: Window, skip: frozenset[str], limits: PickleLimits) -> None:
        self._window, self._skip, self._limits = window, skip, limits
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._values = self._text_bytes = 0
        self._passing = Passing(window, limits.depth, limits.memo)
        self._actions: dict[int, Callable[[], None]] = {
            ord(code): action for code, action in self._plain_actions().items()
        }

    def _plain_actions(self) -> dict[str, Callable[[], None]]:
        take, byte, push = self._window.take, self._window.byte, self._push
        length, memo_get = self._window.length, self._passing.memo.get
        return {
            "N": lambda: push(None),
            "\x88": lambda: push(True),
            "\x89": lambda: push(False),
            "K": lambda: push(byte()),
            "M": lambda: push(int.from_bytes(take(2), "little")),
            "J": lambda: push(int.from_bytes(take(4), "little", signed=True)),
            "\x8a": lambda: push(self._long(byte())),
            "\x8b": lambda: push(self._long(length(4))),
            "I": self._int_line,
            "L": self._int_line,
            "F": self._float_line,
            "G": lambda: push(struct.unpack(">d", take(8))[0]),
            "V": self._text_line,
            "\x8c": lambda: push(self._text(byte())),
            "X": lambda: push(self._text(length(4))),
            "\x8d": lambda: push(self._text(length(8))),
            "C": lambda: push(self._bytes(take(1)[0])),
            "B": lambda: push(self._bytes(length(4))),
            "\x8e": lambda: push(self._bytes(length(8))),
            "]": lambda: self._push_container([]),
            "}": lambda: self._push_container({}),
            ")": lambda: push(()),
            "(": self._mark,
            "l": lambda: self._push_container(self._counted(self._since_mark())),
            "t": lambda: push(tuple(self._counted(self._since_mark()))),
            "d": self._dict,
            "\x85": lambda: self._tuple(1),
            "\x86": lambda: self._tuple(2),
            "\x87": lambda: self._tuple(3),
            "a": lambda: self._append([self._pop()]),
            "e": lambda: self._append(self._since_mark()),
            "s": self._set_item,
            "u": lambda: self._set_items(self._since_mark()),
            "0": self._pop_one,
            "1": self._pop_mark,
            "2": lambda: push(self._top()),
            "\x94": lambda: self._passing.memoize(self._top()),
            **{code: partial(self._put, ord(code)) for code in "qrp"},
            "h": lambda: push(memo_get(byte(), SKIPPED)),
            **{code: partial(self._get, ord(code)) for code in "jg"},
            "\x80": self._protocol,
            "\x95": lambda: self._window.pass_over(8),  # the length of a frame, which says nothing that is needed
        }

    def run(self) -> Any:
        window, actions = self._window, self._actions
        while (code := window.byte()) != 0x2E:  # STOP
            action = actions.get(code)
            if action is None:
                raise self._refusal(code)
            action()
        if len(self._stack) != 1 or self._marks:
            raise self._broken("it ends with values left over")
        return self._stack[0]

    def _refusal(self, code: int) -> SnapshotError:
        name = _NAMES.get(code)
        where = f"at byte {self._window.offset - 1:,}"
        if name is None or name == "STOP":
            return self._broken(f"0x{code:02x} {where} is not to be there")
        if name not in _DANGERS:
            return SnapshotError(f"refused: the pickle holds {name} {where}, which no snapshot of torch's has")
        asked = self._asked_for(name)
        return SnapshotError(
            f"refused: the pickle asks for {asked} ({name} {where}). A snapshot is lists, dicts, numbers and text "
            "alone; do not load this file with pickle either unless you know who made it"
        )

    def _asked_for(self, name: str) -> str:
        """What the file wants to call, as far as it says so itself."""
        if name in ("GLOBAL", "INST"):
            module, attribute = (_printable(self._window.line()) for _ in range(2))
            return f"{module}.{attribute}"
        if name == "STACK_GLOBAL":
            names = [one for one in self._stack[-2:] if isinstance(one, str)]
            return ".".join(_printable(one) for one in names) or "an object of some module"
        return "an object of its own making"

    def _broken(self, what: str) -> SnapshotError:
        return SnapshotError(f"this is no whole pickle: {what}. Dump the snapshot again, or copy the file again")

    # The stack.

    def _push(self, value: Any) -> None:
        if len(self._stack) >= self._limits.waiting:
            raise SnapshotError(f"refused: more than {self._limits.waiting:,} values at once; {_SMALLER}")
        self._stack.append(value)

    def _base(self) -> int:
        return self._marks[-1] if self._marks else 0

    def _top(self) -> Any:
        if len(self._stack) <= self._base():
            raise self._broken("it takes from an empty stack")
        return self._stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self._stack.pop()

    def _mark(self) -> None:
        if len(self._marks) >= self._limits.depth:
            raise SnapshotError(f"refused: nested more than {self._limits.depth} deep, which no snapshot is")
        if not self._unwanted():
            self._marks.append(len(self._stack))
            return
        unread = Skipped()
        try:
            closed_by = self._passing.run(unread)
        except NotPlain as error:
            raise self._refusal(error.code) from None
        if closed_by in b"tld":  # it was a value of its own
            self._push(unread)
        elif closed_by in b"ue":  # members of the one below
            self._append([unread])

    def _unwanted(self) -> bool:
        """Would a value that begins now be one of those to pass over, or inside one?"""
        below = self._stack[-1] if len(self._stack) > self._base() else None
        return isinstance(below, Skipped) or (isinstance(below, str) and below in self._skip)

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise self._broken("it looks for a mark that was not set")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _push_container(self, value: Any) -> None:
        self._push(Skipped(entries=isinstance(value, dict)) if self._unwanted() else value)

    # Containers.

    def _count(self, members: int) -> None:
        self._values += members
        if self._values > self._limits.values:
            raise SnapshotError(f"refused: more than {self._limits.values:,} values; {_SMALLER}")

    def _counted(self, values: list[Any]) -> list[Any]:
        self._count(len(values))
        return values

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Skipped):
            target.entries = target.entries or any(isinstance(one, Skipped) and one.entries for one in values)
        elif isinstance(target, list):
            self._count(len(values))
            target.extend(values)
        else:
            raise self._broken("it appends to what is no list")

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Skipped):
            return
        if not isinstance(target, dict) or len(values) % 2:
            raise self._broken("it sets items of what is no dict")
        self._count(len(values) // 2)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):  # others could be made to collide, a million at a time
                raise SnapshotError(f"refused: a dict with a key of type {type(key).__name__}, which no snapshot has")
            # A short tuple, or a value that stands elsewhere too, was there before its key was known.
            unread = key in self._skip and isinstance(value, list | dict | tuple)
            target[key] = Skipped(entries=bool(value)) if unread else value

    def _set_item(self) -> None:
        value = self._pop()
        key = self._pop()
        self._set_items([key, value])

    def _dict(self) -> None:
        values = self._since_mark()
        self._push_container({})
        self._set_items(values)

    def _tuple(self, size: int) -> None:
        values = self._counted([self._pop() for _ in range(size)])
        self._push(tuple(reversed(values)))

    def _pop_one(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._pop()

    def _pop_mark(self) -> None:
        self._since_mark()

    # Atoms.

    def _protocol(self) -> None:
        if (version := self._window.take(1)[0]) > 5:
            raise SnapshotError(f"this pickle is of protocol {version}; up to 5 is read")

    def _long(self, size: int) -> int:
        if size > MAX_NUMBER_BYTES:
            raise SnapshotError(f"refused: a number of {size:,} bytes, which no snapshot has")
        return int.from_bytes(self._window.take(size), "little", signed=True)

    def _text(self, size: int) -> Any:
        if size > self._limits.text_bytes:
            self._window.pass_over(size)
            return SKIPPED
        self._count_text(size)
        return self._window.take(size).decode("utf-8", "replace")

    def _bytes(self, size: int) -> Any:
        if size > self._limits.text_bytes:
            self._window.pass_over(size)
            return SKIPPED
        self._count_text(size)
        return bytes(self._window.take(size))

    def _count_text(self, size: int) -> None:
        self._text_bytes += size
        if self._text_bytes > self._limits.all_text_bytes:
            raise SnapshotError(f"refused: more than {self._limits.all_text_bytes:,} bytes of text; {_SMALLER}")

    def _int_line(self) -> None:
        text = self._window.line().removesuffix("L")
        if text in ("00", "01"):  # how the oldest protocol writes booleans
            self._push(text == "01")
            return
        if len(text) > 40 or not text.removeprefix("-").isdecimal():
            raise self._broken(f"{_printable(text)} is no number")
        self._push(int(text))

    def _float_line(self) -> None:
        text = self._window.line()
        try:
            self._push(float(text))
        except ValueError:
            raise self._broken(f"{_printable(text)} is no number") from None

    def _text_line(self) -> None:
        try:
            line = self._window.line()
            self._count_text(len(line))
            self._push(line.encode("latin-1").decode("raw-unicode-escape"))
        except UnicodeDecodeError:
            raise self._broken("a text is not encoded as it should be") from None

    def _put(self, code: int) -> None:
        self._passing.put(self._passing.place(code), self._top())

    def _get(self, code: int) -> None:
        self._push(self._passing.get(self._passing.place(code)))


_SMALLER = "dump a smaller one, such as torch.cuda.memory.memory_snapshot(include_traces=False)"


def _printable(text: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in text)
    return shown if len(shown) <= 80 else shown[:77] + "..."
