"""Real text for a language model, as its tokens; and what Transformers makes of the same tokens, to be compared with.

The text is the reference of the Python language, which every Python interpreter carries for `help()`
(pydoc_data/topics.py, © Python Software Foundation, licence PSF-2.0). The tokenizer runs in vLLM's environment, which
has one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

ROOT = Path(__file__).resolve().parent.parent

_TOKENIZE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
json.dump(tokenizer.encode(sys.stdin.read(), add_special_tokens=False).ids, sys.stdout)
"""
_LOSSES = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
tokens = torch.tensor(json.load(sys.stdin))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.inference_mode():
    logits = model(tokens[None, :-1]).logits[0]
json.dump(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none").tolist(), sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Text:
    """A text in tokens."""

    tokens: list[int]
    characters: int
    source: str
    sha256: str


def model_folder() -> Path:
    """SmolLM2-135M-Instruct, made by scripts/smollm2.sh where it is not there."""
    return Path(_output([str(ROOT / "scripts" / "smollm2.sh")]).strip())


def python_reference(model: Path) -> Text:
    """The topics of the language reference, in alphabetical order."""
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    tokens = json.loads(_in_vllm_environment(_TOKENIZE, model, text))
    source = f"the Python language reference as help() shows it, of Python {platform.python_version()} (PSF-2.0)"
    return Text(tokens, len(text), source, hashlib.sha256(text.encode()).hexdigest())


def losses_by_transformers(model: Path, tokens: list[int]) -> list[float]:
    """Negative log-likelihood in nats of each token but the first, in float32."""
    losses: list[float] = json.loads(_in_vllm_environment(_LOSSES, model, json.dumps(tokens)))
    return losses


def _in_vllm_environment(program: str, model: Path, text: str) -> str:
    python = _output([str(ROOT / "scripts" / "vllm_env.sh")]).strip()
    return _output([python, "-c", program, str(model)], text)


def _output(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {command[0]} ended with status {done.returncode}")
    return done.stdout
