"""Contenders measured in turn, round after round, each in a process of its own."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .contenders import ENTRIES
from .dataset import Dataset
from .results import Contest, Pass, Runner

ROOT = Path(__file__).parents[2]
PREPARE_SECONDS = 600.0
END_SECONDS = 10.0
GRACE_SECONDS = 120.0
"""How much longer than asked a pass may take before its contender is given up."""

Announce = Callable[[str], None]


class Failed(Exception):
    """A contender could not be measured; the message says why."""


class Worker:
    """The process of one contender."""

    def __init__(self, python: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.data_loading.worker"],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a question and wait for its answer."""
        try:
            self._stdin.write(json.dumps(question).encode() + b"\n")
            self._stdin.flush()
        except OSError as exc:
            raise Failed(f"its process ended: {self._last_words()}") from exc
        answer = self._answer(seconds)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def stop(self) -> None:
        """End the process and those that it started."""
        if self._process.returncode is None:
            # Some libraries leave shared memory behind unless they end on their own.
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _answer(self, seconds: float) -> dict[str, Any]:
        stdout: Any = self._process.stdout
        with selectors.DefaultSelector() as waiting:
            waiting.register(stdout, selectors.EVENT_READ)
            if not waiting.select(seconds):
                self.stop()
                raise Failed(f"no answer within {seconds:.0f} s")
        line = stdout.readline()
        if not line:
            raise Failed(f"its process ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "nothing was said")[:300]


class Race:
    """Measures contenders that read the same data."""

    def __init__(
        self, python: Path, data: Dataset, converted_rows: int, scratch: Path, announce: Announce
    ) -> None:
        self._python = python
        self._data = data
        self._converted_rows = converted_rows
        self._scratch = scratch
        self._announce = announce

    def run(self, batch_sizes: Sequence[int], rounds: int, seconds: float) -> Contest:
        """All contenders for the data's format."""
        runners: dict[str, Runner] = {}
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for number, entry in enumerate(ENTRIES):
                if entry.format == self._data.format:
                    runners[entry.name] = self._enter(stack, number, workers)
            for batch_size in batch_sizes:
                for turn in range(rounds + 1):
                    for name, runner in runners.items():
                        self._announce(
                            f"{self._data.format}, batches of {batch_size}, "
                            f"round {turn} of {rounds}: {name}"
                        )
                        # The first is a short one that nobody counts, to warm up.
                        limit = seconds if turn else min(1.0, seconds)
                        found = _measure(workers[name], runner, batch_size, limit)
                        if found is not None and turn:
                            runner.passes.append(found)
        return Contest(self._data, list(runners.values()))

    def _enter(self, stack: ExitStack, number: int, workers: dict[str, Worker]) -> Runner:
        entry = ENTRIES[number]
        self._announce(f"{self._data.format}: preparing {entry.name}")
        log = self._scratch / f"worker-{number}.log"
        worker = stack.enter_context(Worker(self._python, log))
        workers[entry.name] = worker
        data = {**asdict(self._data), "folder": str(self._data.folder)}
        order = {
            "entry": number,
            "data": data,
            "converted_rows": self._converted_rows,
            "scratch": str(self._scratch / f"contender-{number}"),
        }
        try:
            ready = worker.ask(order, PREPARE_SECONDS)
        except Failed as exc:
            return Runner(entry, error=str(exc))
        return Runner(entry, ready["rows"], ready["prepare_seconds"], ready["version"])


def _measure(worker: Worker, runner: Runner, batch_size: int, seconds: float) -> Pass | None:
    if runner.error:
        return None
    question = {"batch_size": batch_size, "seconds": seconds}
    try:
        answer = worker.ask(question, seconds + GRACE_SECONDS)
    except Failed as exc:
        runner.error = str(exc)
        return None
    return Pass(batch_size, **answer)
