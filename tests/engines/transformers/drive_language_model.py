"""SmolLM2-135M answers questions with continuous batching: alone, and watched with its map compared at every step.

    python drive_language_model.py WORK_FOLDER

TEST_MODEL names the model's folder. The page size and the number of blocks are not Transformers' own, so that short
prompts fill several blocks and share some; all else is. Prints one line, `RESULT {...}`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generation import Generation, Log  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_shim.adapters import transformers as adapter

LOG = Log()
TEACHER = "You are a patient teacher of physics. Explain things step by step, with an example from a kitchen."
QUESTIONS = (
    "Why does warm air rise?",
    "What is a lever good for?",
    "Why is ice slippery?",
    "What makes a kettle sing?",
)
ANSWER_TOKENS = 16


def main() -> None:
    folder = os.environ["TEST_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    prompts: dict[str, list[int]] = {}
    for number, question in enumerate(QUESTIONS):
        talk = [{"role": "system", "content": TEACHER}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        prompts[f"question-{number}"] = tokenizer(text)["input_ids"]

    def generation() -> Generation:
        return Generation(model, blocks=64, answer=ANSWER_TOKENS, page_size=16, max_batch_tokens=128)

    alone = generation()
    assert alone.attachment is None
    expected = alone.serve(prompts)
    alone.stop()
    adapter.register()
    one = generation()
    truth = one.truth()
    one.at_each_step(truth.check)
    tokens = one.serve(prompts)
    one.rest()
    truth.check()
    snapshot = truth.blocks.read()
    report: dict[str, Any] = {
        **truth.report(),
        "same": tokens == expected,
        "answers": {name: tokenizer.decode(found) for name, found in tokens.items()},
        "counters": dict(snapshot.counters),
        "model": snapshot.identity.model == folder,
        "groups": [(group.kind, group.layers) for group in snapshot.groups],
        "block_bytes": snapshot.identity.block_bytes,
        "log": LOG.take(),
    }
    truth.processor = None
    one.stop()
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
