#!/usr/bin/env bash
# usage: install-peers.sh PYTHON FOLDER
#
# Makes the environment FOLDER with the libraries that Strata's loader is compared with, and with
# Strata itself, so that all of them read with the same pyarrow and numpy. A library that cannot
# be installed is named loudly and left out; the benchmark reports it as not measured.
set -euo pipefail

if [[ $# -ne 2 ]]; then
    echo "usage: $0 PYTHON FOLDER" >&2
    exit 2
fi
python=$1
folder=$2
lists=benchmarks/data_loading/peers
# The resolver may search for hours where requirements contradict each other.
limit=900

"$python" -m venv "$folder"

install() {
    local what=$1
    shift
    echo "installing $what into $folder"
    timeout "$limit" "$folder/bin/python" -m pip --disable-pip-version-check -qq install "$@" || {
        {
            echo
            echo "WARNING: $what could not be installed: it will be missing from the comparison."
            echo
        } >&2
        return 1
    }
}

same=$(grep -E '^(numpy|pyarrow)==' constraints.txt)
# shellcheck disable=SC2086 # one argument for each pin
install "Strata" $same -e '.[data]' psutil || exit 1
# shellcheck disable=SC2086
install "PyTorch" $same -r "$lists/torch.txt" || true
# shellcheck disable=SC2086
install "HF datasets" $same -r "$lists/datasets.txt" || true
# These two ask for torchvision, cloud clients and older releases that reading local files never
# uses: only what they import is installed beside them.
for peer in litdata streaming; do
    # shellcheck disable=SC2086
    install "what $peer needs" $same -r "$lists/$peer-needs.txt" &&
        install "$peer" --no-deps -r "$lists/$peer.txt" || true
done
touch "$folder/.ready"
