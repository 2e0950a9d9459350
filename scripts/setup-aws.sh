#!/usr/bin/env bash
# Makes the S3 bucket for checkpoints, and an IAM policy that allows workers what they need there.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: CHECKPOINT_BUCKET=NAME scripts/setup-aws.sh [options]
       scripts/setup-aws.sh --bucket NAME [options]

Makes an S3 bucket for checkpoints (versioning, encryption, no public access, a lifecycle for what
is left behind) and an IAM policy with the least that workers need. Run it as often as you like:
what is there already is brought into the state described here. No object and no bucket is ever
deleted, and a bucket that has lifecycle rules of its own is refused, because they would be lost.

  --bucket NAME           default: CHECKPOINT_BUCKET
  --region REGION         default: AWS_REGION, AWS_DEFAULT_REGION, that of `aws configure`, us-east-1
  --prefix PREFIX         allow workers only what is below PREFIX/ (default: the whole bucket)
  --kms-key ARN           encrypt with this key instead of the bucket's own (SSE-S3)
  --noncurrent-days N     keep replaced and deleted versions for N days (default 7)
  --multipart-days N      drop unfinished uploads after N days (default 1)
  --policy-name NAME      default: strata-BUCKET
  --no-iam                do not make the policy: print it
  --allow-unsupported     for servers other than Amazon's: warn where a call is not implemented
  --dry-run               show every command that changes something, and run none of them
  --help

Credentials and endpoint come from the environment, as the aws command takes them.
HELP
}

fail() {
    echo "ERROR: $1" >&2
    exit "${2:-1}"
}

bucket=${CHECKPOINT_BUCKET:-} region=${AWS_REGION:-${AWS_DEFAULT_REGION:-}}
prefix='' kms_key='' policy_name=''
noncurrent_days=7 multipart_days=1
iam=yes dry_run=no allow_unsupported=no

while [[ $# -gt 0 ]]; do
    case $1 in
        --bucket | --region | --prefix | --kms-key | --noncurrent-days | --multipart-days | --policy-name)
            [[ $# -ge 2 ]] || fail "$1 needs a value" 2
            name=${1#--}
            printf -v "${name//-/_}" '%s' "$2"
            shift 2
            ;;
        --no-iam) iam=no && shift ;;
        --dry-run) dry_run=yes && shift ;;
        --allow-unsupported) allow_unsupported=yes && shift ;;
        --help) usage && exit 0 ;;
        *) fail "unknown option $1; see --help" 2 ;;
    esac
done

[[ -n $bucket ]] ||
    fail "name the bucket: CHECKPOINT_BUCKET=NAME scripts/setup-aws.sh, or --bucket NAME" 2
[[ -n $region ]] || region=$(aws configure get region 2>/dev/null) || true
region=${region:-us-east-1}
[[ $bucket =~ ^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$ ]] ||
    fail "the bucket must be 3 to 63 lower case letters, digits, dots and hyphens, not '$bucket'" 2
[[ $region =~ ^[a-z0-9-]+$ ]] || fail "--region '$region' is no region" 2
[[ $prefix =~ ^[A-Za-z0-9/_.-]*$ ]] || fail "--prefix may have letters, digits and / _ . -" 2
[[ $noncurrent_days =~ ^[1-9][0-9]*$ && $multipart_days =~ ^[1-9][0-9]*$ ]] ||
    fail "days must be whole numbers from 1 on" 2
[[ -z $kms_key || $kms_key =~ ^arn:aws[a-z-]*:kms:[A-Za-z0-9:/_-]+$ ]] ||
    fail "--kms-key must be the ARN of a key" 2
prefix=${prefix#/} prefix=${prefix%/}
policy_name=${policy_name:-strata-$bucket}
[[ $policy_name =~ ^[A-Za-z0-9+=,.@_-]{1,128}$ ]] || fail "--policy-name '$policy_name' is not valid" 2
export AWS_REGION=$region AWS_DEFAULT_REGION=$region
command -v aws >/dev/null ||
    fail "the aws command is not there: https://docs.aws.amazon.com/cli/latest/userguide/"

answer=$(mktemp)
trap 'rm -f "$answer"' EXIT

shown() { printf ' %q' "$@"; }

say() { [[ $dry_run == yes ]] || echo "$1"; }

# Run an aws command that changes something, or show it.
change() {
    if [[ $dry_run == yes ]]; then
        echo "would run: aws$(shown "$@")"
        return 0
    fi
    if aws "$@" >/dev/null 2>"$answer"; then
        return 0
    fi
    if [[ $allow_unsupported == yes ]] &&
        grep -qE 'NotImplemented|MethodNotAllowed|not implemented|UnsupportedOperation' "$answer"; then
        echo "WARNING: this server does not know 'aws $1 $2': NOT DONE" >&2
        return 0
    fi
    cat "$answer" >&2
    fail "aws $1 $2 failed"
}

make_bucket() {
    if aws s3api head-bucket --bucket "$bucket" >/dev/null 2>"$answer"; then
        echo "bucket $bucket is there"
        return
    fi
    # 403: somebody else's, or not ours to look at. Only a bucket that is not there may be made.
    grep -qE '\(404\)|NoSuchBucket|Not Found' "$answer" || {
        cat "$answer" >&2
        fail "bucket $bucket cannot be looked at: is the name taken by somebody else?"
    }
    local place=()
    [[ $region == us-east-1 ]] ||
        place=(--create-bucket-configuration "LocationConstraint=$region")
    change s3api create-bucket --bucket "$bucket" --region "$region" "${place[@]}"
    say "bucket $bucket made in $region"
}

encryption() {
    local by='{"SSEAlgorithm": "AES256"}'
    [[ -z $kms_key ]] || by="{\"SSEAlgorithm\": \"aws:kms\", \"KMSMasterKeyID\": \"$kms_key\"}"
    echo "{\"Rules\": [{\"ApplyServerSideEncryptionByDefault\": $by, \"BucketKeyEnabled\": true}]}"
}

lifecycle() {
    cat <<JSON
{"Rules": [
  {"ID": "strata-unfinished-uploads", "Status": "Enabled", "Filter": {"Prefix": ""},
   "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": $multipart_days}},
  {"ID": "strata-noncurrent-versions", "Status": "Enabled", "Filter": {"Prefix": ""},
   "NoncurrentVersionExpiration": {"NoncurrentDays": $noncurrent_days},
   "Expiration": {"ExpiredObjectDeleteMarker": true}}
]}
JSON
}

# Setting rules replaces all that there are.
refuse_foreign_rules() {
    local rules
    rules=$(aws s3api get-bucket-lifecycle-configuration --bucket "$bucket" --output text \
        --query 'Rules[?!starts_with(ID, `strata-`)].ID' 2>/dev/null) || return 0
    [[ -z $rules || $rules == None ]] ||
        fail "bucket $bucket has lifecycle rules of its own ($rules); add these yourself:
$(lifecycle)"
}

worker_policy() {
    local objects="$bucket${prefix:+/$prefix}/*" condition='' keys=''
    [[ -z $prefix ]] ||
        condition=", \"Condition\": {\"StringLike\": {\"s3:prefix\": [\"$prefix\", \"$prefix/*\"]}}"
    [[ -z $kms_key ]] || keys=",
  {\"Sid\": \"Key\", \"Effect\": \"Allow\", \"Resource\": \"$kms_key\",
   \"Action\": [\"kms:Decrypt\", \"kms:GenerateDataKey\"]}"
    cat <<JSON
{"Version": "2012-10-17", "Statement": [
  {"Sid": "List", "Effect": "Allow", "Resource": "arn:aws:s3:::$bucket",
   "Action": ["s3:ListBucket"]$condition},
  {"Sid": "Objects", "Effect": "Allow", "Resource": "arn:aws:s3:::$objects",
   "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]}$keys
]}
JSON
}

configure_bucket() {
    refuse_foreign_rules
    change s3api put-public-access-block --bucket "$bucket" --public-access-block-configuration \
        BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true
    change s3api put-bucket-ownership-controls --bucket "$bucket" \
        --ownership-controls 'Rules=[{ObjectOwnership=BucketOwnerEnforced}]'
    change s3api put-bucket-encryption --bucket "$bucket" \
        --server-side-encryption-configuration "$(encryption)"
    change s3api put-bucket-versioning --bucket "$bucket" \
        --versioning-configuration Status=Enabled
    change s3api put-bucket-lifecycle-configuration --bucket "$bucket" \
        --lifecycle-configuration "$(lifecycle)"
}

# IAM keeps five versions of a policy: the oldest that does not count makes room.
make_room() {
    local versions
    versions=$(aws iam list-policy-versions --policy-arn "$1" --output text \
        --query 'Versions[?!IsDefaultVersion].VersionId')
    read -ra versions <<<"$versions"
    [[ ${#versions[@]} -lt 4 ]] ||
        change iam delete-policy-version --policy-arn "$1" --version-id "${versions[-1]}"
}

make_policy() {
    local arn version current
    arn=$(aws iam list-policies --scope Local --output text \
        --query "Policies[?PolicyName=='$policy_name'].Arn")
    if [[ -z $arn || $arn == None ]]; then
        change iam create-policy --policy-name "$policy_name" --policy-document "$(worker_policy)"
        say "policy $policy_name made"
        return
    fi
    version=$(aws iam get-policy --policy-arn "$arn" --output text --query Policy.DefaultVersionId)
    current=$(aws iam get-policy-version --policy-arn "$arn" --version-id "$version" \
        --output json --query PolicyVersion.Document)
    if [[ $(tr -d '[:space:]' <<<"$current") == "$(worker_policy | tr -d '[:space:]')" ]]; then
        echo "policy $policy_name is up to date"
        return
    fi
    make_room "$arn"
    change iam create-policy-version --policy-arn "$arn" --set-as-default \
        --policy-document "$(worker_policy)"
    say "policy $policy_name brought up to date"
}

make_bucket
configure_bucket
if [[ $iam == yes ]]; then
    make_policy
else
    worker_policy
fi
[[ $dry_run == yes ]] && echo "nothing was changed" ||
    echo "workers: CHECKPOINT_BUCKET=$bucket AWS_REGION=$region STORAGE_BACKEND=s3"
