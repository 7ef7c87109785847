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
FOLDER=$FRESH_FOLDER
FREE_MIB_NEEDED=8000
CLONE=/srv/kvatlas # in the fresh root

# received_mib : what came over the network of this machine since it began.
received_mib() { awk '/:/ && $1 != "lo:" { sum += $2 } END { printf "%d", sum / 1048576 }' /proc/net/dev; }

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
    for command in "make demo ARGS='--seconds $SECONDS_OF_DEMO'" 'make test'; do
        say "in the fresh root: $command"
        began=$(date +%s)
        before=$(received_mib)
        if env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
            sh -c "set -a; while IFS= read -r line; do export \"\$line\"; done </tmp/environment; cd $CLONE && $command" </dev/null; then
            say "in the fresh root: $command: fine after $(($(date +%s) - began)) s"
        else
            say "in the fresh root: $command: FAILED after $(($(date +%s) - began)) s"
            status=1
        fi
        say "in the fresh root: received $(($(received_mib) - before)) MiB beside what this machine has for pip, \
$(du -sm "$CLONE/.venv" | cut -f1) MiB in the environment"
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
mkdir -p "$FOLDER"
free_mib=$(df -Pm "$FOLDER" | awk 'NR == 2 { print $4 }')
[ "$free_mib" -ge "$FREE_MIB_NEEDED" ] ||
    fail 1 "$free_mib MiB are free at $FOLDER and $FREE_MIB_NEEDED are needed: set FRESH_FOLDER to a roomier place"

base=$(bare_root)

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
[ -n "${FRESH_MIRROR:-}${FRESH_SUITE:-}" ] || rm -f "$root/etc/apt/sources.list"
copy_settings "$root"
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
