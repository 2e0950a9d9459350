#!/bin/sh
# usage: dashboard.sh install|build
#
# Inside an image build: builds the dashboard in /source into /source/static. In an image without
# npm that is what `make dashboard` has left in the source, or nothing.
set -eu

static=/source/src/dtruntime/dashboard/static
cd /source/dashboard
if ! command -v npm >/dev/null; then
    if [ "$1" = build ] && [ -d "$static" ]; then
        echo "no npm in this image: the dashboard is the one in the source"
        cp -R "$static" /source/static
    elif [ "$1" = build ]; then
        echo "NO DASHBOARD: there is no npm in this image, and none was built with: make dashboard" >&2
        mkdir /source/static
    fi
elif [ "$1" = install ]; then
    npm install --no-save --no-audit --no-fund --loglevel=error
else
    npm run build
    cp -R "$static" /source/static
fi
