#!/bin/sh
# Runs `kvatlas demo-vllm` with a vLLM and a model from the cache, made where they are not there. Arguments go to it.
set -eu
. "$(dirname -- "$0")/common.sh"

python=$("$ROOT/scripts/vllm_env.sh")
model=$("$ROOT/scripts/smollm2.sh")
exec "$VENV/bin/kvatlas" demo-vllm --python "$python" --model "$model" "$@"
