"""Several variants of a driver in one start: all of them, or those that are named on the command line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def run_variants(*variants: Callable[[], Any]) -> None:
    """Print what they found as one line of JSON, by their names; what each took goes to stderr."""
    chosen = sys.argv[2:]
    results: dict[str, Any] = {}
    for variant in variants:
        if not chosen or variant.__name__ in chosen:
            began = time.monotonic()
            results[variant.__name__] = variant()
            print(f"{variant.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    print("RESULT " + json.dumps(results), flush=True)
