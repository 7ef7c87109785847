#!/bin/sh
# Runs every test. Arguments go to pytest. Exits non-zero when a test fails or could not be run.
set -eu
. "$(dirname -- "$0")/common.sh"

cd "$ROOT"
# One OpenMP thread for each process: the tests run several engines, and two thread pools on two cores starve each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV/bin/python" -m pytest "$@"
