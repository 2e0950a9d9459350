"""Google Cloud Storage: what is asked, and what becomes of errors. No server could be had."""

import json
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import pytest

from dtruntime.errors import (
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageThrottledError,
)
from dtruntime.storage import GcsBackend
from tests.support.servers.http_faults import HttpFaults

OPERATIONS: list[Callable[[GcsBackend], Any]] = [
    lambda backend: backend.read("file"),
    lambda backend: backend.write("file", b"x"),
    lambda backend: backend.create("file", b"x"),
    lambda backend: backend.size("file"),
    lambda backend: list(backend.list()),
]


@pytest.fixture
def answers() -> Iterator[HttpFaults]:
    """Answers by itself; nobody is behind it."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        host, port = nobody.getsockname()
        with HttpFaults(f"http://{host}:{port}") as proxy:
            yield proxy


@pytest.fixture
def backend(answers: HttpFaults) -> GcsBackend:
    token = {"bearer_token": "a-token-nobody-may-see"}
    return GcsBackend(
        "bucket", prefix="runs", endpoint=answers.url, retry_seconds=0.2, config=token
    )


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, StorageNotFoundError),
        (401, StoragePermissionError),
        (403, StoragePermissionError),
        (429, StorageThrottledError),
        (503, StorageThrottledError),
        (400, StorageError),
    ],
)
def test_answers_become_errors_that_say_where(
    backend: GcsBackend, answers: HttpFaults, status: int, error: type[StorageError]
) -> None:
    answers.fail("", status, 10_000)
    for operation in OPERATIONS:
        with pytest.raises(error, match="gs://bucket/runs") as caught:
            operation(backend)
        assert type(caught.value) is error
        assert "nobody-may-see" not in "".join(traceback.format_exception(caught.value))


def test_objects_are_asked_for_under_bucket_and_prefix(
    backend: GcsBackend, answers: HttpFaults
) -> None:
    answers.fail("", 404, 10_000)
    for operation in OPERATIONS:
        with pytest.raises(StorageNotFoundError):
            operation(backend)
    requests = [unquote(line).split(" ")[:2] for line in answers.requests]
    assert [method for method, _ in requests] == ["GET", "PUT", "PUT", "HEAD", "GET"]
    assert {path for _, path in requests[:4]} == {"/bucket/runs/file"}
    assert requests[4][1].startswith("/bucket?list-type=2&prefix=runs/")


def test_key_that_is_refused_is_not_shown(answers: HttpFaults) -> None:
    key = {"client_email": "a@b", "private_key_id": "1", "private_key": "no key, and still secret"}
    with pytest.raises(StorageError, match="gs://bucket") as caught:
        GcsBackend("bucket", endpoint=answers.url, config={"service_account_key": json.dumps(key)})
    assert "still secret" not in "".join(traceback.format_exception(caught.value))
