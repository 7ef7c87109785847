"""Starts SGLang's server, or another program that uses it, watched: see `engine_shim.adapters.launch`.

    python -m engine_shim.adapters.sglang -m sglang.launch_server --model-path MODEL

SGLang runs in several processes; those that it spawns find the entry point themselves, and inherit the variable.
"""

from __future__ import annotations

import os
import sys

from engine_shim.adapters.launch import run
from engine_shim.adapters.sglang.plugin import SWITCH, register

if __name__ == "__main__":
    os.environ.setdefault(SWITCH, "1")
    sys.exit(run("engine_shim.adapters.sglang", register, sys.argv[1:]))
