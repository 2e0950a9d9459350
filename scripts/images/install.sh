#!/bin/sh
# usage: install.sh EXTRAS
#
# Inside an image build: installs the wheel in /wheels with EXTRAS into /opt/strata, each dependency
# in the version that constraints.txt names. Wheels in /wheels come before those of the index. Without
# "data" among the EXTRAS, what reads data is left out: a coordinator has no use for it.
set -eu

python3 -m venv /opt/strata
/opt/strata/bin/python -m pip --disable-pip-version-check --no-cache-dir --quiet install \
    --find-links /wheels --constraint /wheels/constraints.txt \
    "$(echo /wheels/dtruntime-*.whl)[$1]"
case ",$1," in
    *,data,*) ;;
    *)
        /opt/strata/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes \
            pyarrow obstore google-crc32c
        ;;
esac
