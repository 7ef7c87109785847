"""Checks the vLLM plugin where a card is: same tokens, hits and evictions on both runners, and what it costs there.

Serves one workload of a small random model from vLLM itself, in a process of its own each time: without the plugin,
observed, relocating, and with moves of live blocks every few steps, on the V1 and the V2 runner, with async scheduling
as vLLM has it by default. Moves are refused on V2, and the reason is shown. Times are of the same requests; the order
of the processes turns, so that a card that warms up favours none.

    python benchmarks/vllm_gpu.py [--rounds 2] [--device cuda|cpu] [--json FILE]

It runs in a Python that has vLLM 0.32, within eight minutes for two rounds. `benchmarks/gpu_check.sh vllm` calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "without": {"KVATLAS_DISABLE": "1"},
    "observed": {},
    "relocating": {"KVATLAS_VLLM_ALLOCATION": "relocating"},
    "moving": {"KVATLAS_VLLM_COMPACTION": "1"},
}
SECONDS = 110.0  # a process may take
TOTAL_SECONDS = 450.0  # all of them may take
ROUND_SECONDS = 180.0  # after which no further round is begun


def workload() -> list[tuple[str, list[int], int]]:
    """Prompts of 300 to 900 tokens that share prefixes, more than the pool holds."""
    dice = random.Random(3)
    shared = [[dice.randrange(3, 1000) for _ in range(256)] for _ in range(8)]
    return [
        (f"r{number}", dice.choice(shared) + [dice.randrange(3, 1000) for _ in range(dice.randrange(44, 644))], 32)
        for number in range(240)
    ]


def serve(device: str, folder: Path) -> dict[str, Any]:
    """One process's part."""
    sys.path.insert(0, str(ROOT / "tests" / "engines" / "vllm"))
    import tiny_model  # type: ignore[import-not-found]
    from vllm import LLM, SamplingParams

    from engine_shim.adapters import vllm as adapter
    from engine_shim.compaction.run import RunSettings

    size: dict[str, Any] = {} if device == "cuda" else {"block_size": 32, "enforce_eager": True, "dtype": "float32"}
    llm = LLM(
        model=str(tiny_model.write(folder / "model")),
        skip_tokenizer_init=True,
        num_gpu_blocks_override=1600 if device == "cuda" else 800,
        max_num_seqs=32,
        max_model_len=2048,
        seed=0,
        **size,
    )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    found = adapter.attachments()
    steering = found[0].steering if found else None
    compactor = steering.compactor if steering else None
    report: dict[str, Any] = {"steps": 0, "copies": 0}
    evicted: list[str] = []
    pool = scheduler.kv_cache_manager.block_pool
    evict, schedule = pool._maybe_evict_cached_block, scheduler.schedule

    def recorded(block: Any) -> Any:
        if block.block_hash is not None:
            evicted.append(bytes(block.block_hash).hex())
        return evict(block)

    def counted(*args: Any, **kwargs: Any) -> Any:
        report["steps"] += 1
        if compactor is not None and not compactor.active and report["steps"] % 4 == 0:
            compactor.start(RunSettings(target=0.0, verify=True, max_step_seconds=1.0))
        output = schedule(*args, **kwargs)
        report["copies"] += len(output.kv_cache_block_copies or ())
        return output

    pool._maybe_evict_cached_block, scheduler.schedule = recorded, counted
    tokens: dict[str, list[int]] = {}
    hits: dict[str, int] = {}
    waiting = workload()[::-1]
    began, computing = time.monotonic(), time.process_time()
    while waiting or engine.has_unfinished_requests():
        for name, prompt, length in [waiting.pop() for _ in range(min(2, len(waiting)))]:
            parameters = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            hits[output.request_id] = output.num_cached_tokens
    report |= {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - computing,
        "tokens": digest(sorted(tokens.items())),
        "hits": digest(sorted(hits.items())),
        "evicted": digest(evicted),
        "evictions": len(evicted),
        "runner": f"{type(core.model_executor.driver_worker.model_runner).__module__}",
        "async": bool(scheduler.vllm_config.scheduler_config.async_scheduling),
        "moved": steering.mover.moved if steering and steering.mover else 0,
        "off": (compactor.switch.reason if compactor else steering.no_compaction) if steering else "",
        "plugin": found[0].reason or "on" if found else "not attached",
        "relocator": (steering.relocator.reason or "on") if steering and steering.relocator else "",
    }
    return report


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def run(device: str, runner: str, mode: str, folder: Path, seconds: float) -> dict[str, Any]:
    """One process, for so long at most; its report, or what went wrong."""
    if seconds <= 0:
        return {"error": "no time was left"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVATLAS_")}
    environment |= MODES[mode] | {
        "KVATLAS_DIR": str(folder / "maps"),
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": os.pathsep.join((str(plugin(folder)), str(ROOT), environment.get("PYTHONPATH", ""))),
    }
    command = [sys.executable, __file__, "--serve", "--device", device, "--folder", str(folder)]
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=min(SECONDS, seconds), check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {min(SECONDS, seconds):.0f} s"}
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    if finished.returncode or not lines:
        return {"error": finished.stderr.strip()[-600:]}
    report: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return report


def plugin(folder: Path) -> Path:
    """The entry point as pip would install it."""
    place = folder / "plugin"
    metadata = place / "kvatlas_shim-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvatlas-shim\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nkvatlas = engine_shim.adapters.vllm:register\n")
    return place


def main() -> int:
    """Show the table; the exit status is 1 where tokens, hits or evictions differ, or a process failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        print("RESULT " + json.dumps(serve(options.device, options.folder)), flush=True)
        return 0
    runners = ("V1", "V2") if options.device == "cuda" else ("V1",)
    reports: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        for turn in range(options.rounds):
            if time.monotonic() - began > ROUND_SECONDS:
                break
            for runner in runners:
                names = list(MODES)[:: 1 if turn % 2 == 0 else -1]
                for mode in names:
                    left = TOTAL_SECONDS - (time.monotonic() - began)
                    report = run(options.device, runner, mode, Path(folder), left)
                    reports.setdefault((runner, mode), []).append(report)
    failed = False
    print(f"{'runner':7}{'mode':12}{'same':>6}{'seconds':>9}{'CPU s':>8}{'steps':>7}{'copies':>8}{'moves':>7}  notes")
    for (runner, mode), found in reports.items():
        errors = [one["error"] for one in found if "error" in one]
        if errors:
            failed = True
            print(f"{runner:7}{mode:12}  failed: {errors[0]}")
            continue
        base = [one for one in reports[(runner, "without")] if "error" not in one]
        same = (
            all(one[key] == base[0][key] for one in found for key in ("tokens", "hits", "evicted")) if base else False
        )
        failed |= not same
        median = {key: statistics.median(one[key] for one in found) for key in ("seconds", "cpu_seconds", "steps")}
        last = found[-1]
        notes = "; ".join(part for part in (last["runner"], "async" if last["async"] else "", last["off"]) if part)
        print(
            f"{runner:7}{mode:12}{'yes' if same else 'NO':>6}{median['seconds']:>9.2f}{median['cpu_seconds']:>8.2f}"
            f"{median['steps']:>7.0f}{last['copies']:>8}{last['moved']:>7}  {notes}"
        )
    if options.json:
        rows = [{"runner": runner, "mode": mode, "runs": found} for (runner, mode), found in reports.items()]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
