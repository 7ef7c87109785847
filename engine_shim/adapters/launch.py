"""Starts somebody's Python program in this process, after an adapter was registered: for programs that stay unchanged.

    python -m engine_shim.adapters.ENGINE SCRIPT.py ARGUMENTS
    python -m engine_shim.adapters.ENGINE -m MODULE ARGUMENTS
    python -m engine_shim.adapters.ENGINE COMMAND ARGUMENTS

COMMAND is a script that a package installed beside this Python. The program sees its own arguments, name and path.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

EXIT_USAGE = 2


def run(name: str, register: Callable[[], None], arguments: Sequence[str]) -> int:
    """Call `register`, then run what `arguments` name as `__main__`; 2 with a line on stderr where that is nothing.

    What the program raises, SystemExit included, goes through.
    """
    usage = f"python -m {name} SCRIPT.py|COMMAND|-m MODULE [ARGUMENTS]"
    given = list(arguments)
    if not given or given[0] in ("-h", "--help"):
        print(f"Usage: {usage}\n\n{(__doc__ or '').split(chr(10), 1)[0]}", file=sys.stderr if not given else sys.stdout)
        return EXIT_USAGE if not given else 0
    if given[0] == "-m":
        if len(given) < 2:
            print(f"error: -m needs the name of a module; {usage}", file=sys.stderr)
            return EXIT_USAGE
        sys.argv = given[1:]
        sys.path[0] = os.getcwd()
        register()
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
        return 0
    script = _find(given[0])
    if script is None:
        print(f"error: {given[0]} is neither a file nor a command beside {sys.executable}; {usage}", file=sys.stderr)
        return EXIT_USAGE
    sys.argv = [str(script), *given[1:]]
    sys.path[0] = str(script.resolve().parent)
    register()
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _find(program: str) -> Path | None:
    """The file itself, else a command of that name in the folder of this Python."""
    for path in (Path(program), Path(sys.executable).parent / program):
        if path.is_file() and (path.parent != Path() or path.exists()):
            return path
    return None
