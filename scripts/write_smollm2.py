"""Writes a GGUF file with SmolLM2 as a model folder of safetensors. Run by smollm2.sh, in vLLM's environment.

python write_smollm2.py FOLDER_WITH_GGUF MODEL_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file  # type: ignore[import-not-found]  # only in vLLM's environment
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]


def main(source: Path, target: Path) -> None:
    (file,) = source.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    target.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    # The weights are plain numbers now, the head is the embedding's, and the folder that it came from is gone.
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str))
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
