"""Previews of files in a store that does not answer."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dtruntime.config import CoordinatorConfig
from dtruntime.coordinator.http import preview
from dtruntime.coordinator.http.answers import Failure
from dtruntime.coordinator.http.preview import AT_ONCE, Previews
from dtruntime.coordinator.state.layouts import LayoutRecord
from dtruntime.coordinator.state.records import DatasetRecord
from dtruntime.testing import eventually_async

ROWS = DatasetRecord(
    dataset_id="rows",
    path="s3://bucket/rows",
    format="csv",
    total_samples=1,
    shard_size=1,
    shuffle=False,
    seed=0,
    layout=LayoutRecord("", 1, b"\1", b"\1", "s3://bucket/", ("rows.csv",), b"\1", 1),
)


class SilentStore(ThreadingHTTPServer):
    """Says what a file is like, but nothing of what is in it before it is told to answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SilentAnswers)
        self.asked: list[str] = []
        self.answering = threading.Event()


class SilentAnswers(BaseHTTPRequestHandler):
    server: SilentStore

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "8")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.answering.wait()
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        """Write no access log."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentStore]:
    with SilentStore() as store:
        threading.Thread(target=store.serve_forever).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        yield store
        store.answering.set()
        store.shutdown()


async def test_reads_that_hang_keep_their_turns_and_leave_other_threads_alone(
    store: SilentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    monkeypatch.setattr(preview, "SECONDS", 0.2)
    previews = Previews(CoordinatorConfig(preview="on"))

    for _ in range(3):
        looks = [previews.read(ROWS, 1) for _ in range(2 * AT_ONCE)]
        refusals = await asyncio.gather(*looks, return_exceptions=True)
        assert {refusal.code for refusal in refusals if isinstance(refusal, Failure)} == {
            "unreadable"
        }
    await eventually_async(lambda: len(store.asked) == AT_ONCE)
    with pytest.raises(Failure, match=f"{AT_ONCE} other previews have not ended"):
        await previews.read(ROWS, 1)
    assert len(store.asked) == AT_ONCE
    assert await asyncio.to_thread(sum, (1, 2)) == 3

    store.answering.set()
    monkeypatch.setattr(preview, "SECONDS", 20.0)
    with pytest.raises(Failure, match=r"rows\.csv"):
        await previews.read(ROWS, 1)
    assert len(store.asked) == AT_ONCE + 1
