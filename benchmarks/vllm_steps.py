"""What the plugin adds to vLLM's own CPU time a step, by the number of running requests.

Two engines live in one process, one of them watched. Both decode for as many requests, in turn, one step each; what is
counted is the CPU time of the thread within the scheduler's own methods, hooks and publish included, the model's not.
The tiny model of the tests runs on the CPU, so that many steps can be had; the scheduler does the same for a large one.

    python benchmarks/vllm_steps.py [--steps 120] [--json FILE]

It runs in the environment that scripts/vllm_env.sh prints, and builds that when it is not there.
"""

from __future__ import annotations

import argparse
import importlib
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
RUNNING = (4, 32, 128, 256)
PROMPT_TOKENS, BLOCK_TOKENS = 40, 32
METHODS = ("schedule", "get_grammar_bitmask", "update_from_output")


class Timed:
    """One engine, and the CPU time of its scheduler's methods in the step that was taken last."""

    def __init__(self, folder: Path, *, watched: bool, steps: int) -> None:
        sys.path.insert(0, str(ROOT / "tests" / "engines" / "vllm"))
        import tiny_model  # type: ignore[import-not-found]
        from vllm import LLM, SamplingParams

        if watched:
            os.environ.pop("KVATLAS_DISABLE", None)
        else:
            os.environ["KVATLAS_DISABLE"] = "1"
        self._llm: Any = LLM(
            model=str(tiny_model.write(folder)),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=max(RUNNING) * (-(-(PROMPT_TOKENS + 2 * steps) // BLOCK_TOKENS) + 1),
            max_num_seqs=max(RUNNING),
            max_model_len=1024,
            disable_log_stats=True,
            seed=0,
        )
        self._engine = self._llm.llm_engine
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self._parameters = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True, detokenize=False)
        self._spent = 0.0
        for name in METHODS:
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._spent += time.thread_time() - began

        return timed

    def begin(self, running: int) -> None:
        """As many requests run from here on, all past their prompts."""
        dice = random.Random(running)
        for number in range(running):
            prompt: Any = {"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(PROMPT_TOKENS)]}
            self._engine.add_request(f"{running}-{number}", prompt, self._parameters)
        while self.scheduler.waiting or any(one.num_output_tokens == 0 for one in self.scheduler.running):
            self._engine.step()

    def step(self) -> float:
        """Seconds of the next one."""
        self._spent = 0.0
        self._engine.step()
        return self._spent

    def end(self) -> None:
        self._engine.abort_request([one.request_id for one in self.scheduler.running], internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def measure(steps: int) -> dict[str, Any]:
    """Everything; runs inside the environment with vLLM."""
    from engine_shim.adapters import vllm as adapter
    from engine_shim.adapters.vllm.compiled import compile_store

    with tempfile.TemporaryDirectory() as folder:
        on = Timed(Path(folder) / "on", watched=True, steps=steps)  # first: plugins are loaded once
        off = Timed(Path(folder) / "off", watched=False, steps=steps)
        (attachment,) = adapter.attachments()
        importlib.import_module("numba")  # as in an engine core's own process
        if reason := compile_store(attachment.pools[0].observer, os.environ):
            print(f"not compiled: {reason}")
        rows = []
        for running in RUNNING:
            for engine in (off, on):
                engine.begin(running)
            pairs = [(off.step(), on.step()) if turn % 2 else (on.step(), off.step())[::-1] for turn in range(steps)]
            rows.append(
                {
                    "running": running,
                    "stock_ms": statistics.median(one for one, _ in pairs) * 1e3,
                    "added_ms": statistics.median(other - one for one, other in pairs) * 1e3,
                }
            )
            for engine in (off, on):
                engine.end()
        fault = attachment.pools[0].observer.reason
    return {"steps": steps, "rows": rows, "fault": fault, "load_average": os.getloadavg()[0]}


def main() -> int:
    """Show the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=120, help="of each engine, for each number of requests")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="measure in this Python, which has vLLM")
    options = parser.parse_args()
    if not options.here:
        found = subprocess.run([ROOT / "scripts" / "vllm_env.sh"], stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            return found.returncode
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
            sys.path.insert(0, str(ROOT))
            from agent.demo.plugin_folder import make_plugin_folder

            environment = os.environ | {
                "PYTHONPATH": str(make_plugin_folder(Path(folder) / "plugin")),
                "KVATLAS_DIR": f"{folder}/maps",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
            command = [found.stdout.strip(), str(Path(__file__).resolve()), "--here", "--steps", str(options.steps)]
            command += ["--json", str(options.json.resolve())] if options.json else []
            return subprocess.run(command, env=environment, check=False).returncode
    result = measure(options.steps)
    print(f"{'running':>8} {'scheduler, ms':>14} {'added, ms':>10}    load average {result['load_average']:.1f}")
    for row in result["rows"]:
        print(f"{row['running']:>8} {row['stock_ms']:>14.3f} {row['added_ms']:>10.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    if result["fault"]:
        print(f"the observer failed: {result['fault']}")
    return 1 if result["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
