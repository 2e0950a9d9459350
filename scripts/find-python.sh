#!/usr/bin/env bash
# usage: find-python.sh VERSION
#
# Prints the path of a Python interpreter of a version such as 3.12: one that is on the PATH, or
# one that pyenv has. Fails silently when there is none; it downloads nothing.
set -euo pipefail

if [[ $# -ne 1 ]]; then
    echo "usage: $0 VERSION" >&2
    exit 2
fi
version=$1

is_usable() {
    "$1" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null
}

# pyenv's own python3.12 on the PATH exists even while that version is not switched on.
candidates=("$(command -v "python$version" || true)")
if command -v pyenv >/dev/null && latest=$(pyenv latest "$version" 2>/dev/null); then
    candidates+=("$(pyenv prefix "$latest")/bin/python3")
fi
for python in "${candidates[@]}"; do
    if [[ -n $python ]] && is_usable "$python"; then
        echo "$python"
        exit 0
    fi
done
exit 1
