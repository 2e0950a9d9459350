"""A real S3 server keeps every promise of a storage backend, also behind a bad network."""

import itertools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dtruntime._background import side_by_side
from dtruntime.errors import (
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageThrottledError,
)
from dtruntime.storage import S3Backend, StorageBackend
from dtruntime.testing import StorageConformance, TcpProxy
from tests.support.servers.http_faults import HttpFaults
from tests.support.servers.s3_server import SECRET

BUCKET = "ready"  # made while the server started, which takes it seconds
MULTIPART = 5 * 2**20
_places = itertools.count()

Connect = Callable[..., S3Backend]


@pytest.fixture
def connect(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Connect:
    """A backend for a prefix of its own; the environment has the credentials."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    prefix = f"storage/{next(_places)}"

    def connect(**options: Any) -> S3Backend:
        options = {"prefix": prefix, "part_bytes": MULTIPART, **options}
        return S3Backend(BUCKET, **options)

    return connect


class TestS3(StorageConformance):
    @pytest.fixture
    def backend(self, connect: Connect) -> S3Backend:
        return connect()


@pytest.fixture
def faults(s3_server: dict[str, str]) -> Iterator[HttpFaults]:
    with HttpFaults(s3_server["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def faulty(connect: Connect, faults: HttpFaults) -> S3Backend:
    return connect(endpoint=faults.url, retry_seconds=20)


@pytest.fixture
def hopeless(connect: Connect, faults: HttpFaults) -> S3Backend:
    """One that gives up at once."""
    return connect(endpoint=faults.url, retry_seconds=0.3)


def stream(backend: StorageBackend, size: int) -> None:
    with backend.writer("stream") as writer:
        for _ in range(size // 1_000_000):
            writer.write(bytes(1_000_000))


OPERATIONS: dict[str, Callable[[S3Backend], Any]] = {
    "read": lambda backend: backend.read("file"),
    "read_ranges": lambda backend: backend.read_ranges("file", [(0, 2), (4, 1)]),
    "read_into": lambda backend: backend.read_into("file", 0, bytearray(5)),
    "write": lambda backend: backend.write("new", b"data"),
    "large write": lambda backend: backend.write("new", bytes(2 * MULTIPART)),
    "create": lambda backend: backend.create("created", b"data"),
    "stream": lambda backend: stream(backend, 11_000_000),
    "delete": lambda backend: backend.delete("file"),
    "size": lambda backend: backend.size("file"),
    "list": lambda backend: list(backend.list()),
}


@pytest.mark.parametrize("action", [500, 429, "cut", "lose"])
def test_every_operation_rides_through_a_short_failure(
    faulty: S3Backend, faults: HttpFaults, action: Any
) -> None:
    for operation in OPERATIONS.values():
        faults.fail("", None, 0)
        faulty.write("file", b"01234")
        faulty.delete("created")
        faults.fail("", action, 1)
        operation(faulty)
        assert faults.faults == 1
    assert faulty.size("new") == 2 * MULTIPART
    assert faulty.size("stream") == 11_000_000


@pytest.mark.parametrize("operation", ["read_into", "write", "create", "stream", "list"])
def test_store_that_throttles_for_long_is_named_and_never_looks_empty(
    hopeless: S3Backend, faults: HttpFaults, operation: str
) -> None:
    hopeless.write("file", b"01234")
    faults.fail("", 503, 10_000)
    with pytest.raises(StorageThrottledError, match=r"s3://ready/storage/.*503"):
        OPERATIONS[operation](hopeless)
    with pytest.raises(StorageThrottledError):
        hopeless.exists("file")


def test_failure_on_a_later_page_of_a_listing_is_raised(
    hopeless: S3Backend, faults: HttpFaults
) -> None:
    names = [f"{number:04d}" for number in range(1005)]
    side_by_side(names, lambda name: hopeless.write(name, b""), 8)
    assert len(list(hopeless.list())) == 1005
    faults.fail("continuation-token|start-after", 503, 10_000)
    seen = []
    with pytest.raises(StorageThrottledError):
        seen.extend(hopeless.list())
    assert len(seen) <= 1000
    faults.fail("", "half", 10_000)
    with pytest.raises(StorageError, match=f"cannot list {hopeless.url}"):
        list(hopeless.list())
    faults.fail("", None, 0)
    assert hopeless.delete_many(names) == []
    assert list(hopeless.list()) == []


def test_listing_that_breaks_off_is_taken_up_after_the_last_name(
    faulty: S3Backend, faults: HttpFaults
) -> None:
    names = [f"{number:04d}" for number in range(2005)]
    side_by_side(names, lambda name: faulty.write(name, b""), 8)
    # The first page twice, and twice the second one: as asked for first, and when asked again.
    broken = {1, 2, 4, 5}
    count = itertools.count(1)
    faults.requests.clear()
    faults.rule = lambda line, _: "half" if next(count) in broken else None
    assert [file.name for file in faulty.list()] == names
    assert faults.faults == len(broken)
    assert "start-after" in faults.requests[4]
    assert "0999" in faults.requests[4]


def test_winner_whose_answer_was_lost_is_told_that_it_won(
    faulty: S3Backend, faults: HttpFaults
) -> None:
    faults.fail("^PUT", "lose", 1)
    assert faulty.create("mine", b"data")
    assert faults.faults == 1
    assert not faulty.create("mine", b"data"), "the same data is not the same creator"
    faults.fail("^PUT", "cut", 1)
    assert not faulty.create("mine", b"data")


def test_download_that_breaks_off_is_taken_up(faulty: S3Backend, faults: HttpFaults) -> None:
    data = bytes(range(256)) * 50_000
    faulty.write("file", data)
    buffer = bytearray(len(data))
    faults.fail("^GET", "half", 3)
    faulty.read_into("file", 0, buffer)
    assert faults.faults == 3
    assert buffer == data


@pytest.mark.parametrize("how", ["large write", "stream"])
@pytest.mark.parametrize("broken", ["partNumber=2", "^POST .*uploadId="])
def test_upload_that_fails_is_taken_back(
    hopeless: S3Backend, faults: HttpFaults, how: str, broken: str
) -> None:
    faults.fail(broken, 503, 10_000)
    with pytest.raises(StorageThrottledError):
        OPERATIONS[how](hopeless)
    assert list(hopeless.list()) == []
    assert_no_upload_is_left(faults)


def test_stream_that_is_aborted_is_taken_back(faulty: S3Backend, faults: HttpFaults) -> None:
    writer = faulty.writer("stream")
    for _ in range(12):
        writer.write(bytes(1_000_000))
    writer.abort()
    assert_no_upload_is_left(faults)


def assert_no_upload_is_left(faults: HttpFaults) -> None:
    begun = [line for line in faults.requests if "?uploads" in line]
    ended = [line for line in faults.requests if line.startswith("DELETE") and "uploadId" in line]
    assert len(begun) == len(ended) == 1


def test_connections_that_are_reset_do_not_matter(
    connect: Connect, s3_server: dict[str, str]
) -> None:
    with TcpProxy(s3_server["AWS_ENDPOINT_URL"]) as proxy:
        backend = connect(endpoint=proxy.url)
        with backend.writer("file") as writer:
            for _ in range(12):
                writer.write(bytes(1_000_000))
                proxy.cut()
        assert backend.read("file") == bytes(12_000_000)
        proxy.refuse()
        with pytest.raises(StorageError, match=r"cannot list s3://ready/storage/"):
            list(connect(endpoint=proxy.url, retry_seconds=0.5).list())


def test_one_failed_delete_does_not_stop_the_others(connect: Connect, faults: HttpFaults) -> None:
    backend = connect(endpoint=faults.url, retry_seconds=0)
    names = [f"file-{number}" for number in range(4)]
    for name in names:
        backend.write(name, b"")
    faults.fail(r"\?delete", 500, 3)  # the request for all of them, and two of those for each
    failed = backend.delete_many(names)
    assert len(failed) == 2
    assert sorted(file.name for file in backend.list()) == sorted(name for name, _ in failed)


def test_wrong_secret_is_refused_and_never_shown(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-still-secret")
    given = {"access_key_id": "strata", "secret_access_key": "given-and-still-secret"}
    for backend in (connect(), connect(config=given)):
        for operation in OPERATIONS.values():
            with pytest.raises(StoragePermissionError, match="s3://ready/") as caught:
                operation(backend)
            trace = "".join(traceback.format_exception(caught.value))
            told = f"{trace} {caplog.text} {backend!r}"
            assert "still-secret" not in told
            assert SECRET not in told


def test_bucket_that_is_missing_is_not_an_empty_one(connect: Connect) -> None:
    backend = connect()
    missing = S3Backend("no-such-bucket", prefix="x")
    with pytest.raises(StorageNotFoundError, match=r"s3://no-such-bucket/x"):
        list(missing.list())
    assert list(backend.list()) == []


def test_further_objects_in_the_bucket_are_not_seen(connect: Connect) -> None:
    backend = connect()
    backend.write("a", b"")
    S3Backend(BUCKET, prefix=backend.url.split("/", 3)[3] + "-other").write("b", b"")
    assert [file.name for file in backend.list()] == ["a"]
