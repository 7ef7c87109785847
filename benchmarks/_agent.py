"""A real agent process for the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start(folder: Path, settings: Mapping[str, str] | None = None) -> tuple[subprocess.Popen[str], int]:
    """An agent that looks into `folder`, with default settings but for some variables, and the port it serves on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
    environment |= {"KVATLAS_DIR": str(folder), "PYTHONPATH": str(ROOT), **(settings or {})}
    command = [sys.executable, "-m", "engine_shim.launcher", "agent", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    line = process.stderr.readline()
    if not line or "address" not in (event := json.loads(line)):
        sys.exit(f"the agent did not start: {line.strip()}")
    # What it logs is read on, or it would stop at a full pipe.
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process, int(event["address"].rpartition(":")[2])
