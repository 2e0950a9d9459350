"""Measurements in processes of their own: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
PYTHON = Path(sys.executable)
END_SECONDS = 10.0

Answer = Any
Handler = Callable[[dict[str, Any]], Answer]


class ProcessFailed(Exception):
    """A measuring process failed; the message says why."""


class Process:
    """A module that runs `serve`, and answers questions for the length of a block."""

    def __init__(self, module: str, order: dict[str, Any], python: Path = PYTHON) -> None:
        """``order`` tells it what to prepare."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(order)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._errors.close()

    def ask(self, question: dict[str, Any], seconds: float = 600.0) -> Answer:
        """Send a question and wait for its answer; raises ``ProcessFailed``."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(OSError):  # it may have ended, with an answer that says why
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
        with selectors.DefaultSelector() as answers:
            answers.register(stdout, selectors.EVENT_READ)
            if not answers.select(seconds):
                self.stop()
                raise ProcessFailed(f"no answer within {seconds:.0f} s")
        line = stdout.readline()
        if not line:
            raise ProcessFailed(f"its process ended: {self._last_error()}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ProcessFailed(answer["error"])
        return answer

    def stop(self) -> None:
        """End it and the processes that it started."""
        if self._process.returncode is None:
            # Some libraries leave shared memory behind unless they end on their own.
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no message")[:300]


def call(module: str, question: dict[str, Any], python: Path = PYTHON) -> Answer:
    """Ask a process of its own one question."""
    with Process(module, {}, python) as process:
        return process.ask(question, seconds=1800)


def serve(prepare: Callable[[dict[str, Any]], Handler]) -> None:
    """Answer questions until the input ends; an exception is the last answer.

    ``prepare`` is given the order, and returns what answers a question.
    """
    # Libraries print: only answers may go to the real standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def answer(content: Answer) -> None:
        print(json.dumps(content), file=out, flush=True)

    try:
        handler = prepare(json.loads(sys.argv[1]))
        for line in sys.stdin:
            answer(handler(json.loads(line)))
    except Exception as exc:
        traceback.print_exc()
        answer({"error": f"{type(exc).__name__}: {exc}".splitlines()[0][:300]})
        sys.exit(1)


@contextmanager
def traced_peak() -> Iterator[Callable[[], int]]:
    """Trace allocations; the function returns how many bytes there were at most."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
