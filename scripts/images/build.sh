#!/usr/bin/env bash
# usage: build.sh PYTHON
#
# Builds the images of the Dockerfile without a registry and without Docker: with buildah, on a base
# made by mmdebstrap, and with dependencies that are fetched by PYTHON outside of the build. PYTHON
# must be of the version that Debian 12 has, 3.11. Needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=$1
context=build/images
base=localhost/strata-base
epoch=315532800
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
buildah=(buildah --storage-driver overlay)

rm -rf "$context"
mkdir -p "$context/dist"
# What a clone has, and the dashboard: Debian's Node is too old to build it in an image.
tar --create --exclude __pycache__ --exclude node_modules --files-from - <<FILES | tar --extract --directory "$context"
.dockerignore
Dockerfile
LICENSE
README.md
constraints.txt
dashboard
examples/numpy_training.py
pyproject.toml
scripts/images
src
FILES

echo "fetching dependencies"
"$python" -m pip --disable-pip-version-check -qq download --only-binary :all: \
    --dest "$context/dist" --constraint constraints.txt ".[data,fast,zstd]" hatchling

if ! "${buildah[@]}" inspect --type image "$base" >/dev/null 2>&1; then
    echo "making a base image of Debian 12 with Python 3.11"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
        bookworm "$context/base.tar"
    podman --storage-driver overlay import --quiet --change "ENV PATH=$path" \
        "$context/base.tar" "$base" >/dev/null
    rm "$context/base.tar"
fi

for target in coordinator worker; do
    echo "building strata-$target"
    "${buildah[@]}" bud --isolation chroot --format docker --timestamp "$epoch" --quiet \
        --build-arg "BASE=$base" --build-arg "NODE=$base" --build-arg PIP_NO_INDEX=1 \
        --target "$target" --tag "strata-$target" "$context" >/dev/null
done
podman --storage-driver overlay images --format '{{.Repository}} {{.Size}} {{.ID}}' |
    grep '/strata-'
