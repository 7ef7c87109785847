"""A real terminal, as a program in it sees one."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 120.0
# Makes the terminal on standard input its own, as a login does, and becomes the program.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_CONTROL = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")


class Tty:
    """A pseudo-terminal with a program in it that it controls."""

    def __init__(self, command: list[str], environment: dict[str, str], columns: int, lines: int) -> None:
        self.master, self._slave = os.openpty()
        self.resize(columns, lines)
        self.mode_before = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *command],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            cwd=ROOT,
            env=environment,
        )
        self.output = b""

    @property
    def mode(self) -> list[Any]:
        """Settings of the terminal, as termios has them."""
        return termios.tcgetattr(self._slave)

    def resize(self, columns: int, lines: int) -> None:
        self.size = columns, lines
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self, seconds: float) -> bool:
        """What comes within that time, as soon as anything does; false where nothing does."""
        there = select.poll()  # select() knows no file above 1,023, and a long session may have many
        there.register(self.master, select.POLLIN)
        if not there.poll(1000 * seconds):
            return False
        self.output += os.read(self.master, 65536)
        return True

    def frame(self) -> list[str]:
        """Lines of the last picture that has come as a whole, without colours; none where none has in this size."""
        columns, lines = self.size
        for picture in reversed(self.output.decode(errors="replace").split("\x1b[H")[1:]):
            found = _CONTROL.sub("", picture).replace("\r", "").split("\n")
            if len(found) == lines and len(found[-1]) == columns:
                return [line.rstrip() for line in found]
        return []

    def await_frame(self, holds: Callable[[list[str]], bool]) -> list[str]:
        """The first picture from now on, or the last one, of which that is so."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (frame := self.frame()) or not holds(frame):
            left = deadline - time.monotonic()
            assert left > 0, "\n".join(frame)
            self.read(left)
        return frame

    def await_text(self, text: str) -> None:
        """Wait until the program has written that since the beginning."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text.encode() not in self.output:
            left = deadline - time.monotonic()
            assert left > 0, self.output
            self.read(left)

    def end(self) -> int:
        """The exit status, once the program has ended and everything that it wrote is read."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:  # reading all the time: who writes into a full terminal does not end
            assert time.monotonic() < deadline, self.frame()
            self.read(0.05)
        while self.read(0.0):
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)


@pytest.fixture
def start_tty() -> Iterator[Callable[..., Tty]]:
    """Starts programs in terminals of their own, by default of 80 columns and 24 lines, and closes these."""
    started: list[Tty] = []

    def start(*command: str, columns: int = 80, lines: int = 24, **environment: str) -> Tty:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVATLAS_", "LC_")) and name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        }
        given = {**inherited, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), **environment}
        started.append(Tty(list(command), given, columns, lines))
        return started[-1]

    yield start
    for one in started:
        one.close()
