#!/bin/sh
# Runs both commands of the README in a bare root of this machine's own Debian or Ubuntu, from a clone of HEAD.
# Needs root. Usage: scripts/test_fresh.sh [SECONDS], how long the demo runs there (default 45).
#
# The bare root is made once with debootstrap and kept in the cache; each run works in a copy. All mounts live in a
# mount namespace of the run's own and its processes in a process namespace of its own, so that both end with it, even
# when it is killed; only the copy may then be left, and the next run removes it. The network is this machine's, and so
# are the settings of apt and pip.
#
# Settings: FRESH_FOLDER (where roots are kept), FRESH_MIRROR and FRESH_SUITE (default: as this machine's own apt).
set -eu
. "$(dirname -- "$0")/common.sh"

SECONDS_OF_DEMO=${1:-45}
FOLDER=${FRESH_FOLDER:-$CACHE/fresh}
FREE_MIB_NEEDED=8000
CLONE=/srv/kvatlas # in the fresh root
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

make_base() {
    base=$1 mirror=$2 suite=$3
    have debootstrap || install_packages debootstrap || fail 1 "debootstrap is needed"
    say "making a bare root of $suite in $base"
    rm -rf "$base.part"
    mkdir -p "$FOLDER"
    debootstrap --variant=minbase --include=ca-certificates,git,make "$suite" "$base.part" "$mirror" >"$FOLDER/debootstrap.log" 2>&1 ||
        { tail -n 20 "$FOLDER/debootstrap.log" >&2; fail 1 "debootstrap failed; its log is $FOLDER/debootstrap.log"; }
    rm -f "$base.part"/var/cache/apt/archives/*.deb
    mv "$base.part" "$base"
}

# Runs as the first process of the run's own namespaces.
inside() {
    root=$1
    mount --bind "$root" "$root" # a root to pivot to must be a mount
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777,size=6g tmpfs "$root/dev/shm"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    for path in $(pip_paths); do
        if [ -d "$path" ]; then
            mkdir -p "$root$path"
            mount --bind -o ro "$path" "$root$path"
        elif [ -f "$path" ]; then
            copy_into "$root" "$path"
        fi
    done
    env | grep -E "^($PASSED_ON)" >"$root/tmp/environment" || true
    # A real root and not a chroot, in which the kernel lets nobody make user namespaces, as some tests do.
    cd "$root"
    mkdir -p old-root
    pivot_root . old-root
    umount --lazy /old-root
    status=0
    for command in 'make test' "make demo ARGS='--seconds $SECONDS_OF_DEMO'"; do
        say "in the fresh root: $command"
        began=$(date +%s)
        if env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
            sh -c "set -a; while IFS= read -r line; do export \"\$line\"; done </tmp/environment; cd $CLONE && $command" </dev/null; then
            say "in the fresh root: $command: fine after $(($(date +%s) - began)) s"
        else
            say "in the fresh root: $command: FAILED after $(($(date +%s) - began)) s"
            status=1
        fi
    done
    return "$status"
}

if [ "${1:-}" = --inside ]; then
    shift
    SECONDS_OF_DEMO=$2
    inside "$1"
    exit
fi

is_root || fail 2 "this needs root, for mounts and a root of its own:  sudo make test-fresh"
have apt-get && have unshare && have setpriv || fail 1 "this needs a Debian or Ubuntu with util-linux"
source=$(apt_source)
mirror=${FRESH_MIRROR:-${source% *}}
suite=${FRESH_SUITE:-${source#* }}
[ -n "$mirror" ] && [ -n "$suite" ] || fail 2 "apt names no source of packages: set FRESH_MIRROR and FRESH_SUITE"
mkdir -p "$FOLDER"
free_mib=$(df -Pm "$FOLDER" | awk 'NR == 2 { print $4 }')
[ "$free_mib" -ge "$FREE_MIB_NEEDED" ] ||
    fail 1 "$free_mib MiB are free at $FOLDER and $FREE_MIB_NEEDED are needed: set FRESH_FOLDER to a roomier place"

base=$FOLDER/$suite
[ -d "$base" ] || make_base "$base" "$mirror" "$suite"

exec 9>"$FOLDER/lock"
flock --nonblock 9 || fail 1 "another test-fresh is running in $FOLDER"
root=$FOLDER/run
child=''
clean_up() {
    if [ -n "$child" ]; then
        kill -KILL "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    # Processes of the namespace may take a moment to be gone.
    rm -rf --one-file-system "$root" || { sleep 1; rm -rf --one-file-system "$root"; }
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
rm -rf --one-file-system "$root"
say "copying the bare root"
cp -a "$base" "$root"
if [ -z "${FRESH_MIRROR:-}${FRESH_SUITE:-}" ]; then # else debootstrap's own sources.list is the one that fits
    rm -f "$root/etc/apt/sources.list"
    copy_into "$root" /etc/apt/sources.list /etc/apt/sources.list.d
fi
# shellcheck disable=SC2046,SC2086 # lists of paths
copy_into "$root" $APT_SETTINGS $(pip_settings) /etc/resolv.conf /etc/hosts /usr/local/share/ca-certificates /etc/ssl/certs/ca-certificates.crt
[ -z "${HOME:-}" ] || for path in .config/pip/pip.conf .pip/pip.conf; do
    if [ -f "$HOME/$path" ]; then
        mkdir -p "$root/root/$(dirname -- "$path")"
        cp "$HOME/$path" "$root/root/$path"
    fi
done
git -C "$ROOT" diff --quiet HEAD || say "note: changes that are not committed are not tested"
git clone -q --no-hardlinks "$ROOT" "$root$CLONE"

# In the background, so that a signal is answered at once; it dies with this script however that ends.
setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --propagation private \
    "$0" --inside "$root" "$SECONDS_OF_DEMO" </dev/null &
child=$!
status=0
wait "$child" || status=$?
child=''
exit "$status"
