#!/usr/bin/env bash
# usage: render-manifests.sh [FILE]
#
# Writes what k8s/Kustomization is made of into one file (k8s/strata.yaml) that `kubectl apply -f`
# takes. Needs kubectl, and no cluster.
set -euo pipefail
cd "$(dirname "$0")/.."

file=${1:-k8s/strata.yaml}
unfinished=$(mktemp)
trap 'rm -f "$unfinished"' EXIT
{
    echo "# Made from k8s/Kustomization, which says what it needs, by \`make manifests\`: do not edit."
    kubectl kustomize k8s
} >"$unfinished"
cat "$unfinished" >"$file"
