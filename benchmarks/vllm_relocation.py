"""What relocating allocation costs vLLM in throughput: SmolLM2 on the CPU, relocating on against off, in ABBA order.

Two engines live in one process, both watched, one of which relocates. Each serves the same stream of requests with
shared prefixes, in a pool that is small enough for prefixes to be evicted, so that blocks are copied all the time. A
round of one engine takes some seconds; rounds alternate ABBA, and a pair's ratio is off / on, in CPU time of the
process, which other work on the machine disturbs least. The row `off/off` compares the two rounds of the engine that
does not relocate in the same way, and shows what noise alone looks like. Medians, with bootstrap intervals of 95 %.

    python benchmarks/vllm_relocation.py [--pairs 20] [--json FILE]

It runs in the environment that scripts/vllm_env.sh prints, with the model of scripts/smollm2.sh, and builds both when
they are not there.
"""

from __future__ import annotations

import argparse
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
BLOCKS = 40  # of 128 tokens
REQUESTS = 10  # a round
BAR = 0.97


class Served:
    """One engine, and its own copy of the stream of requests."""

    def __init__(self, allocation: str) -> None:
        from vllm import LLM, SamplingParams

        from engine_shim.adapters import vllm as adapter

        os.environ["KVATLAS_VLLM_ALLOCATION"] = allocation
        self.llm = LLM(
            model=os.environ["KVATLAS_BENCH_MODEL"],
            max_model_len=2048,
            num_gpu_blocks_override=BLOCKS,
            enforce_eager=True,
            disable_log_stats=True,
        )
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        (self.attachment,) = [one for one in adapter.attachments() if one.scheduler is scheduler]
        self._parameters = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
        self._dice = random.Random(9)
        self._shared = [[self._dice.randrange(1000, 40000) for _ in range(384)] for _ in range(6)]
        self.tokens: list[list[int]] = []
        self.served_tokens = 0

    def round(self) -> float:
        """CPU seconds of a round."""
        prompts: list[Any] = []
        for _ in range(REQUESTS):
            own = [self._dice.randrange(1000, 40000) for _ in range(self._dice.randrange(100, 500))]
            prompts.append({"prompt_token_ids": self._dice.choice(self._shared) + own})
        began = time.process_time()
        outputs = self.llm.generate(prompts, self._parameters, use_tqdm=False)
        spent = time.process_time() - began
        self.tokens += [list(output.outputs[0].token_ids) for output in outputs]
        self.served_tokens += sum(len(prompt["prompt_token_ids"]) + 12 for prompt in prompts)
        return spent


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the 95 % bootstrap interval of it."""
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[-51]


def measure(pairs: int) -> dict[str, Any]:
    """Everything; runs inside the environment with vLLM."""
    off, on = Served("stock"), Served("relocating")
    for engine in (off, on):
        engine.round()
    ratios: list[float] = []
    noise: list[float] = []
    for _ in range(pairs):
        first, second = off.round(), on.round()
        third, fourth = on.round(), off.round()
        ratios.append((first + fourth) / (second + third))
        noise.append(first / fourth)
    relocator = on.attachment.steering.relocator
    if relocator is None or relocator.reason or off.tokens != on.tokens:
        sys.exit(f"the run shows nothing: {relocator and relocator.reason!r}, same tokens {off.tokens == on.tokens}")
    median, low, high = interval(ratios)
    return {
        "pairs": pairs,
        "throughput": {"median": median, "low": low, "high": high, "bar": BAR, "met": high >= BAR},
        "off_off": dict(zip(("median", "low", "high"), interval(noise), strict=True)),
        "copied_blocks": relocator.copied,
        "tokens": on.served_tokens,
    }


def main() -> int:
    """Show the two rows; the exit status is 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="measure in this Python, which has vLLM")
    options = parser.parse_args()
    if not options.here:
        paths = {}
        for script in ("vllm_env.sh", "smollm2.sh"):
            found = subprocess.run([ROOT / "scripts" / script], stdout=subprocess.PIPE, text=True, check=False)
            if found.returncode:
                return found.returncode
            paths[script] = found.stdout.strip()
        with tempfile.TemporaryDirectory() as folder:
            metadata = Path(folder) / "kvatlas_shim-0.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvatlas-shim\nVersion: 0\n")
            entry = "[vllm.general_plugins]\nkvatlas = engine_shim.adapters.vllm:register\n"
            (metadata / "entry_points.txt").write_text(entry)
            environment = os.environ | {
                "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
                "KVATLAS_DIR": f"{folder}/maps",
                "KVATLAS_BENCH_MODEL": paths["smollm2.sh"],
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
            command = [paths["vllm_env.sh"], str(Path(__file__).resolve()), "--here", "--pairs", str(options.pairs)]
            command += ["--json", str(options.json.resolve())] if options.json else []
            return subprocess.run(command, env=environment, check=False).returncode
    result = measure(options.pairs)
    for name in ("throughput", "off_off"):
        row = result[name]
        print(f"{name:11} {row['median']:.3f}  {row['low']:.3f} to {row['high']:.3f}")
    print(f"{result['copied_blocks']} blocks copied for {result['tokens']} tokens, {result['pairs']} pairs")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["throughput"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
