"""Runs a Python program with Transformers' continuous batching watched: see `engine_shim.adapters.launch`."""

from __future__ import annotations

import sys

from engine_shim.adapters.launch import run
from engine_shim.adapters.transformers.plugin import register

if __name__ == "__main__":
    sys.exit(run("engine_shim.adapters.transformers", register, sys.argv[1:]))
