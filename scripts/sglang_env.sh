#!/bin/sh
# Prints a folder with SGLang's Python packages, for PYTHONPATH, to be used with the Python that vllm_env.sh prints: its
# PyTorch and Transformers serve both. Builds it when it is not there: some 300 MB in the cache, a minute.
#
# With --if-built it only looks: it prints nothing where the folder is not there, and exits 0.
# Settings: as of vllm_env.sh.
set -eu
. "$(dirname -- "$0")/common.sh"

# SGLang's server needs a GPU and a hundred packages; its allocators and its radix cache need these alone.
ALONE='sglang==0.5.23 gguf==0.19.0 torchvision==0.28.0'
WITH_THEIRS='ipython orjson==3.11.4'
FREE_MIB_NEEDED=1000

key=$(printf '%s' "$ALONE $WITH_THEIRS" | cksum | cut -d' ' -f1)
folder=$CACHE/sglang-$key

if [ ! -d "$folder" ]; then
    [ "${1:-}" != --if-built ] || exit 0
    python=$("$ROOT/scripts/vllm_env.sh")
    free_mib=$(df -Pm "$CACHE" | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge "$FREE_MIB_NEEDED" ] ||
        fail 1 "$free_mib MiB are free at $CACHE and $FREE_MIB_NEEDED are needed: set XDG_CACHE_HOME to a roomier place"
    say "making a folder with SGLang's packages in $folder (some 300 MB, a minute)"
    work=$(mktemp -d "$CACHE/sglang-making-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    pip() { "$python" -m pip --disable-pip-version-check --no-input install -q --target "$work/packages" "$@" >&2; }
    # shellcheck disable=SC2086 # lists of names
    pip $WITH_THEIRS
    # What PyTorch and vLLM bring already must not stand before theirs.
    (cd "$work/packages" && rm -rf psutil psutil-* typing_extensions* bin share)
    # shellcheck disable=SC2086
    pip --no-deps $ALONE
    # In one step, so that nobody finds half a folder; where somebody else was quicker, theirs is as good.
    mv -T "$work/packages" "$folder" 2>/dev/null || [ -d "$folder" ] || fail 1 "$folder cannot be made"
fi
printf '%s\n' "$folder"
