"""Refreshes the page many times in a process of its own and prints what stays allocated, as JSON.

Usage: refreshing_process.py AGENT_URL WARM_UP REFRESHES KEPT_BYTES. After WARM_UP refreshes, when all is loaded
and cached, come REFRESHES, and then as many with KEPT_BYTES kept at each: a leak of that size must be seen.
Printed are two numbers: bytes by which Python and NumPy hold more after each of the two, as tracemalloc counts them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc
from pathlib import Path

from streamlit.testing.v1 import AppTest

import dashboard
from agent.client import DEFAULT_URL, AgentClient


def main() -> None:
    url, warm_up, refreshes, kept_bytes = sys.argv[1], *map(int, sys.argv[2:])
    os.environ["KVATLAS_AGENT_URL"] = url
    AgentClient.__init__.__defaults__ = (DEFAULT_URL, None, 60.0)  # a page without an answer is another page
    page = AppTest.from_file(str(Path(dashboard.__file__).parent / "app.py"), default_timeout=60)
    kept: list[bytearray] = []

    def held_after(turns: int, keep_bytes: int = 0) -> int:
        for _ in range(turns):
            page.run()
            kept.append(bytearray(keep_bytes))
        if page.exception or len(page.get("bidi_component")) != 3:
            raise SystemExit("the page does not show its two charts and its holders")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    before = held_after(warm_up)
    between = held_after(refreshes)
    print(json.dumps([between - before, held_after(refreshes, kept_bytes) - between]))


if __name__ == "__main__":
    main()
