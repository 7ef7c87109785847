"""Serves a real language model under vLLM's defaults: stock, relocating, and with moves of live blocks.

    python drive_language_model.py WORK_FOLDER

TEST_MODEL names the model's folder. Prints one line, `RESULT {...}`. Not vLLM's default are the number of blocks, as
many as let prefixes be evicted, and that the model is not compiled, which takes most of a minute for each start.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from pool_truth import faults_of_the_pool  # type: ignore[import-not-found]
from vllm import LLM, SamplingParams

from engine_shim import MapReader
from engine_shim.adapters import vllm as adapter
from engine_shim.compaction.run import RunSettings

BLOCKS = 24
TOPICS = (
    "You are a patient teacher of physics. Explain things step by step, with an example from a kitchen. ",
    "You write short, friendly letters on behalf of a small bookshop to its customers. ",
    "You are the narrator of a calm radio play that is set in a lighthouse on a northern coast. ",
)
QUESTIONS = (
    "Why does warm air rise?", "What is a lever good for?", "Who sails past tonight?", "What came in the post today?",
    "How does a pressure cooker work?", "Which book would you give a child of nine?", "What does the fog sound like?",
    "Why is ice slippery?",
)  # fmt: skip
KEPT: list[Any] = []


def prompts() -> list[str]:
    dice = random.Random(4)
    made = []
    for number in range(48):
        topic = TOPICS[number % 3] * 12  # a prefix of several blocks, which requests of a topic share
        made.append(topic + " ".join(dice.sample(QUESTIONS, 5)) * dice.randrange(1, 5))
    return made


def serve(allocation: str, compaction: str) -> dict[str, Any]:
    for old in adapter.attachments():
        old.stop("the next variant begins")
    os.environ |= {"KVATLAS_VLLM_ALLOCATION": allocation, "KVATLAS_VLLM_COMPACTION": compaction}
    llm = LLM(model=os.environ["TEST_MODEL"], max_model_len=2048, num_gpu_blocks_override=BLOCKS, enforce_eager=True)
    KEPT.append(llm)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (attachment,) = [one for one in adapter.attachments() if one.scheduler is scheduler]
    path = attachment.pools[0].observer.path
    assert path is not None
    reader = MapReader(path)
    pool = scheduler.kv_cache_manager.block_pool
    report: dict[str, Any] = {"evicted": [], "faults": [], "fragmentation": [], "copies": 0, "steps": 0}
    evict, schedule = pool._maybe_evict_cached_block, scheduler.schedule
    compactor = attachment.steering.compactor

    def recorded(block: Any) -> Any:
        if block.block_hash is not None:
            report["evicted"].append(bytes(block.block_hash).hex()[:16])
        return evict(block)

    def watched(*args: Any, **kwargs: Any) -> Any:
        report["steps"] += 1
        if compactor is not None and not compactor.active and report["steps"] % 4 == 0:
            compactor.start(RunSettings(target=0.0, max_step_seconds=5.0))
        output = schedule(*args, **kwargs)
        report["copies"] += len(output.kv_cache_block_copies or ())
        report["faults"] += faults_of_the_pool(scheduler)
        states = reader.read().states
        edges = np.flatnonzero(np.diff(np.concatenate(([0], (states < 2).astype(np.int8), [0]))))
        if len(edges):
            report["fragmentation"].append(float(1 - (edges[1::2] - edges[::2]).max() / (states < 2).sum()))
        return output

    pool._maybe_evict_cached_block, scheduler.schedule = recorded, watched
    began = time.monotonic()
    parameters = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts(), parameters, use_tqdm=False)
    snapshot = reader.read()
    return report | {
        "seconds": time.monotonic() - began,
        "texts": [output.outputs[0].text for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "fragmentation": float(np.median(report["fragmentation"])),
        "preemptions": snapshot.counters["preemptions"],
        "moved": snapshot.counters["live_moves"],
        "repairs": snapshot.counters["repairs"],
        "block_size": scheduler.block_size,
        "reason": attachment.reason,
    }


def main() -> None:
    logging.getLogger("kvatlas").setLevel(logging.ERROR)
    results = {
        "stock": serve("stock", "0"),
        "relocating": serve("relocating", "0"),
        "moving": serve("stock", "1"),
    }
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
