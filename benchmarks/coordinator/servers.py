"""The servers under load, each a process of its own on the server's core."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import grpc
import psutil

from .client import wait_until_serving
from .tools import SetupError, Tools, core_numbers

START_TIMEOUT = 30.0
STOP_TIMEOUT = 20.0
LOG_TAIL_LINES = 15

CONFIG = """\
[coordinator]
worker_rate_limit = 1000000
peer_rate_limit = 1000000
heartbeat_timeout_ms = 3600000
"""
"""Limits raised, not removed, and no worker dies of silence between two measurements."""


class Kind(Enum):
    """A server that takes part in the comparison."""

    ECHO_NATIVE = "echo, pygrpc-native"
    ECHO_AIO = "echo, grpc.aio"
    STRATA_NATIVE = "Strata, pygrpc-native"
    STRATA_AIO = "Strata, grpc.aio"

    @property
    def transport(self) -> str:
        """The gRPC server library."""
        return self.value.rpartition(" ")[2]

    @property
    def is_echo(self) -> bool:
        """Whether it is the bare handler."""
        return self.value.startswith("echo")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    kind: Kind
    address: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """CPU time it has used so far, over all its threads."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Its resident memory."""
        return int(self.process.memory_info().rss)


@dataclass(slots=True)
class Usage:
    """CPU used during a block, filled in when it ends."""

    server_seconds: float = 0.0
    server_share: float = 0.0
    """Part of the server's cores that the server took."""
    load_share: float = 0.0
    """Part of the load's cores that the generators took."""
    foreign_share: float = 0.0
    """Part of the server's cores or of the load's, the larger one, that others took."""


@contextmanager
def metered(server: Server, tools: Tools) -> Iterator[Usage]:
    """Measure the CPU that a server uses during a block, that the generators use which finish
    within it, and what other processes take from both."""
    usage = Usage()
    served_on, loaded_from = core_numbers(tools.server_cores), core_numbers(tools.load_cores)
    began, serving, loading = time.monotonic(), server.cpu_seconds(), _finished_children_seconds()
    busy_serving, busy_loading = _busy_seconds(served_on), _busy_seconds(loaded_from)
    yield usage
    seconds = time.monotonic() - began
    usage.server_seconds = server.cpu_seconds() - serving
    usage.server_share = usage.server_seconds / seconds / len(served_on)
    usage.load_share = (_finished_children_seconds() - loading) / seconds / len(loaded_from)
    taken = (_busy_seconds(served_on) - busy_serving) / seconds / len(served_on)
    used = (_busy_seconds(loaded_from) - busy_loading) / seconds / len(loaded_from)
    usage.foreign_share = max(0.0, taken - usage.server_share, used - usage.load_share)


def _busy_seconds(cores: Sequence[int]) -> float:
    """Without interrupts: those of the loopback device belong to both sides."""
    times = psutil.cpu_times(percpu=True)
    return float(sum(times[c].user + times[c].nice + times[c].system for c in cores))


def _finished_children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def start(kind: Kind, tools: Tools, scratch: Path) -> Iterator[Server]:
    """Run a server for the length of a block; `scratch` receives its data and its log."""
    folder = scratch / kind.name.lower()
    folder.mkdir(parents=True, exist_ok=True)
    with folder.joinpath("log").open("ab") as log:
        port = 0 if kind.is_echo else _free_port()
        command = _echo(kind) if kind.is_echo else _coordinator(kind, folder, port)
        process = subprocess.Popen(
            tools.on_server_cores(*command),
            stdout=subprocess.PIPE if kind.is_echo else log,
            stderr=log,
        )
        try:
            port = port or _announced_port(process, folder)
            address = f"127.0.0.1:{port}"
            if not kind.is_echo:
                _check_coordinator(kind, address, process, folder)
            yield Server(kind, address, psutil.Process(process.pid))
        finally:
            _stop(process)


def _echo(kind: Kind) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.echo", "--transport", kind.transport]


def _coordinator(kind: Kind, folder: Path, port: int) -> list[str]:
    config = folder / "config.toml"
    config.write_text(CONFIG)
    return [
        *(sys.executable, "-m", "dtruntime.cli.main", "coordinator", f"127.0.0.1:{port}"),
        *("--data-dir", str(folder / "data")),
        *("--config", str(config)),
        *("--transport", kind.transport),
        *("--http", "127.0.0.1:0"),
    ]


def _announced_port(process: subprocess.Popen[bytes], folder: Path) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.strip().isdigit():
        raise SetupError(f"the echo server did not start:\n{_tail(folder)}")
    return int(line)


def _check_coordinator(
    kind: Kind, address: str, process: subprocess.Popen[bytes], folder: Path
) -> None:
    try:
        info = wait_until_serving(address, START_TIMEOUT)
    except (TimeoutError, grpc.RpcError) as exc:
        state = f"exit status {process.poll()}"
        raise SetupError(f"the coordinator does not serve ({state}):\n{_tail(folder)}") from exc
    if info.transport != kind.transport:
        raise SetupError(f"asked for {kind.transport}, but {info.transport} serves")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _tail(folder: Path) -> str:
    lines = folder.joinpath("log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
