#!/usr/bin/env bash
# usage: check-deployment.sh BIN
#
# Checks the Dockerfile, the compose files and every Kustomize folder with the tools that know them:
# hadolint and kubernetes-validate (from the folder BIN), docker-compose, kubectl.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$1
kubernetes_versions=(1.34 1.35 1.36 1.37)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "hadolint"
"$bin/hadolint" Dockerfile

echo "docker-compose config"
cp docker-compose.yml docker-compose.prod.yml "$scratch/"
sed 's/^CHECKPOINT_BUCKET=$/CHECKPOINT_BUCKET=example-checkpoints/' .env.example >"$scratch/.env"
for file in docker-compose.yml docker-compose.prod.yml; do
    (cd "$scratch" && docker-compose -f "$file" config -q)
done

for folder in k8s k8s/base k8s/jobset k8s/overlays/*; do
    merged=$scratch/$(basename "$folder").yaml
    kubectl kustomize "$folder" >"$merged"
    for version in "${kubernetes_versions[@]}"; do
        "$bin/kubernetes-validate" --strict --quiet --no-warn -k "$version" "$merged"
    done
    echo "$folder: $(grep -c '^kind:' "$merged") resources, Kubernetes ${kubernetes_versions[*]}"
done
scripts/render-manifests.sh "$scratch/rendered.yaml"
cmp k8s/strata.yaml "$scratch/rendered.yaml" ||
    { echo "k8s/strata.yaml is not what k8s/Kustomization makes: run make manifests" >&2 && exit 1; }
# Reads a folder as `kubectl apply -f` does, without a cluster.
taken=$(kubectl label --local --filename k8s checked=yes --output name)
echo "kubectl apply -f k8s: $(wc -l <<<"$taken") resources"

echo "not checked, for want of a schema: JobSet, ServiceMonitor"
