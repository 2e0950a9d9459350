"""A worker in a real process of its own, that can be killed, paused and talked to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import StrataError

WAIT_SECONDS = 30.0


class WorkerProcess:
    """A Python program in a process of its own, with lines in and lines out.

    ::

        script = '''
        from dtruntime import TrainingOrchestrator
        with TrainingOrchestrator() as orchestrator:
            print("registered", orchestrator.register(), flush=True)
            orchestrator.barrier("start")
        '''
        with WorkerProcess(script, env={"COORDINATOR_URL": coordinator.url}) as worker:
            worker.expect("registered")
            worker.kill()

    What it writes to stderr is in `log`. Leaving the ``with`` block kills it.
    """

    def __init__(
        self,
        program: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``program`` is source code, or the path of a file; ``env`` is added to this process's."""
        self._folder = tempfile.TemporaryDirectory(prefix="strata-worker-")
        self._log_path = Path(self._folder.name) / "stderr"
        self._program = Path(self._folder.name) / "program.py"
        if isinstance(program, str):
            self._program.write_text(program, encoding="utf-8")
        else:
            self._program = Path(program)
        self._arguments = list(arguments)
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._said = threading.Condition()
        self._lines: list[str] = []
        self._read = 0
        self._ended = False

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._running().pid

    @property
    def log(self) -> str:
        """What it has written to stderr."""
        return self._log_path.read_text(encoding="utf-8") if self._log_path.exists() else ""

    @property
    def lines(self) -> list[str]:
        """All lines that it has written to stdout."""
        with self._said:
            return list(self._lines)

    def start(self) -> Self:
        """Start the process."""
        with self._log_path.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(self._program), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=self._env,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._said:
                self._lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()

    def send(self, line: str) -> None:
        """Write a line to its stdin."""
        stdin = self._running().stdin
        assert stdin is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise StrataError(f"the worker has ended; its log:\n{self.log[-4000:]}") from None

    def close_input(self) -> None:
        """End its stdin, as a finished parent would."""
        stdin = self._running().stdin
        assert stdin is not None
        stdin.close()

    def next_line(self, timeout: float = WAIT_SECONDS) -> str:
        """The next line of its stdout that was not read yet."""
        deadline = time.monotonic() + timeout
        with self._said:
            while self._read == len(self._lines):
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    what = "has ended" if self._ended else f"said nothing for {timeout:g} s"
                    raise StrataError(f"the worker {what}; its log:\n{self.log[-4000:]}")
                self._said.wait(left)
            self._read += 1
            return self._lines[self._read - 1]

    def expect(self, start: str, timeout: float = WAIT_SECONDS) -> str:
        """Read lines until one begins with ``start``, and return it."""
        deadline = time.monotonic() + timeout
        while True:
            line = self.next_line(max(0.0, deadline - time.monotonic()))
            if line.startswith(start):
                return line

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop it with SIGSTOP, as a machine that hangs would."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self.wait()

    def wait(self, timeout: float = WAIT_SECONDS) -> int:
        """Wait for its end; returns its exit code, or minus the signal that ended it."""
        process = self._running()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise StrataError(
                f"the worker did not end within {timeout:g} s; its log:\n{self.log[-4000:]}"
            ) from None
        if self._reader is not None:
            self._reader.join(timeout)
        return code

    def close(self) -> None:
        """Kill it if it still runs, and remove what it left."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(WAIT_SECONDS)
            if self._reader is not None:
                self._reader.join(WAIT_SECONDS)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        self._folder.cleanup()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise StrataError("the worker is not running: call start() first")
        return self._process

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
