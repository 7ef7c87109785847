#!/bin/sh
# Makes the virtual environment that `make demo` or `make test` needs. Usage: scripts/setup.sh demo|test
#
# Does nothing when neither the pins nor the Python changed since it last succeeded.
# Settings: PYTHON (which interpreter), VENV (where), TORCH_INDEX (an index to take PyTorch from).
set -eu
. "$(dirname -- "$0")/common.sh"

PROFILE=${1:-test}
TORCH_INDEX=${TORCH_INDEX:-}
MINIMUM_FREE_MIB=3000     # the environment with a CPU build of PyTorch takes 1,800 MiB, pip's temporary files the rest
FULL_BUILD_FREE_MIB=12000 # PyTorch's default build for Linux brings the CUDA libraries
quiet=-q
[ ! -t 2 ] || quiet=''
case $PROFILE in
    demo) extras=agent,dashboard,engine ;;
    test) extras=dev ;;
    *) fail 2 "unknown set-up '$PROFILE': use demo or test" ;;
esac

version_fits() { "$1" -c 'import sys; sys.exit(not sys.version_info >= (3, 11))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# find_python : sets `python` to an interpreter that fits, and `venv_ready` when it can make environments.
find_python() {
    python='' venv_ready=''
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3.11 python3.12 python3.13 python3 # the tests run on the first
    fi
    for candidate in "$@"; do
        version_fits "$candidate" || continue
        if makes_venvs "$candidate"; then
            python=$candidate venv_ready=yes
            return
        fi
        [ -n "$python" ] || python=$candidate
    done
}

require_python() {
    find_python
    [ -z "${PYTHON:-}" ] || [ -n "$python" ] || fail 2 "PYTHON=$PYTHON is not a Python of version 3.11 or newer"
    if [ -z "$venv_ready" ]; then
        packages=python3-venv
        if [ -n "$python" ]; then
            say "$python lacks the venv or ensurepip module"
            packages=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        else
            say "no Python of version 3.11 or newer was found"
            packages='python3 python3-venv'
        fi
        # shellcheck disable=SC2086 # a list of names
        install_packages $packages || fail 2 "a Python with venv is needed; install it, or name one: make PYTHON=/path/to/python3"
        find_python
        [ -n "$venv_ready" ] || fail 2 "no Python 3.11 or newer with venv was found; name one: make PYTHON=/path/to/python3"
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))' ||
        say "warning: $("$python" --version) is newer than what is checked (3.11 to 3.13)"
}

require_space() {
    place=$VENV # or the nearest folder above it that is there
    while [ ! -d "$place" ]; do place=$(dirname "$place"); done
    free_mib=$(df -Pm "$place" | awk 'NR == 2 { print $4 }')
    if [ "$free_mib" -lt "$MINIMUM_FREE_MIB" ]; then
        fail 1 "$free_mib MiB are free at $place and $MINIMUM_FREE_MIB are needed: free some space, or set VENV to a roomier place"
    fi
    if [ -z "$TORCH_INDEX" ] && [ "$free_mib" -lt "$FULL_BUILD_FREE_MIB" ]; then
        say "warning: $free_mib MiB are free; PyTorch's default build may need $FULL_BUILD_FREE_MIB (TORCH_INDEX avoids that, see the README)"
    fi
}

announce() {
    if [ -n "$TORCH_INDEX" ]; then
        size='about 0.4 GB with a CPU build of PyTorch'
    else
        size='about 0.4 GB, or 3 GB where pip picks the build of PyTorch with CUDA (TORCH_INDEX avoids that, see the README)'
    fi
    say "set-up for '$PROFILE': downloads $size into $VENV, with $("$python" --version)"
    [ "$PROFILE" != test ] || [ "${KVATLAS_TEST_ENGINES:-}" = 0 ] ||
        say "'make test' then builds an environment with vLLM in $CACHE, about 3.5 GB (KVATLAS_TEST_ENGINES=0 leaves that out)"
}

# pip on stderr, with its progress where a person watches.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input $quiet "$@" >&2; }

make_environment() {
    if ! { [ -x "$VENV/bin/python" ] && version_fits "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
        "$python" -m venv --clear "$VENV"
    fi
    # The build tool is installed from its pin too, hence no build isolation below.
    pip install -c "$ROOT/constraints.txt" pip hatchling
    if [ -n "$TORCH_INDEX" ]; then
        # Only torch itself comes from that index; what it depends on comes from the default one, by its pins.
        pip install --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' "$ROOT/constraints.txt")"
    fi
    pip install -c "$ROOT/constraints.txt" --no-build-isolation -e "$ROOT[$extras]"
}

fingerprint() {
    { cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml"; echo "$ROOT $TORCH_INDEX"; "$VENV/bin/python" --version; } 2>/dev/null | cksum
}

is_current() {
    for profile in "$PROFILE" test; do # what the tests need includes what the demo needs
        if [ -f "$VENV/.kvatlas-$profile" ] && [ "$(cat "$VENV/.kvatlas-$profile")" = "$(fingerprint)" ]; then
            return 0
        fi
    done
    return 1
}

if ! is_current; then
    require_python
    require_space
    announce
    make_environment
    fingerprint >"$VENV/.kvatlas-$PROFILE"
    say "set-up for '$PROFILE' is done"
fi

if [ "$PROFILE" = test ]; then
    if [ -z "$(find_chromium)" ]; then
        install_packages chromium fonts-dejavu-core libatomic1 ||
            say "warning: without Chromium the browser tests cannot run, and 'make test' will say so and fail"
    elif have dpkg-query; then
        install_packages libatomic1 || say "warning: without libatomic1 Playwright may not start" # its Node.js needs it
    fi
    have cc || have gcc || have clang || install_packages gcc libc6-dev ||
        say "warning: without a C compiler the tests of devices, which build a library to stand in for NVML, will fail"
    "$ROOT/scripts/prometheus_tools.sh" >/dev/null ||
        say "warning: without promtool the tests of /metrics will fail"
fi
