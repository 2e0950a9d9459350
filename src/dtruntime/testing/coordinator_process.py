"""A real coordinator process on this machine, for tests and demos."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import StrataError

START_SECONDS = 30.0


class LocalCoordinator:
    """A coordinator process on loopback that can be killed and started again.

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

        With ``http`` it also serves the HTTP API and the dashboard, at `http_url`.
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
        """Where workers find it."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        """Where its HTTP API is; only with ``http=True``."""
        if not self._has_http:
            raise StrataError("this coordinator serves no HTTP: give LocalCoordinator http=True")
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def pid(self) -> int:
        """Its process number."""
        if self._process is None:
            raise StrataError("the coordinator is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_path.read_text(encoding="utf-8") if self.log_path.exists() else ""

    def start(self) -> Self:
        """Start it and wait until it serves."""
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
        """Wait for it to end by itself; returns its exit code."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if self._own is not None:
            self._own.cleanup()


def _toml(value: str | int | float) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
