#!/bin/sh
# Runs every test. Arguments go to pytest. Exits non-zero when a test fails or could not be run.
# KVATLAS_TEST_ENGINES=0 leaves out those that run real engines, in an environment that vllm_env.sh builds in the cache.
# SGLang's are run where sglang_env.sh has built what they need; KVATLAS_TEST_SGLANG=1 builds it.
set -eu
. "$(dirname -- "$0")/common.sh"

cd "$ROOT"
# One OpenMP thread for each process: the tests run several engines, and two thread pools on two cores starve each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV/bin/python" -m pytest "$@"
