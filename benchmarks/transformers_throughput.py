"""What watching Transformers' cache costs: tokens a second of SmolLM2-135M on the CPU, watched against not.

Both run in one process, in pairs whose order turns (ABBA), so that a machine that others use slows both alike. A second
row pairs not watched with not watched: what it says of one against one is the noise. A round generates for all requests
at once, with prefixes that they share; each is a new batch processor, whose cache and map are made before the clock
starts. The ratio's interval is a 95 % bootstrap over the pairs, of the geometric mean. Beside tokens a second stand
tokens a second of the process's own CPU time, which others on the machine disturb far less.

    python benchmarks/transformers_throughput.py [--pairs 12] [--json FILE]

It runs in the environment that scripts/vllm_env.sh prints, with the model of scripts/smollm2.sh, and makes both where
they are not there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.98
REQUESTS, PROMPT_TOKENS, SHARED_TOKENS, ANSWER_TOKENS = 6, 48, 32, 12
RESAMPLES = 4000


def prompts(vocabulary: int) -> list[list[int]]:
    """Random tokens; the first ones are the same in all."""
    dice = random.Random(9)
    shared = [dice.randrange(100, vocabulary) for _ in range(SHARED_TOKENS)]
    return [
        shared + [dice.randrange(100, vocabulary) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
        for _ in range(REQUESTS)
    ]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the ratios, and the 95 % interval of it over bootstrap resamples of the pairs."""
    logs = [math.log(ratio) for ratio in ratios]
    dice = random.Random(1)
    means = sorted(sum(dice.choices(logs, k=len(logs))) / len(logs) for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
    return math.exp(sum(logs) / len(logs)), math.exp(low), math.exp(high)


def measure(pairs: int, model_folder: str) -> dict[str, Any]:
    """Everything; runs inside the environment with Transformers."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from engine_shim.adapters import transformers as adapter

    adapter.register()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32").eval()
    wanted = prompts(model.config.vocab_size)
    shim_seconds = steps = 0.0

    def one(watched: bool) -> dict[str, float]:
        """Tokens a second of one round, and tokens a second of CPU time."""
        nonlocal shim_seconds, steps
        os.environ["KVATLAS_DISABLE"] = "0" if watched else "1"
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(page_size=16, num_blocks=96, max_batch_tokens=256),
        )
        manager.warmup()
        for prompt in wanted:
            manager.add_request(prompt)
        attachments = adapter.attachments()
        if bool(attachments) != watched:
            sys.exit("what was to be watched is not, or the other way round")
        began, began_cpu = time.perf_counter(), time.process_time()
        manager.start()
        answers = [manager.get_result(timeout=600) for _ in wanted]
        spent, spent_cpu = time.perf_counter() - began, time.process_time() - began_cpu
        if watched:
            counters = _counters(attachments[0])
            shim_seconds += counters["shim_cpu_ns"] / 1e9
            steps += counters["steps"]
        del attachments
        manager.stop(block=True)
        tokens = sum(len(answer.generated_tokens) for answer in answers)
        return {"tokens/s": tokens / spent, "tokens/CPU s": tokens / spent_cpu}

    one(True), one(False)  # the first ones load what the others find loaded
    ratios: dict[tuple[str, str], list[float]] = {}
    rates: list[float] = []
    for pair in range(pairs):
        for name, first in (("watched", True), ("not watched", False)):
            order = (first, False) if pair % 2 == 0 else (False, first)
            found = [one(watched) for watched in order]
            if pair % 2:
                found.reverse()
            for unit in found[0]:
                ratios.setdefault((name, unit), []).append(found[0][unit] / found[1][unit])
            rates.append(found[1]["tokens/s"])
    rows: list[dict[str, Any]] = []
    for (name, unit), values in ratios.items():
        mean, low, high = interval(values)
        rows.append({"what": name, "unit": unit, "ratio": mean, "low": low, "high": high})
    return {
        "transformers": version("transformers"),
        "pairs": pairs,
        "tokens_per_second": sum(rates) / len(rates),
        "rows": rows,
        "publish_milliseconds_a_step": 1000 * shim_seconds / steps,
        "bar": BAR,
        "met": rows[0]["high"] >= BAR,
    }


def _counters(attachment: Any) -> dict[str, int]:
    from engine_shim import MapReader

    return dict(MapReader(attachment.observer.path).read().counters)


def main() -> int:
    """Show the table; the result is the exit status, 1 where the interval does not reach the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", help="measure in this Python, which has Transformers, with the model in this folder")
    options = parser.parse_args()
    if not options.model:
        found = []
        for script in ("vllm_env.sh", "smollm2.sh"):
            run = subprocess.run([ROOT / "scripts" / script], stdout=subprocess.PIPE, text=True, check=False)
            if run.returncode:
                return run.returncode
            found.append(run.stdout.strip())
        command = [found[0], str(Path(__file__).resolve()), "--pairs", str(options.pairs), "--model", found[1]]
        command += ["--json", str(options.json.resolve())] if options.json else []
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=folder) as maps:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KVATLAS_DIR": maps}
            return subprocess.run(command, env={**environment, "HF_HUB_OFFLINE": "1"}, check=False).returncode
    result = measure(options.pairs, options.model)
    print(
        f"Transformers {result['transformers']}, SmolLM2-135M, {REQUESTS} requests at once, {result['pairs']} pairs, "
        f"{result['tokens_per_second']:.0f} tokens/s not watched; "
        f"publishing takes {result['publish_milliseconds_a_step']:.2f} ms CPU a step"
    )
    for row in result["rows"]:
        numbers = f"{row['ratio']:.3f}, 95 % {row['low']:.3f} to {row['high']:.3f}"
        print(f"{row['what']:>12} / not watched, {row['unit']:>12}: {numbers}")
    print(f"bar: the interval of the first row reaches {BAR}: {'met' if result['met'] else 'MISSED'}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
