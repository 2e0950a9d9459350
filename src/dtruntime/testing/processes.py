"""Real processes for tests: a coordinator, and workers that can be killed, paused and talked to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from ..errors import StrataError

T = TypeVar("T")

START_SECONDS = 30.0
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.02


class LocalCoordinator:
    """A coordinator process on the loopback interface that can be killed and restarted.

    ::

        with LocalCoordinator() as coordinator:
            orchestrator = TrainingOrchestrator(coordinator_url=coordinator.url)

    After `kill` (SIGKILL) or `stop` (SIGTERM), `start` brings it back on the same port with
    the same data directory.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        heartbeat_interval_ms: int = 1000,
        heartbeat_timeout_ms: int = 30000,
        http: bool = False,
        options: Sequence[str] = (),
        settings: dict[str, str | int | float] | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """``settings`` are further keys of ``[coordinator]``, ``options`` further arguments.

        With ``http`` it also serves the HTTP API and the dashboard at `http_url`.
        """
        self._own = tempfile.TemporaryDirectory(prefix="strata-test-") if data_dir is None else None
        self.data_dir = Path(self._own.name if self._own else str(data_dir))
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = Path(log_path) if log_path else self.data_dir / "coordinator.log"
        self._settings = {
            "heartbeat_interval_ms": heartbeat_interval_ms,
            "heartbeat_timeout_ms": heartbeat_timeout_ms,
            **(settings or {}),
        }
        self._options = list(options)
        self._port = 0
        self._http_port = 0
        self._has_http = http
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The URL for workers."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        """The URL of its HTTP API; only with ``http=True``."""
        if not self._has_http:
            raise StrataError("this coordinator serves no HTTP: give LocalCoordinator http=True")
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def pid(self) -> int:
        """The process id."""
        if self._process is None:
            raise StrataError("the coordinator is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(encoding="utf-8") if self.log_path.exists() else ""

    def start(self) -> Self:
        """Start it, and wait until it serves."""
        config = self.data_dir / "coordinator.toml"
        lines = [f"{key} = {_toml(value)}" for key, value in self._settings.items()]
        config.write_text("[coordinator]\n" + "\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "dtruntime.cli.main", "coordinator"]
        command += [f"127.0.0.1:{self._port}", "--data-dir", str(self.data_dir)]
        http = ["--http", f"127.0.0.1:{self._http_port}"] if self._has_http else ["--no-http"]
        command += ["--config", str(config), *http, *self._options]
        with self.log_path.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        try:
            self._port = self._wait_for_port(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def _wait_for_port(self, process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ready, _, _ = select.select([process.stdout], [], [], 0.1)
            line = process.stdout.readline() if ready else ""
            if line.startswith("coordinator listening on "):
                if self._has_http:
                    # Both lines are written at once.
                    self._http_port = int(process.stdout.readline().rsplit(":", 1)[1])
                return int(line.rsplit(":", 1)[1])
            if process.poll() is not None:
                break
        raise StrataError(f"the coordinator did not start; its log:\n{self.log[-2000:]}")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it with SIGTERM; returns its exit code."""
        return self._end(signal.SIGTERM)

    def wait(self, timeout: float = 20.0) -> int:
        """Wait for it to end; returns its exit code."""
        process = self._process
        if process is None:
            raise StrataError("the coordinator is not running")
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise StrataError(f"the coordinator did not end within {timeout:g} s") from None
        self._end(signal.SIGKILL)
        return code

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        try:
            return process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise StrataError("the coordinator did not end within 20 s") from None
        finally:
            if process.stdout is not None:
                process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._own is not None:
            self._own.cleanup()


def _toml(value: str | int | float) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


class WorkerProcess:
    """A Python program in its own process, talked to in lines.

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

    `log` has its stderr. Leaving the ``with`` block kills it.
    """

    def __init__(
        self,
        program: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``program`` is source code or the path of a file; ``env`` adds to the environment."""
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
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._lines_read = 0
        self._ended = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._running().pid

    @property
    def log(self) -> str:
        """Its stderr so far."""
        return self._log_path.read_text(encoding="utf-8") if self._log_path.exists() else ""

    @property
    def lines(self) -> list[str]:
        """The lines of its stdout so far."""
        with self._changed:
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
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

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
        """The next unread line of its stdout."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._lines_read == len(self._lines):
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    what = "has ended" if self._ended else f"said nothing for {timeout:g} s"
                    raise StrataError(f"the worker {what}; its log:\n{self.log[-4000:]}")
                self._changed.wait(left)
            self._lines_read += 1
            return self._lines[self._lines_read - 1]

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
        """Stop it with SIGSTOP, like a machine that hangs."""
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
        """Wait for it to end; returns its exit code, or minus the signal that ended it."""
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
        """Kill it if it still runs, and remove its files."""
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

    def __exit__(self, *_: object) -> None:
        self.close()


def eventually(condition: Callable[[], T | None], *, within: float = 30.0, what: str = "") -> T:
    """Wait until ``condition()`` returns something true, and return that.

    An `AssertionError` from it counts as "not yet"; any other exception ends the wait. Raises
    `AssertionError` with what was seen last when ``within`` seconds have passed.
    """
    attempts = _attempts(condition, within, what)
    while not (value := next(attempts)):
        time.sleep(POLL_SECONDS)
    return value


async def eventually_async(
    condition: Callable[[], T | None], *, within: float = 30.0, what: str = ""
) -> T:
    """As `eventually`, without blocking the event loop."""
    attempts = _attempts(condition, within, what)
    while not (value := next(attempts)):  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(POLL_SECONDS)
    return value


def _attempts(condition: Callable[[], T | None], within: float, what: str) -> Iterator[T | None]:
    """Yields None until the condition holds, then its value; raises when the time is up."""
    deadline = time.monotonic() + within
    while True:
        late = time.monotonic() > deadline
        value, failure = None, None
        try:
            value = condition()
        except AssertionError as exc:
            failure = exc
        if late and not value:
            what = what or getattr(condition, "__name__", "the condition")
            raise AssertionError(
                f"{what} did not hold within {within:g} s; last seen: {failure or repr(value)}"
            ) from failure
        yield value or None
