"""Starts real vLLM with settings as they are and as the advisor would have them, and tells the pools that come of it.

    python drive_advice.py WORK_FOLDER

The cases come from KVATLAS_TEST_ADVICE, a JSON object of name to {"config", "arguments"}. Prints one
line, `RESULT {...}`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM

WORK = Path(sys.argv[1])
KEPT: list[Any] = []  # an engine that is collected takes the process's communication groups with it


def start(name: str, case: dict[str, Any]) -> dict[str, Any]:
    folder = WORK / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case["config"]))
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        **case["arguments"],
    )
    KEPT.append(llm)
    core = llm.llm_engine.engine_core.engine_core
    cache = core.vllm_config.cache_config
    pool = core.scheduler.kv_cache_manager.block_pool
    return {
        "num_blocks": pool.num_gpu_blocks,
        "tokens": cache.kv_cache_size_tokens,
        "concurrency": cache.kv_cache_max_concurrency,
    }


def main() -> None:
    cases = json.loads(os.environ["KVATLAS_TEST_ADVICE"])
    print("RESULT " + json.dumps({name: start(name, case) for name, case in cases.items()}), flush=True)


if __name__ == "__main__":
    main()
