# Shared by the scripts in this folder, which source it; POSIX sh. Not for running.

ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
CACHE=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/kvatlas

say() { printf '%s\n' "kvatlas: $*" >&2; }

# fail STATUS MESSAGE...
fail() {
    status=$1
    shift
    printf '%s\n' "error: $*" >&2
    exit "$status"
}

have() { command -v "$1" >/dev/null 2>&1; }

is_root() { [ "$(id -u)" = 0 ]; }

# missing_packages NAME... : prints those that dpkg does not have installed.
missing_packages() {
    for package in "$@"; do
        case $(dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null) in
            'install ok installed') ;;
            *) printf '%s ' "$package" ;;
        esac
    done
}

# install_packages NAME... : as root on Debian or Ubuntu installs what is missing, updating the lists once;
# elsewhere prints the one line that would, and returns 1.
install_packages() {
    if ! have apt-get || ! have dpkg-query; then
        say "install these with your system's package manager: $*"
        return 1
    fi
    wanted=$(missing_packages "$@")
    [ -n "$wanted" ] || return 0
    if ! is_root; then
        say "run this once, then try again:  sudo apt-get install -y $wanted"
        return 1
    fi
    say "installing system packages: $wanted"
    update_package_lists || return 1
    # shellcheck disable=SC2086 # a list of names
    run_quietly env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $wanted
}

update_package_lists() {
    [ -z "${PACKAGE_LISTS_UPDATED:-}" ] || return 0
    run_quietly apt-get update -q || return 1
    PACKAGE_LISTS_UPDATED=1
}

# run_quietly COMMAND... : shows what it printed only if it fails.
run_quietly() {
    if ! printed=$("$@" 2>&1 </dev/null); then
        printf '%s\n' "$printed" | tail -n 30 >&2
        say "failed: $*"
        return 1
    fi
}

# find_chromium : prints the path of a Chromium that the browser tests can drive, or nothing.
find_chromium() {
    for candidate in "${KVATLAS_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
        if [ -n "$candidate" ] && have "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}
