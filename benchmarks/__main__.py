"""Runs the benchmarks beside this file one after another, and shows every bar that they have in one table.

    python -m benchmarks [NAME ...] [--all] [--out FOLDER] [-- OPTION ...]
    python -m benchmarks --table FOLDER

A benchmark is a script here that takes `--json FILE`. FOLDER/results.json holds all results and what they ran on, and
FOLDER/table.md the table. Without names the short ones run; `--all` adds the long ones. What stands behind `--` goes to
the one benchmark that is named. `--table` shows the table of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "bench"
SCHEMA = "kvatlas.benchmarks/v1"
# How long they take with their defaults on two idle cores, as far as that is known.
LONG = {
    "agent_cost": "10 minutes",
    "alert_latency": "5 minutes",
    "compaction": "some minutes",
    "dashboard": "7 minutes",
    "fleet": "4 minutes",
    "kv_quantization": "many minutes",
    "map_reader": "4 minutes",
    "soak": "7 minutes",
    "transformers_throughput": "some minutes",
    "vllm_relocation": "many minutes",
    "vllm_steps": "some minutes",
    "vllm_throughput": "8 minutes",
}
ELSEWHERE = {"vllm_gpu": "a CUDA card and vLLM in this Python"}  # what a benchmark needs that others do not


def names() -> list[str]:
    """Every benchmark, by the name of its script."""
    return sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def chosen(wanted: Sequence[str], *, everything: bool) -> list[str]:
    """The benchmarks to run: those that are named, else the short ones, or all that can be run anywhere."""
    if wanted:
        return list(wanted)
    return [name for name in names() if name not in ELSEWHERE and (everything or name not in LONG)]


def how_to_run() -> dict[str, str]:
    """Of each benchmark, with the time that it takes where that is long."""
    more = {name: f", {time_taken}" for name, time_taken in LONG.items()}
    more |= {name: f", needs {need}" for name, need in ELSEWHERE.items()}
    return {name: f"make bench ARGS={name}{more.get(name, '')}" for name in names()}


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


def run(wanted: Sequence[str], out: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run them; the results, which are written down after each, so that nothing is lost where one is interrupted."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "table.md"):  # what an earlier run wrote is not of this one
            (out / name).unlink(missing_ok=True)
        write(out / "results.json", "{}\n")
    except OSError as error:
        sys.exit(f"error: {out} cannot be written to: {error}; name another folder with --out")
    ran: list[str] = []
    failed: list[str] = []
    results: dict[str, Any] = {"schema": SCHEMA, "machine": machine(), "ran": ran, "failed": failed}
    # One thread for each pool of workers: two pools on few cores measure each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for name in wanted:
        print(f"== {name}", flush=True)
        file = out / f"{name}.json"
        file.unlink(missing_ok=True)
        began = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file), *options]
        status = subprocess.run(command, env=environment, cwd=HERE.parent, check=False).returncode
        outcome = "fine" if status == 0 else f"exit {status}, a bar was missed or it failed"
        print(f"== {name}: {outcome}, {time.monotonic() - began:.0f} s\n")
        ran.append(name)
        if status != 0:
            failed.append(name)
        try:
            if file.exists():  # also where it failed: that is how a bar is missed
                results[name] = parsed(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            print(f"error: {file} is not what a benchmark should write: {error}", file=sys.stderr)
            failed[:] = dict.fromkeys([*failed, name])
        write(out / "results.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    return results


def parsed(text: str) -> Any:
    """JSON without NaN and infinities, which would pass for any value; ValueError where it is none."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a result")

    return json.loads(text, parse_constant=refuse)


def write(file: Path, text: str) -> None:
    """All of it or nothing."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.replace(file)


def show(results: dict[str, Any], markdown: Path | None) -> bool:
    """Print the table, and write it as Markdown; whether no bar was missed or could not be read."""
    # Not before: this imports every benchmark, torch with them, which would lie in memory beside what is measured.
    from benchmarks._bar_table import Outcome, as_markdown, as_text, judge
    from benchmarks._bars import BARS, WITHOUT_A_BAR

    rows = judge(BARS, results)
    facts = results.get("machine", {})
    print(as_text(rows, facts, how_to_run()))
    print(f"Without a bar: {', '.join(WITHOUT_A_BAR)}.")
    if markdown is not None:
        write(markdown, as_markdown(rows, facts, how_to_run()))
    return not any(row.outcome in (Outcome.MISSED, Outcome.ERROR) for row in rows)


def read_results(folder: Path) -> dict[str, Any]:
    """What an earlier run wrote there; ends the program where that is nothing of the kind."""
    file = folder / "results.json"
    try:
        results = parsed(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        sys.exit(f"error: {file} cannot be read: {error}; name a folder that a run wrote to, such as {OUT}")
    shapes = {"schema": str, "machine": dict, "ran": list, "failed": list}
    fits = isinstance(results, dict) and all(isinstance(results.get(name), kind) for name, kind in shapes.items())
    if not fits or results["schema"] != SCHEMA:
        sys.exit(f"error: {file} is not of the schema {SCHEMA}; run the benchmarks again")
    return dict(results)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this program, and those of the one benchmark."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, passed_on = arguments[:cut], list(arguments[cut + 1 :])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [NAME ...] [--all] [--out FOLDER] [-- OPTION ...]\n       %(prog)s --table FOLDER",
        description="Run the benchmarks, and show every bar that they have in one table. Without names the short ones "
        f"run ({', '.join(chosen((), everything=False))}); the long ones run with --all or by name "
        f"({', '.join(f'{name}: {time_taken}' for name, time_taken in LONG.items())}), and "
        f"{', '.join(f'{name}, which needs {need}, by name' for name, need in ELSEWHERE.items())}. "
        "Those that compare with vLLM, SGLang or Transformers build an environment for them the first time. "
        "What stands behind -- goes to the one benchmark that is named. "
        "The exit status is 1 where a benchmark failed, or a bar was missed or could not be read.",
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help="benchmark to run; by default the short ones")
    parser.add_argument("--all", action="store_true", help="run the long ones too")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="for the JSON files and table.md")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="run nothing; show the table of an earlier run")
    options = parser.parse_args(own)
    if unknown := sorted(set(options.name) - set(names())):
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(names())}")
    if options.all and options.name:
        parser.error("--all runs everything: give it, or names")
    if options.table is not None and (options.all or options.name):
        parser.error("--table runs nothing: leave out --all and names")
    if passed_on and len(options.name) != 1:
        parser.error("options behind -- are for one benchmark: name it")
    return options, passed_on


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; the result is the exit status, 1 where a benchmark failed or a bar is not met."""
    options, passed_on = parse(sys.argv[1:] if arguments is None else arguments)
    if options.table is not None:
        results = read_results(options.table)
        fine = show(results, None)
        if results["failed"]:
            print(f"failed, or missed a bar: {', '.join(map(str, results['failed']))}", file=sys.stderr)
        return 0 if fine and not results["failed"] else 1
    try:
        results = run(chosen(options.name, everything=options.all), options.out, passed_on)
    except KeyboardInterrupt:
        print(f"interrupted; make bench ARGS='--table {options.out}' shows what had run by then", file=sys.stderr)
        return 130
    fine = show(results, options.out / "table.md")
    print(f"results: {options.out / 'results.json'}, table: {options.out / 'table.md'}")
    return 0 if fine and not results["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
