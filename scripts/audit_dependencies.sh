#!/bin/sh
# Audits what set-up installs: that every package is at its pin and all fit together, which licences they have, and,
# where the network allows, which have known vulnerabilities (pip-audit, from an environment of its own in the cache).
# Usage: scripts/audit_dependencies.sh [--offline]
set -eu
. "$(dirname -- "$0")/common.sh"

AUDITOR='pip-audit==2.9.0'

python=$VENV/bin/python
[ -x "$python" ] || fail 2 "there is no environment in $VENV: run 'make setup' first"
status=0
"$python" -m pip --disable-pip-version-check check || status=1
"$python" - "$ROOT/constraints.txt" <<'PROGRAM' || status=1
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

pins = dict(line.split("==") for line in Path(sys.argv[1]).read_text().split("\n") if "==" in line and line[0] != "#")
pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
wrong, rows = [], []
for one in distributions():
    name, version = re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(), one.version.partition("+")[0]
    if name in ("kvatlas", "pip", "setuptools"):
        continue
    if pins.get(name) != version:
        wrong.append(f"{name} {version}: {'no pin' if name not in pins else 'pinned at ' + pins[name]}")
    told = one.metadata
    kinds = [line.rpartition("::")[2].strip() for line in told.get_all("Classifier") or () if line.startswith("License")]
    licence = told.get("License-Expression") or ", ".join(kinds) or (told.get("License") or "").split("\n")[0][:60]
    rows.append((name, version, licence or "not told"))
for name, version, licence in sorted(set(rows)):
    print(f"{name:28}{version:18}{licence}")
print("\n".join(sorted(wrong)), file=sys.stderr)
sys.exit(bool(wrong))
PROGRAM
[ "${1:-}" != --offline ] || exit "$status"
auditor=$CACHE/pip-audit
if [ ! -x "$auditor/bin/pip-audit" ]; then
    say "fetching $AUDITOR into $auditor"
    "$python" -m venv --clear "$auditor"
    "$auditor/bin/pip" --disable-pip-version-check install -q "$AUDITOR" >&2 ||
        fail 1 "pip-audit could not be fetched; --offline leaves out what needs the network"
fi
# Not torch's own pin alone: of its builds with a local version no list of vulnerabilities knows.
"$auditor/bin/pip-audit" --no-deps --disable-pip --requirement "$ROOT/constraints.txt" || status=1
exit "$status"
