"""The HTTP API as a program sees it: typed answers, and streams of events."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import msgspec

T = TypeVar("T")

SECONDS = 20.0
PROMPT = 2.0
"""How soon a change has to be told, beside what a busy machine takes."""
SLACK = 3.0


class Api:
    """Calls to one coordinator."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=SECONDS, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, path: str, headers: dict[str, str] | None = None, **query: Any) -> httpx.Response:
        return self._client.get(path, params=query, headers=headers)

    def get(self, path: str, kind: type[T], **query: Any) -> T:
        """An answer that is exactly of a type: nothing is missing, nothing more is there."""
        response = self.ask(path, **query)
        assert response.status_code == 200, response.text
        return exactly(kind, response.content)

    def error(self, path: str, **query: Any) -> tuple[int, str, str]:
        return self.error_of(self.ask(path, **query))

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self._client.post(path, json=body, headers=headers)

    def post_bytes(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        return self._client.post(path, content=body, headers=headers)

    @staticmethod
    def error_of(response: httpx.Response) -> tuple[int, str, str]:
        detail = response.json()["error"]
        assert set(detail) == {"code", "message"}
        return response.status_code, detail["code"], detail["message"]

    @contextmanager
    def events(self, job: str = "", last_id: int | None = None) -> "Iterator[EventStream]":
        with EventStream(self.url, job, last_id) as stream:
            yield stream


def exactly(kind: type[T], body: bytes) -> T:
    value = msgspec.json.decode(body, type=kind)
    assert msgspec.to_builtins(value) == json.loads(body)
    return value


class Event:
    """One server-sent event."""

    def __init__(self, kind: str, event_id: int, data: Any) -> None:
        self.kind = kind
        self.id = event_id
        self.data = data


class EventStream:
    """Reads events in a thread."""

    def __init__(self, url: str, job: str, last_id: int | None) -> None:
        self._client = httpx.Client(timeout=httpx.Timeout(SECONDS, read=40.0), trust_env=False)
        headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
        self._request = self._client.stream(
            "GET", f"{url}/api/events", params={"job": job} if job else {}, headers=headers
        )
        self._queue: queue.Queue[Event | None] = queue.Queue()
        self.last_id = 0
        self._closed = False

    def __enter__(self) -> "EventStream":
        self._response = self._request.__enter__()
        assert self._response.status_code == 200
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread closes the connection when it next hears something: that is soon.
        self._closed = True

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            for line in self._response.iter_lines():
                if self._closed:
                    break
                if line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif "data" in fields:
                    data = json.loads(fields["data"])
                    self._queue.put(Event(fields["event"], int(fields["id"]), data))
                    fields = {}
        except (httpx.HTTPError, httpx.StreamError, RuntimeError, OSError):
            pass
        finally:
            self._response.close()
            self._client.close()
            self._queue.put(None)

    def next(self, seconds: float = SECONDS) -> Event | None:
        """The next event; none: the stream has ended."""
        event = self._queue.get(timeout=seconds)
        if event is not None:
            assert event.id >= self.last_id
            assert event.data["event_id"] == event.id
            self.last_id = event.id
        return event

    def snapshot(self) -> Any:
        event = self.next()
        assert event is not None
        assert event.kind == "snapshot"
        return event.data

    def until(self, found: Callable[[Any], T | None], seconds: float = PROMPT + SLACK) -> T:
        """The first thing that is found in a change, soon."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self.next(left)
            except queue.Empty:
                break
            assert event is not None, "the stream has ended"
            result = found(event.data)
            if result is not None:
                return result
        raise AssertionError(f"nothing was told within {seconds} s")


def worker_in(worker_id: str, **wanted: Any) -> Callable[[Any], Any]:
    """Finds a worker's row with these values in a change."""

    def find(change: Any) -> Any:
        for row in change.get("workers", ()):
            if row["worker_id"] == worker_id and all(row[k] == v for k, v in wanted.items()):
                return row
        return None

    return find


def log_in(event: str) -> Callable[[Any], Any]:
    """Finds an entry of the journal in a change."""
    return lambda change: next(
        (entry for entry in change.get("logs", ()) if entry["event"] == event), None
    )
