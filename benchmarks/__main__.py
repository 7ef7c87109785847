"""Runs the benchmarks beside this file one after another, shows their tables and keeps their results as JSON.

    python -m benchmarks [NAME ...] [--out FOLDER]

A benchmark is a script here that takes `--json FILE`. FOLDER/results.json holds all results and what they ran on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def names() -> list[str]:
    """Every benchmark, by the name of its script."""
    return sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def machine() -> dict[str, object]:
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
    }


def main() -> int:
    """Run what was asked for; the result is the exit status, 1 when a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks.")
    parser.add_argument("name", nargs="*", help=f"one of {', '.join(names())}; all by default")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "bench", help="folder for the JSON files")
    options = parser.parse_args()
    if unknown := sorted(set(options.name) - set(names())):
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(names())}")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {"schema": "kvatlas.benchmarks/v1", "machine": machine()}
    failed = []
    # One thread for each pool of workers: two pools on few cores measure each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for name in options.name or names():
        print(f"== {name}", flush=True)
        file = options.out / f"{name}.json"
        file.unlink(missing_ok=True)
        began = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
        status = subprocess.run(command, env=environment, cwd=HERE.parent, check=False).returncode
        print(f"== {name}: {'fine' if status == 0 else f'FAILED, exit {status}'}, {time.monotonic() - began:.0f} s\n")
        if status != 0:
            failed.append(name)
        elif file.exists():
            results[name] = json.loads(file.read_text())
    results["failed"] = failed
    (options.out / "results.json").write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    print(f"results: {options.out / 'results.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
