#!/bin/sh
# Checks style, formatting and types of everything that is ours. Changes nothing.
set -eu
. "$(dirname -- "$0")/common.sh"

cd "$ROOT"
status=0
"$VENV/bin/python" -m ruff check . || status=1
"$VENV/bin/python" -m ruff format --check . || status=1
"$VENV/bin/python" -m mypy || status=1
"$VENV/bin/python" -m mypy --python-version 3.13 || status=1 # the tests run on the oldest Python, this is the newest
for script in scripts/*.sh; do
    sh -n "$script" || status=1
done
bash -n .ci/run || status=1
exit "$status"
