#!/bin/sh
# The checks that need a CUDA card, within eight minutes: the tests marked `gpu`, then the reference engine in both
# content modes. Needs Python 3.11 or newer with torch and NumPy (PYTHON names another one), and pytest for the tests.
# The figures are printed as one table; engine reports go to OUT (default: a temporary folder) as JSON.
# `gpu_check.sh vllm` checks the vLLM plugin instead, also within eight minutes, in a Python that has vLLM 0.32 and torch
# for CUDA: tokens, hits and evictions on the V1 and the V2 runner under async scheduling, and what it costs there.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$(mktemp -d)}
if [ "${1:-}" = vllm ]; then
    exec timeout 480 "$PYTHON" benchmarks/vllm_gpu.py --json "$OUT/vllm.json"
elif [ $# -gt 0 ]; then
    echo "error: $1 is no part of this check; give vllm, or nothing" >&2
    exit 2
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$PYTHON" - <<'PYTHON_END'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}; name one in PYTHON")
try:
    import numpy, torch
except ImportError as error:
    sys.exit(f"error: {error.name} is missing in {sys.executable}; name another Python in PYTHON")
if not torch.cuda.is_available():
    sys.exit(f"error: torch {torch.__version__} sees no CUDA card")
print(f"torch {torch.__version__}, NumPy {numpy.__version__}, {torch.cuda.get_device_name()}")
PYTHON_END

status=0
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    timeout 120 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/engine_shim/reference || status=1
else
    echo "error: no pytest in $PYTHON: the tests marked gpu were not run" >&2
    status=1
fi

# engine NAME SECONDS FLAGS...: one run to the end of its requests, without waiting for arrivals
engine() {
    name=$1 limit=$2
    shift 2
    if ! timeout "$limit" "$PYTHON" -m engine_shim.reference --engine-id "$name" --device cuda --virtual-time \
        --exit-when-done --map-folder "$OUT/maps" "$@" >"$OUT/$name.json" 2>"$OUT/$name.log"; then
        echo "error: $name failed:" >&2
        tail -5 "$OUT/$name.log" >&2
        status=1
    fi
}
engine pattern-llama-8b 120 --content pattern --model-geometry Llama-3.1-8B --blocks 30000 --requests 400 \
    --verify-every 50 --transfer-dir "$OUT/kv" --transfer-every 40
engine pattern-small 90 --content pattern --model-geometry stories260K --blocks 80000 --requests 400 --verify-every 50
engine model-smollm2 120 --content model --model-geometry SmolLM2-135M --blocks 20000 --requests 24 \
    --trace azure-conv
rm -rf "$OUT/kv"

"$PYTHON" - "$OUT" <<'PYTHON_END'
import json, pathlib, sys
print(f"{'run':18} {'requests':>8} {'KV GiB':>7} {'tokens/s':>10} {'steps/s':>8} {'verified':>12} {'wrong':>5} {'copies':>6} {'pinned seen':>11}")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    if text := path.read_text().strip():
        r = json.loads(text)
        wall = r["wall_seconds"]
        print(f"{path.stem:18} {r['served_requests']:8} {r['kv_bytes'] / 2**30:7.1f} {r['computed_tokens'] / wall:10,.0f} "
              f"{r['steps'] / wall:8.1f} {r['verified_tokens']:12,} {r['mismatched_blocks']:5} {r['copied_blocks']:6} "
              f"{'pinned' in r['states_seen']!s:>11}")
PYTHON_END
exit $status
