"""`kvatlas top` on a terminal: one thread asks, the other draws and takes keys; the terminal is left as it was."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from agent.client import AgentRefused, AgentUnavailable
from agent.terminal.keys import Key, KeyReader
from agent.terminal.reading import Look
from agent.terminal.screen import Frame, columns_wanted, lay_out
from agent.terminal.words import Glyphs

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one attempt: a look, or why there is none."""

    asked: str | None  # the pool that was asked for
    look: Look | None
    problem: str = ""
    fault: Exception | None = None  # of ours


class Asker:
    """Asks in a thread of its own, so that an agent that does not answer keeps no key waiting."""

    def __init__(
        self,
        ask: Callable[[str | None, int], Look],
        explain: Callable[[Exception], str],
        interval_seconds: float,
        wake: Callable[[], None],
    ) -> None:
        """`ask` takes a pool and the columns of its bar; `wake` is called, in that thread, after each answer."""
        self._ask, self._explain, self._interval, self._wake = ask, explain, interval_seconds, wake
        self._news = threading.Condition()
        self._wanted: tuple[str | None, int] | None = None
        self._at_once, self._paused, self._ended = False, False, False
        self._answer: Answer | None = None
        self._thread = threading.Thread(target=self._run, name="asker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No further attempt; one that is under way is left to end by itself."""
        with self._news:
            self._ended = True
            self._news.notify()

    def want(self, pool: str | None, columns: int, *, paused: bool) -> None:
        """What to ask for from now on. What is new is asked for at once, even while paused."""
        with self._news:
            if (pool, columns) != self._wanted:
                self._wanted, self._at_once = (pool, columns), True
            self._paused = paused
            self._news.notify()

    def take(self) -> Answer | None:
        """The last answer, once."""
        with self._news:
            answer, self._answer = self._answer, None
            return answer

    def _next(self) -> tuple[str | None, int] | None:
        """Wait for the next attempt; None: there is none any more."""
        due = time.monotonic() + self._interval
        with self._news:
            while not self._ended and not self._at_once:
                idle = self._paused or self._wanted is None
                left = due - time.monotonic()
                if not idle and left <= 0:
                    break
                self._news.wait(None if idle else left)
            self._at_once = False
            return None if self._ended else self._wanted

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            pool, columns = wanted
            try:
                answer = Answer(pool, self._ask(pool, columns))
            except (AgentUnavailable, AgentRefused) as error:
                answer = Answer(pool, None, self._explain(error))
            except Exception as error:  # noqa: BLE001 - raised again in the main thread, where it ends the command
                answer = Answer(pool, None, fault=error)
            with self._news:
                self._answer = answer
            self._wake()


class Terminal:
    """The screen and the keyboard. Everything that is changed is put back at the end, whatever ends it."""

    def __init__(self, console: Console, keyboard: int | None) -> None:
        """`keyboard` is a descriptor of a terminal to read keys from; None: there is none."""
        self._console, self._keyboard = console, keyboard
        self._mode: list[Any] | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._keyboard is not None:
            self._mode = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard)  # keys come at once and are not echoed; Ctrl-C stays a signal
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):  # the terminal has gone: there is nothing to put back
                live.stop()
        mode, self._mode = self._mode, None
        if self._keyboard is not None and mode is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, mode)

    def size(self) -> tuple[int, int]:
        """Columns and lines now: of the terminal itself, since COLUMNS and LINES do not follow a change of it."""
        try:
            columns, lines = os.get_terminal_size(self._console.file.fileno())
        except OSError:
            columns, lines = 80, 24
        return columns or 80, lines or 24

    def show(self, lines: list[Text]) -> None:
        if self._live is None:
            return
        self._console.size = self.size()
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        self._live.update(Group(*lines), refresh=True)


class Signals:
    """Notes signals instead of acting on them, and makes a descriptor readable so that nobody need poll for them."""

    def __init__(self) -> None:
        self.ended_by = 0
        self.suspended = False
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        os.set_blocking(self._writes, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        for number in (*_ENDING, signal.SIGTSTP, signal.SIGWINCH):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def descriptor(self) -> int:
        return self._reads

    def wake(self) -> None:
        """From any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it is readable already
            os.write(self._writes, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reads, _READ_BYTES):
                pass

    def stop_here(self) -> None:
        """Stop as Ctrl-Z does, and come back when the process is continued."""
        self.suspended = False
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in _ENDING:
            self.ended_by = number
        elif number == signal.SIGTSTP:
            self.suspended = True


class Watch:
    """What the operator has chosen, and what is shown of the agent."""

    def __init__(self, asker: Asker, signals: Signals, glyphs: Glyphs, address: str, pool: str | None) -> None:
        self._asker, self._signals, self._glyphs, self._address = asker, signals, glyphs, address
        self._keys = KeyReader()
        self._pool, self._paused = pool, False
        self._answer = Answer(pool, None)

    def attend(self, terminal: Terminal, keyboard: int | None) -> bool:
        """Draw and take keys; true where the process is to be suspended, false where it is to end."""
        watched = [self._signals.descriptor] if keyboard is None else [self._signals.descriptor, keyboard]
        while True:
            self._draw(terminal, with_keys=keyboard is not None)
            ready, _, _ = select.select(watched, [], [])
            self._signals.clear()
            if keyboard in ready and not self._press(os.read(keyboard, _READ_BYTES)):
                return False
            if self._signals.ended_by:
                return False
            if self._signals.suspended:
                return True

    def _draw(self, terminal: Terminal, *, with_keys: bool) -> None:
        width, height = terminal.size()
        if (answer := self._asker.take()) is not None:
            self._note(answer)
        self._asker.want(self._pool, columns_wanted(width, height), paused=self._paused)
        shown = self._answer
        frame = Frame(shown.look, self._address, shown.problem, self._paused, keys=with_keys)
        terminal.show(lay_out(frame, self._glyphs, width, height))

    def _note(self, answer: Answer) -> None:
        if answer.fault is not None:
            raise answer.fault
        self._answer = answer
        # The pool that was shown first stays: a screen that jumps to whatever is worst cannot be read. An answer to
        # what was asked before a key was pressed changes nothing of the choice.
        if answer.look is not None and answer.asked == self._pool:
            self._pool = answer.look.chosen

    def _press(self, data: bytes) -> bool:
        """False where that ends it: q, or nothing, which is what a terminal that hung up reads as."""
        for key in self._keys.feed(data):
            if key is Key.QUIT:
                return False
            if key is Key.PAUSE:
                self._paused = not self._paused
            else:
                self._move(1 if key is Key.DOWN else -1)
        return bool(data)

    def _move(self, step: int) -> None:
        ids = self._answer.look.ids if self._answer.look is not None else []
        if ids:
            at = ids.index(self._pool) + step if self._pool in ids else 0
            self._pool = ids[min(len(ids) - 1, max(0, at))]


def watch(
    ask: Callable[[str | None, int], Look],
    explain: Callable[[Exception], str],
    *,
    console: Console,
    address: str,
    pool: str | None,
    glyphs: Glyphs,
    interval_seconds: float,
) -> int:
    """Show what the agent says until q or a signal; returns the exit status: 0, or 128 and the signal's number.

    Call it in the main thread, with a console on a terminal.
    """
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    with Signals() as signals:
        asker = Asker(ask, explain, interval_seconds, signals.wake)
        shown = Watch(asker, signals, glyphs, address, pool)
        asker.start()
        try:
            while True:
                with Terminal(console, keyboard) as terminal:
                    if not shown.attend(terminal, keyboard):
                        break
                signals.stop_here()
        finally:
            asker.stop()
        return 128 + signals.ended_by if signals.ended_by else 0
