#!/bin/sh
# For tests of deploy/docker: prints a bare root of this machine's own Debian, from the cache or made there, and on
# further lines the folders of this machine that pip's settings name. Needs root. Usage: scripts/image_roots.sh FOLDER,
# into which the settings of apt, pip and the network are copied, to be laid over the root.
set -eu
. "$(dirname -- "$0")/common.sh"

is_root || fail 2 "this needs root, for a root file system of its own"
have apt-get && have unshare && have setpriv || fail 1 "this needs a Debian or Ubuntu with util-linux"
bare_root
copy_settings "$1"
for path in $(pip_paths); do
    if [ -d "$path" ]; then
        printf '%s\n' "$path"
    elif [ -f "$path" ]; then
        copy_into "$1" "$path"
    fi
done
