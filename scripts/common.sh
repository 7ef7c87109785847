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

# Bare roots of this machine's own Debian or Ubuntu

FRESH_FOLDER=${FRESH_FOLDER:-$CACHE/fresh}
# What pip and TLS libraries take from the environment; passed on where set.
PASSED_ON='PIP_|TORCH_INDEX=|SSL_CERT_|REQUESTS_CA_BUNDLE=|CURL_CA_BUNDLE=|https?_proxy=|HTTPS?_PROXY=|no_proxy=|NO_PROXY='
APT_SETTINGS='/etc/apt/apt.conf /etc/apt/apt.conf.d /etc/apt/auth.conf.d /etc/apt/keyrings /etc/apt/preferences.d
    /etc/apt/trusted.gpg /etc/apt/trusted.gpg.d /usr/share/keyrings'

# Where apt takes this machine's packages from: "MIRROR SUITE", the first plain suite of its sources.
apt_source() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk '$3 == "main" && $2 !~ /-/ { print $1, $2; exit }'
}

# copy_into ROOT PATH... : copies what exists to the same place under ROOT, over what is there.
copy_into() {
    target=$1
    shift
    for path in "$@"; do
        [ -e "$path" ] || continue
        mkdir -p "$target$(dirname -- "$path")"
        cp -RLp -- "$path" "$target$(dirname -- "$path")/"
    done
}

# What pip's settings name on this machine: certificates and folders of wheels as they are; of an index on disk the
# folder around it, since its pages point to files beside it.
pip_paths() {
    for interpreter in "$VENV/bin/python" python3; do
        "$interpreter" -m pip config list 2>/dev/null && break
    done | tr "'\"= " '\n\n\n\n' | sed -n 's|^file://\(/[^ ]*\)/[^/ ][^/ ]*/*$|\1|p; s|^/[^ ][^ ]*$|&|p' | sort -u
}

# pip_settings : prints the settings files that pip reads here.
pip_settings() {
    printf '%s\n' /etc/pip.conf /etc/xdg/pip "${PIP_CONFIG_FILE:-/etc/pip.conf}"
}

# bare_root : prints the folder of a bare root of this machine's own distribution, made once and kept in the cache.
# Needs root.
bare_root() {
    source=$(apt_source)
    if [ -z "$source" ]; then # without package lists, as on a fresh system, apt tells no source either
        update_package_lists || return 1
        source=$(apt_source)
    fi
    mirror=${FRESH_MIRROR:-${source% *}}
    suite=${FRESH_SUITE:-${source#* }}
    [ -n "$mirror" ] && [ -n "$suite" ] || fail 2 "apt names no source of packages: set FRESH_MIRROR and FRESH_SUITE"
    mkdir -p "$FRESH_FOLDER"
    # One makes it, and whoever comes meanwhile waits.
    (
        flock 8
        [ -d "$FRESH_FOLDER/$suite" ] || make_base "$FRESH_FOLDER/$suite" "$mirror" "$suite"
    ) 8>"$FRESH_FOLDER/making" || exit 1
    printf '%s\n' "$FRESH_FOLDER/$suite"
}

make_base() {
    base=$1 mirror=$2 suite=$3
    have debootstrap || install_packages debootstrap || fail 1 "debootstrap is needed"
    say "making a bare root of $suite in $base"
    try_debootstrap || try_debootstrap || # once more, as a network may fail
        { tail -n 20 "$FRESH_FOLDER/debootstrap.log" >&2; fail 1 "debootstrap failed; its log is $FRESH_FOLDER/debootstrap.log"; }
    rm -f "$base.part"/var/cache/apt/archives/*.deb
    mv "$base.part" "$base"
}

try_debootstrap() {
    rm -rf "$base.part"
    debootstrap --variant=minbase --include=ca-certificates,git,make "$suite" "$base.part" "$mirror" \
        >"$FRESH_FOLDER/debootstrap.log" 2>&1
}

# copy_settings ROOT : what apt, pip and the network of this machine are set to.
copy_settings() {
    # Else debootstrap's own sources.list is the one that fits.
    [ -n "${FRESH_MIRROR:-}${FRESH_SUITE:-}" ] || copy_into "$1" /etc/apt/sources.list /etc/apt/sources.list.d
    # shellcheck disable=SC2046,SC2086 # lists of paths
    copy_into "$1" $APT_SETTINGS $(pip_settings) /etc/resolv.conf /etc/hosts /usr/local/share/ca-certificates \
        /etc/ssl/certs/ca-certificates.crt
    [ -z "${HOME:-}" ] || for path in .config/pip/pip.conf .pip/pip.conf; do
        if [ -f "$HOME/$path" ]; then
            mkdir -p "$1/root/$(dirname -- "$path")"
            cp "$HOME/$path" "$1/root/$path"
        fi
    done
}
