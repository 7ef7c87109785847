#!/bin/sh
# Prints a folder that holds promtool, prometheus, amtool and alertmanager, unpacking Debian's packages into the
# cache when they are not there yet. They are neither installed nor started, and no root is needed. Start alertmanager
# in that folder: unpacked, it finds its templates there.
set -eu
. "$(dirname -- "$0")/common.sh"

TOOLS='promtool prometheus amtool alertmanager'
TEMPLATES='default.tmpl email.tmpl'
# Where Debian's alertmanager looks for its templates, and as many characters for the folder that it is started in.
TEMPLATE_FOLDER=/usr/share/prometheus/alertmanager
STARTED_IN=./././././././././././././././././

holds_tools() {
    for tool in $TOOLS; do
        [ -x "$1/$tool" ] || return 1
    done
}

holds_templates() {
    for template in $TEMPLATES; do
        [ -f "$1/$template" ] || return 1
    done
}

for folder in "$CACHE/prometheus-tools/bin" /usr/bin /usr/local/bin; do
    if holds_tools "$folder" && { [ "$folder" != "$CACHE/prometheus-tools/bin" ] || holds_templates "$folder"; }; then
        printf '%s\n' "$folder"
        exit 0
    fi
done

have apt-get && have dpkg-deb ||
    fail 1 "promtool is not installed and there is no apt-get to fetch it with: put $TOOLS in /usr/local/bin"
mkdir -p "$CACHE"
work=$(mktemp -d "$CACHE/prometheus-tools.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
say "fetching prometheus and prometheus-alertmanager (about 35 MB) into $CACHE/prometheus-tools"
fetch() { (cd "$work" && run_quietly apt-get download -q prometheus prometheus-alertmanager); }
if ! fetch; then # on a fresh system the package lists may be missing
    is_root || fail 1 "apt-get could not fetch them; run this once, then try again:  sudo apt-get update"
    update_package_lists && fetch || fail 1 "apt-get could not fetch prometheus and prometheus-alertmanager"
fi
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$work/root"
done
mkdir "$work/bin"
for tool in $TOOLS; do
    # Debian calls it prometheus-alertmanager.
    for name in "$tool" "prometheus-$tool"; do
        if [ -x "$work/root/usr/bin/$name" ]; then
            mv "$work/root/usr/bin/$name" "$work/bin/$tool"
        fi
    done
done
for template in $TEMPLATES; do
    cp "$work/root$TEMPLATE_FOLDER/$template" "$work/bin/"
done
for tool in alertmanager amtool; do
    LC_ALL=C sed "s|$TEMPLATE_FOLDER|$STARTED_IN|g" "$work/bin/$tool" >"$work/$tool"
    cat "$work/$tool" >"$work/bin/$tool" # keeps its mode
done
holds_tools "$work/bin" || fail 1 "the packages did not hold all of: $TOOLS"
mkdir -p "$CACHE/prometheus-tools"
rm -rf "$CACHE/prometheus-tools/bin"
mv "$work/bin" "$CACHE/prometheus-tools/bin"
printf '%s\n' "$CACHE/prometheus-tools/bin"
