"""A program that knows nothing of us, run by our launcher: it generates, and says what it saw of the maps.

    python -m engine_shim.adapters.transformers drive_unchanged.py WORK_FOLDER

Prints one line, `RESULT {...}`.
"""

from __future__ import annotations

import json
import os
import sys

import tiny_models  # type: ignore[import-not-found]
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

if __name__ == "__main__":
    manager = tiny_models.make("full").init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(page_size=8, num_blocks=16, max_batch_tokens=64),
    )
    manager.add_request(list(range(3, 30)), request_id="one")
    manager.start()
    result = manager.get_result(timeout=600)
    folder = os.environ["KVATLAS_DIR"]
    seen = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    manager.stop(block=True)
    report = {
        "tokens": len(result.generated_tokens) if result else 0,
        "maps": seen,
        "maps_left": sorted(os.listdir(folder)) if seen else [],
        "arguments": [os.path.basename(sys.argv[0]), len(sys.argv)],
    }
    print("RESULT " + json.dumps(report), flush=True)
