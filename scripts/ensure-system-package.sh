#!/usr/bin/env bash
# usage: ensure-system-package.sh BINARY PACKAGE
#
# Makes sure that BINARY is on the PATH, installing the Debian package PACKAGE when it is not.
# Installs as root or through a sudo that asks no password; otherwise says what to install by
# hand and fails.
set -euo pipefail

if [[ $# -ne 2 ]]; then
    echo "usage: $0 BINARY PACKAGE" >&2
    exit 2
fi
binary=$1
package=$2

give_up() {
    {
        echo
        echo "ERROR: '$binary' is missing and $1."
        echo "       Install it by hand, then run the same command again:"
        echo "           Debian, Ubuntu: apt-get install $package   (as root)"
        echo "           elsewhere:      the package that provides '$binary'"
        echo
    } >&2
    exit 1
}

command -v "$binary" >/dev/null && exit 0
command -v apt-get >/dev/null || give_up "this system has no apt-get to install it with"

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null ||
        give_up "installing it needs root or a sudo without password"
    as_root=(sudo -n)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install_package() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends "$package" >>"$log" 2>&1
}

echo "installing the system package $package for $binary"
# A fresh machine has no package lists: fetch them only when the first attempt fails.
install_package || { "${as_root[@]}" apt-get update -q >>"$log" 2>&1 && install_package; } || {
    cat "$log" >&2
    give_up "apt-get could not install $package"
}
command -v "$binary" >/dev/null || give_up "the package $package did not bring it"
