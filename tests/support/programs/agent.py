"""The program of a remote-controlled worker: does what lines on stdin say, in threads.

The argument is the orchestrator's settings. A request is ``id (attribute, args, kwargs)``, the
answer ``id ok VALUE`` or ``id error EXCEPTION``; all of it pickled, in base64. Requests run side
by side, so that a barrier does not keep the worker from answering.
"""

import asyncio
import base64
import hashlib
import os
import pickle
import sys
import threading
import time
from typing import Any

from dtruntime import TrainingOrchestrator
from dtruntime.telemetry import configure_logging


def _dump(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _load(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


class Agent:
    """One worker: an orchestrator, and a few things to do besides."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.orchestrator = TrainingOrchestrator(**settings)
        self._writing = threading.Lock()

    def compute_in_c(self, seconds: float) -> int:
        """Keep this thread in C code that releases the GIL."""
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000)
            rounds += 1
        return rounds

    def spin(self, seconds: float, threads: int) -> None:
        """Keep the GIL contended by threads that run pure Python."""

        def count() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                sum(range(1000))

        running = [threading.Thread(target=count) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    def exit(self, code: int) -> None:
        os._exit(code)

    def serve(self) -> None:
        for line in sys.stdin:
            number, _, request = line.partition(" ")
            threading.Thread(target=self._answer, args=(number, *_load(request))).start()

    def _answer(
        self, number: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            found = getattr(self if hasattr(self, name) else self.orchestrator, name)
            value = found(*args, **kwargs) if callable(found) else found
            if asyncio.iscoroutine(value):
                value = asyncio.run(value)
            answer = f"{number} ok {_dump(value)}"
        except BaseException as exc:
            answer = f"{number} error {_dump(exc)}"
        with self._writing:
            print(answer, flush=True)


if __name__ == "__main__":
    configure_logging()
    Agent(_load(sys.argv[1])).serve()
