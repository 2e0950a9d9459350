"""Refusals on the wire and the errors they become."""

import re
from pathlib import Path

import grpc
import pytest

import dtruntime.coordinator
from dtruntime import errors
from dtruntime.rpc.status_codes import ABSENT, CODES, CallFailure, failure_of, trailing_metadata

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("invalid", ValueError),
        ("superseded", errors.SyncError),
        ("unknown_worker", errors.SyncError),
        ("unknown_dataset", errors.ShardNotFoundError),
        ("unknown_rank", errors.ShardNotFoundError),
        ("dataset_conflict", errors.ShardError),
        ("too_many_datasets", errors.ShardError),
        ("checkpoint_conflict", errors.StorageError),
        ("world_size_conflict", errors.ConnectionError),
        ("job_full", errors.ConnectionError),
        ("shutting_down", errors.ConnectionError),
    ],
)
def test_reason_becomes_the_error_that_users_catch(reason: str, error: type[Exception]) -> None:
    raised = CallFailure(CODES[reason], "what happened", reason).error()
    assert type(raised) is error
    assert str(raised) == "what happened"
    if isinstance(raised, errors.SyncError):
        assert raised.reason == "superseded"


def test_call_that_an_older_coordinator_does_not_know_names_the_remedy() -> None:
    raised = CallFailure(Code.UNIMPLEMENTED, "Method not found!").error()
    assert type(raised) is errors.StrataError
    assert "upgrade it (Method not found!)" in str(raised)


def test_every_refusal_of_the_coordinator_has_a_code() -> None:
    folder = Path(dtruntime.coordinator.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    reasons = set(re.findall(r'Refused\(\s*"(\w+)"', source))
    assert len(reasons) > 10
    assert reasons <= CODES.keys()


def test_refusal_is_never_taken_for_an_absence_unless_it_is_one() -> None:
    absent = {reason for reason, code in CODES.items() if code in ABSENT}
    assert absent == {"shutting_down", "storage"}


@pytest.mark.parametrize(
    ("code", "absent", "broke_off"),
    [
        (Code.UNAVAILABLE, True, True),
        (Code.CANCELLED, True, True),
        (Code.UNKNOWN, True, True),
        (Code.DEADLINE_EXCEEDED, True, False),
        (Code.RESOURCE_EXHAUSTED, False, False),
        (Code.FAILED_PRECONDITION, False, False),
        (Code.INTERNAL, False, False),
    ],
)
def test_codes_that_say_nothing_about_the_request(
    code: grpc.StatusCode, absent: bool, broke_off: bool
) -> None:
    failure = CallFailure(code, "")
    assert (failure.means_absent, failure.broke_off) == (absent, broke_off)


def failed(code: grpc.StatusCode, details: str, trailing: object) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailing)  # type: ignore[misc]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


@pytest.mark.parametrize("retry_after", [None, 0.0, 0.0004, 0.25, 12.5])
def test_trailing_metadata_survive_the_way(retry_after: float | None) -> None:
    trailing = trailing_metadata("rate_limited", retry_after)
    assert isinstance(trailing, tuple), "grpc.aio takes nothing else"
    failure = failure_of(failed(Code.RESOURCE_EXHAUSTED, "slow down", trailing))
    assert (failure.code, failure.message, failure.reason) == (
        Code.RESOURCE_EXHAUSTED,
        "slow down",
        "rate_limited",
    )
    if retry_after is None:
        assert failure.retry_after is None
    else:
        assert failure.retry_after == max(0.001, round(retry_after, 3))


@pytest.mark.parametrize("hint", ["soon", "", "-5", "1.5"])
def test_hint_that_is_no_number_is_ignored(hint: str) -> None:
    failure = failure_of(failed(Code.UNAVAILABLE, "", [("retry-after-ms", hint)]))
    assert failure.retry_after is None
    assert failure.message == "UNAVAILABLE"
