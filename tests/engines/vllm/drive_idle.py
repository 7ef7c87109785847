"""Turns the plugin off from another thread of an idle engine core's process.

    python drive_idle.py WORK_FOLDER

Prints one line, `RESULT {...}`. The worker runs in the engine core's process, which so can be told what to do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_model  # type: ignore[import-not-found]
from vllm import LLM, SamplingParams
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engine_shim.control.peer import SOCKET_SUFFIX

MAPS = Path(os.environ["KVATLAS_DIR"])


def turn_off_once_idle(_: Any) -> int:
    """In the engine core's process: by another thread, once the core waits for requests again."""
    import threading
    import time

    from engine_shim.adapters import vllm as adapter

    (attachment,) = adapter.attachments()
    waiting = attachment.steering.core.input_queue.not_empty._waiters

    def turn_off() -> None:
        while not waiting:
            time.sleep(0.01)
        adapter.turn_off("the operator said so")

    threading.Thread(target=turn_off, daemon=True).start()
    return len(adapter.attachments())


def main() -> None:
    llm = LLM(
        model=str(tiny_model.write(Path(sys.argv[1]) / "idle")),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=72,
        max_model_len=1024,
        seed=0,
        distributed_executor_backend=UniProcExecutor,  # by its name, vLLM would take another on the CPU
    )
    parameters = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)

    def tokens() -> list[int]:
        (output,) = llm.generate([{"prompt_token_ids": list(range(3, 90))}], parameters, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def files() -> list[str]:
        return sorted(one.suffix for one in MAPS.iterdir() if one.suffix in (".kvmap", SOCKET_SUFFIX))

    before, files_before = tokens(), files()
    watched = llm.collective_rpc(turn_off_once_idle)
    deadline = time.monotonic() + 60
    while files() and time.monotonic() < deadline:
        time.sleep(0.02)
    report = {"watched": watched, "files": [files_before, files()], "same": tokens() == before}
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
