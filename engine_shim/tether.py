"""Ties a process to its parent: when the parent ends, however it ends, the kernel sends the child a signal.

As a command, `python -m engine_shim.tether PARENT_PID COMMAND ...` ties any command: the setting outlives exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent_pid: int | None = None, signal_number: int = signal.SIGTERM) -> bool:
    """Ask the kernel for `signal_number` when the parent's thread that started us ends; False where it cannot.

    A parent that ended before the request would never be noticed: where `parent_pid` is given and no longer is our
    parent, the signal is raised at once.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        return False
    if parent_pid is not None and os.getppid() != parent_pid:
        signal.raise_signal(signal_number)
    return True


def main(arguments: Sequence[str]) -> int:
    """Tie this process to PARENT_PID and become COMMAND; returns an exit status only where that failed."""
    if len(arguments) < 2 or not arguments[0].isdigit():
        print("error: usage: python -m engine_shim.tether PARENT_PID COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    end_with_parent(int(arguments[0]))
    try:
        os.execvp(arguments[1], list(arguments[1:]))  # noqa: S606 - to become the command is the point
    except OSError as error:
        print(f"error: {arguments[1]} cannot be started: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
