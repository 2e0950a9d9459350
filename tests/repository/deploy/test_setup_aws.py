"""scripts/setup-aws.sh against a real S3 server, with the real aws command.

SeaweedFS implements everything but the public access block, and its IAM does not write here: that
call is shown by the dry run, and the policy is compared as it is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from dtruntime import CheckpointManager
from tests.support.servers.s3_server import TOOLS, keep, s3_server

__all__ = ["s3_server"]

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup-aws.sh"
pytestmark = pytest.mark.long

VERSION = "awscli>=1.40,<2"


@pytest.fixture(scope="session")
def aws_folder() -> Path:
    """The folder of the aws command, in an environment of its own: its pins are not ours."""
    folder = TOOLS / "awscli"
    if not folder.exists():
        partial = TOOLS / f".awscli-{os.getpid()}"
        TOOLS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(partial), VERSION]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if result.returncode:
            pytest.skip(f"CANNOT INSTALL awscli, so this is NOT TESTED: {result.stderr[-500:]}")
        # Its script names the interpreter, but not where its modules are.
        (partial / "run").mkdir()
        command_file = partial / "run" / "aws"
        command_file.write_text(
            f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" -m awscli "$@"\n'
        )
        command_file.chmod(0o755)
        keep(partial, folder)
    return folder / "run"


@pytest.fixture
def environment(s3_server: dict[str, str], aws_folder: Path, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        **s3_server,
        "PATH": f"{aws_folder}:{os.environ['PATH']}",
        "HOME": str(tmp_path),  # no settings of whoever runs the tests
        "AWS_MAX_ATTEMPTS": "2",
        "AWS_PAGER": "",
    }


@pytest.fixture
def bucket() -> str:
    return f"checkpoints-{uuid.uuid4().hex[:12]}"


def set_up(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *options], env=environment, capture_output=True, text=True, timeout=100
    )


def ask(environment: dict[str, str], *words: str) -> Any:
    command = ["aws", "s3api", *words, "--region", "us-east-1", "--output", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


def bucket_names(environment: dict[str, str]) -> set[str]:
    return {one["Name"] for one in ask(environment, "list-buckets")["Buckets"]}


COMMON = ("--no-iam", "--allow-unsupported")


def test_bucket_has_what_was_asked_for_also_the_second_time(
    environment: dict[str, str], bucket: str
) -> None:
    first = set_up(environment, "--bucket", bucket, *COMMON)
    assert first.returncode == 0, first.stderr
    assert f"bucket {bucket} made" in first.stdout
    again = set_up(environment, "--bucket", bucket, *COMMON, "--noncurrent-days", "30")
    assert again.returncode == 0, again.stderr
    assert f"bucket {bucket} is there" in again.stdout

    at = ("--bucket", bucket)
    assert ask(environment, "get-bucket-versioning", *at)["Status"] == "Enabled"
    encryption = ask(environment, "get-bucket-encryption", *at)
    (rule,) = encryption["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    ownership = ask(environment, "get-bucket-ownership-controls", *at)["OwnershipControls"]
    assert ownership["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    rules = ask(environment, "get-bucket-lifecycle-configuration", *at)["Rules"]
    by_id = {rule["ID"]: rule for rule in rules}
    uploads = by_id["strata-unfinished-uploads"]["AbortIncompleteMultipartUpload"]
    assert uploads == {"DaysAfterInitiation": 1}
    versions = by_id["strata-noncurrent-versions"]
    assert versions["NoncurrentVersionExpiration"]["NoncurrentDays"] == 30
    assert "put-public-access-block': NOT DONE" in first.stderr


def test_bucket_is_the_one_that_the_environment_names(
    environment: dict[str, str], bucket: str
) -> None:
    done = set_up({**environment, "CHECKPOINT_BUCKET": bucket}, *COMMON)
    assert done.returncode == 0, done.stderr
    assert bucket in bucket_names(environment)
    assert f"workers: CHECKPOINT_BUCKET={bucket} AWS_REGION=" in done.stdout


def test_region_is_the_one_that_aws_configure_has_stored(
    environment: dict[str, str], bucket: str, tmp_path: Path
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-central-1\n")
    elsewhere = {k: v for k, v in environment.items() if k not in ("AWS_REGION",)}
    done = set_up({**elsewhere, "CHECKPOINT_BUCKET": bucket}, "--no-iam", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "LocationConstraint=eu-central-1" in done.stdout


def test_without_a_bucket_it_says_in_one_line_what_to_type() -> None:
    done = set_up({"PATH": "/usr/bin:/bin"})
    assert done.stderr == (
        "ERROR: name the bucket: CHECKPOINT_BUCKET=NAME scripts/setup-aws.sh, or --bucket NAME\n"
    )


def test_checkpoints_work_in_the_bucket(
    environment: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set_up(environment, "--bucket", bucket, *COMMON).returncode == 0
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, environment[name])
    with CheckpointManager(f"s3://{bucket}/run", keep_count=1) as manager:
        for step in (1, 2, 3):
            manager.save(b"state %d" % step, step=step).wait()
        assert manager.load_latest().step == 3


def test_dry_run_shows_every_change_and_makes_none(
    environment: dict[str, str], bucket: str
) -> None:
    done = set_up(environment, "--bucket", bucket, "--no-iam", "--dry-run")
    assert done.returncode == 0, done.stderr
    shown = [line.split()[4] for line in done.stdout.splitlines() if line.startswith("would run")]
    assert shown == [
        "create-bucket",
        "put-public-access-block",
        "put-bucket-ownership-controls",
        "put-bucket-encryption",
        "put-bucket-versioning",
        "put-bucket-lifecycle-configuration",
    ]
    assert bucket not in bucket_names(environment)


def test_call_that_the_server_does_not_know_is_an_error_unless_allowed(
    environment: dict[str, str], bucket: str
) -> None:
    done = set_up(environment, "--bucket", bucket, "--no-iam")
    assert done.returncode == 1
    assert "put-public-access-block failed" in done.stderr


def test_lifecycle_rules_of_somebody_else_are_not_replaced(
    environment: dict[str, str], bucket: str
) -> None:
    ask(environment, "create-bucket", "--bucket", bucket)
    rule = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "x"}}
    rules = json.dumps({"Rules": [{**rule, "Expiration": {"Days": 3}}]})
    at = ("--bucket", bucket)
    put = "put-bucket-lifecycle-configuration"
    ask(environment, put, *at, "--lifecycle-configuration", rules)
    done = set_up(environment, *at, *COMMON)
    assert done.returncode == 1
    assert "lifecycle rules of its own (theirs)" in done.stderr
    (kept,) = ask(environment, "get-bucket-lifecycle-configuration", *at)["Rules"]
    assert kept["ID"] == "theirs"


def test_policy_allows_workers_their_prefix_and_nothing_else(
    environment: dict[str, str], bucket: str
) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1234"
    options = ("--no-iam", "--dry-run", "--prefix", "/runs/", "--kms-key", key)
    done = set_up(environment, "--bucket", bucket, *options)
    assert done.returncode == 0, done.stderr
    text = done.stdout[done.stdout.index('{"Version"') : done.stdout.rindex("}") + 1]
    listing, objects, keys = json.loads(text)["Statement"]
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["runs", "runs/*"]}}
    assert objects["Resource"] == f"arn:aws:s3:::{bucket}/runs/*"
    assert set(objects["Action"]) == {
        *("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
    }
    assert (keys["Resource"], set(keys["Action"])) == (key, {"kms:Decrypt", "kms:GenerateDataKey"})


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--bucket", "Upper_Case"),
        ("--bucket", "fine", "--noncurrent-days", "0"),
        ("--bucket", "fine", "--prefix", 'a"b'),
        ("--bucket", "fine", "--kms-key", "alias/x"),
        ("--bucket", "fine", "--what"),
        ("--bucket",),
    ],
)
def test_wrong_options_are_refused_before_anything_is_asked(options: tuple[str, ...]) -> None:
    done = set_up({"PATH": "/usr/bin:/bin"}, *options)
    assert done.returncode == 2
    assert done.stderr.startswith("ERROR: ")
