"""The `kvatlas` command's first step, from the standard library alone.

`version` works wherever engine_shim is; every other command lives in the agent's environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from typing import cast

from engine_shim.switches import switch

DISTRIBUTIONS = ("kvatlas", "kvatlas-shim")
EXIT_FAILED = 1
EXIT_USAGE = 2
VERSION_HELP = """Usage: kvatlas version [OPTIONS]

  Say which version this is, and of the allocation map.

Options:
  --json  Print one JSON object.  [env var: KVATLAS_JSON]
  --help  Show this message and exit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("version", "--version"):
        return _version(given[1:])
    if importlib.util.find_spec("agent") is None or importlib.util.find_spec("typer") is None:
        wanted = given[0] if given else "the full command"
        print(
            f"error: {wanted} needs the agent, which is not in this environment; "
            "install it in one of its own: pip install 'kvatlas[agent,dashboard]'",
            file=sys.stderr,
        )
        return EXIT_USAGE
    # By name, since engine_shim must not depend on the agent.
    run = cast("Callable[[list[str]], int]", importlib.import_module("agent.cli").main)
    return run(given)


def installed() -> dict[str, str]:
    """Versions of our distributions in this environment, by name; empty where run from a plain checkout."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _version(options: Sequence[str]) -> int:
    if "--help" in options:
        print(VERSION_HELP)
        return 0
    unknown = [option for option in options if option != "--json"]
    if unknown:
        print(f"error: version takes no {unknown[0]!r}; only --json", file=sys.stderr)
        return EXIT_USAGE
    return print_version(as_json=bool(options) or switch(os.environ, "KVATLAS_JSON"))


def print_version(*, as_json: bool) -> int:
    """Print the versions of this code, of the map's layout and of what is installed; returns the exit status."""
    from engine_shim import __version__
    from engine_shim.layout import MAJOR, MINOR

    if as_json:
        facts = {
            "schema": "kvatlas.version/v1",
            "version": __version__,
            "map_version": f"{MAJOR}.{MINOR}",
            "distributions": installed(),
            "python": sys.version.split()[0],
        }
        return _say(json.dumps(facts))
    return _say(f"kvatlas {__version__} (allocation map {MAJOR}.{MINOR})")


def give_up_output() -> None:
    """Standard output cannot be written to: what is left in its buffer must not fail again when Python ends."""
    with suppress(OSError):  # it may be no file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        give_up_output()
    except OSError as error:
        give_up_output()
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
