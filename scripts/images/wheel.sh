#!/bin/sh
# usage: wheel.sh
#
# Inside an image build: builds the wheel of the source in /source into /wheels, where wheels of what
# it needs may lie already; those come before the ones of the index.
set -eu

static=/source/src/dtruntime/dashboard/static
rm -rf "$static" /wheels/dtruntime-*.whl
mkdir -p "$static"
cp -R /source/static/. "$static/"
python3 -m venv /tmp/build
PIP_FIND_LINKS=/wheels PIP_CONSTRAINT=/wheels/constraints.txt \
    /tmp/build/bin/python -m pip --disable-pip-version-check --no-cache-dir --quiet \
    wheel --no-deps --wheel-dir /wheels /source
rm -rf /tmp/build
