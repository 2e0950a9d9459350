#!/bin/sh
# usage: install.sh EXTRAS
#
# Inside an image build: installs the wheel in /wheels with EXTRAS into /opt/strata, each dependency
# in the version that constraints.txt names. Wheels in /wheels come before those of the index. Without
# "data" among the EXTRAS, what reads data is left out: a coordinator has no use for it.
set -eu

set -- "$1" /wheels/dtruntime-*.whl
if [ $# -ne 2 ] || [ ! -e "$2" ]; then
    echo "dist/ must have exactly one wheel of Strata; run: make wheel" >&2
    exit 1
fi
python3 -m venv /opt/strata
/opt/strata/bin/python -m pip --disable-pip-version-check --no-cache-dir --quiet install \
    --find-links /wheels --constraint /wheels/constraints.txt "$2[$1]"
case ",$1," in
    *,data,*) ;;
    *)
        /opt/strata/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes \
            pyarrow obstore google-crc32c
        ;;
esac
