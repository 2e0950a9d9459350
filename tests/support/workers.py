"""Real worker processes that tests drive like objects."""

import base64
import itertools
import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

from dtruntime.testing import LocalCoordinator, WorkerProcess
from tests.support.paths import PROGRAMS

AGENT = PROGRAMS / "agent.py"
PATIENCE = 60.0


def _dump(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


class RemoteWorker:
    """A `TrainingOrchestrator` in another process.

    `call` runs a method there and returns, or raises, what it does; `begin` does not wait.
    """

    def __init__(self, url: str, /, env: dict[str, str] | None = None, **settings: Any) -> None:
        self.process = WorkerProcess(
            AGENT,
            [_dump(settings)],
            env={"STRATA_LOG_FORMAT": "json", "COORDINATOR_URL": url, **(env or {})},
        )
        self._numbers = itertools.count(1)
        self._pending: dict[str, Future[Any]] = {}

    def start(self) -> Self:
        self.process.start()
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def close(self) -> None:
        self.process.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        number = str(next(self._numbers))
        future = self._pending[number] = Future()
        self.process.send(f"{number} {_dump((method, args, kwargs))}")
        return future

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.begin(method, *args, **kwargs).result(PATIENCE)

    def register(self) -> str:
        return str(self.call("register"))

    def barrier(self, name: str, timeout_ms: int = 60_000) -> Future[Any]:
        return self.begin("barrier", name, timeout_ms=timeout_ms)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The entries of this event in the worker's log."""
        entries = [json.loads(line) for line in self.process.log.splitlines() if line[:1] == "{"]
        return [entry for entry in entries if entry["event"] == name]

    def kill(self) -> None:
        self.process.kill()

    def pause(self) -> None:
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    def _listen(self) -> None:
        try:
            while True:
                number, outcome, value = self.process.next_line(timeout=600).split(" ")
                found = pickle.loads(base64.b64decode(value))
                future = self._pending.pop(number)
                if outcome == "ok":
                    future.set_result(found)
                else:
                    future.set_exception(found)
        except Exception as exc:
            for future in self._pending.values():
                future.set_exception(exc)


@contextmanager
def remote_workers(
    count: int, coordinator: LocalCoordinator | str, /, **settings: Any
) -> Iterator[list[RemoteWorker]]:
    """That many registered workers, in rank order, each heard of since the last one joined."""
    url = coordinator if isinstance(coordinator, str) else coordinator.url
    workers = [RemoteWorker(url, **settings) for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.register()
        for worker in workers:
            worker.call("heartbeat")
        yield workers
    finally:
        for worker in workers:
            worker.close()
