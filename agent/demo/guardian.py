"""Cleans up after a supervisor, however it ended, with the standard library only.

    python -m agent.demo.guardian FOLDER ... [--if-empty FOLDER ...]

Standard input names processes, one a line: `PID START_TICKS`. When it ends (the supervisor closed it, or was
killed), every named process that still runs is ended, with whatever it left in its own process group, and every folder
is removed; those after `--if-empty` only where nobody else has put something into them. It does so even where the
supervisor ended in good order, so this path is walked each time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

IF_EMPTY = "--if-empty"
TERM_SECONDS = 6.0  # longer than a server takes to end its open connections
KILL_SECONDS = 2.0
POLL_SECONDS = 0.05


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Field 22 of /proc/PID/stat, which tells a process from a later one with its pid; None where it has ended.

    A process that ended and was not yet waited for counts as ended.
    """
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])


def end_processes(
    named: Iterable[tuple[int, int]],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Ask (pid, start ticks) to end, wait, and kill what is left; later processes with such a pid are let alone."""
    left = [(pid, ticks) for pid, ticks in named if start_ticks(pid) == ticks]
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for pid, _ in left:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = clock() + seconds
        while left and clock() < deadline:
            left = [(pid, ticks) for pid, ticks in left if start_ticks(pid) == ticks]
            if left:
                sleep(POLL_SECONDS)


def end_groups(
    leaders: Iterable[int],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """End what is left of process groups whose leaders have ended: an engine's workers, where it was killed.

    A group whose leader runs is somebody else's, with a number that was given out anew. Python's trackers of shared
    memory remove what the others leave, and end by themselves once those have: they get their time.
    """
    wanted = set(leaders)
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS), (None, KILL_SECONDS)):
        deadline = clock() + seconds
        left = _members(wanted)
        for pid in left:
            if number is not None and not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        while left and clock() < deadline:
            left = _members(wanted)
            if left and all(_is_tracker(pid) for pid in left) and number is not None:
                break
            if left:
                sleep(POLL_SECONDS)
        if not left:
            return
    for pid in _members(wanted):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _members(groups: set[int], proc: Path = Path("/proc")) -> list[int]:
    """Processes of these groups that still run; none of a group that has its leader."""
    found: dict[int, list[int]] = {}
    for entry in proc.iterdir() if groups else ():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in ("Z", "X") and int(fields[2]) in groups:
                found.setdefault(int(fields[2]), []).append(int(entry.name))
    return [pid for group, members in found.items() if group not in members for pid in members]


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main(arguments: Sequence[str]) -> int:
    """Wait for the end of standard input, then clean up."""
    # The terminal's Ctrl-C and a shutdown's SIGTERM are for the supervisor; its end is what counts here.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    named = []
    for line in sys.stdin:
        pid, ticks = line.split()
        named.append((int(pid), int(ticks)))
    end_processes(named)
    end_groups(pid for pid, _ in named)
    cut = arguments.index(IF_EMPTY) if IF_EMPTY in arguments else len(arguments)
    for folder in arguments[:cut]:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in arguments[cut + 1 :]:
        with contextlib.suppress(OSError):  # gone, or in use
            os.rmdir(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
