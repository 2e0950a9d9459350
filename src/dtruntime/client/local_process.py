"""This machine: the identity of its processes, whether they still exist, and resource usage.

Process ids are reused, so a process is identified by its id and its start time. Both are valid only
within one boot of one machine and one PID namespace, which `machine_id` identifies. Where the
system does not say (anything but Linux, or a foreign ``/proc``), dead members are detected by their
heartbeats alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..errors import ConnectionError, StrataError
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..telemetry import EventLog
from ..types import GpuUsage, ResourceUsage

log = EventLog("worker")

NAMED = 8
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """The identity of a process on its machine."""

    machine: str
    """Empty: unknown, and so are the other two."""
    pid: int
    started: int
    """In clock ticks since boot."""

    @classmethod
    def own(cls) -> LocalProcess:
        """This process."""
        stat = _read(os.getpid())
        # In the /proc of another namespace this process has another id.
        if stat is None or stat.started == 0 or not _is_own_proc():
            return cls("", 0, 0)
        return cls(machine_id(), os.getpid(), stat.started)


def machine_id() -> str:
    """Identifies this boot of this machine and its PID and time namespaces; empty if unknown.

    A digest, so that it reveals nothing but that two processes share a machine. It includes the
    host name because clones of a virtual machine may share everything else.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        pids = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return ""
    try:
        times = (_PROC / "self/ns/time").stat().st_ino
    except OSError:
        times = 0
    place = f"{boot} {pids} {times} {socket.gethostname()}"
    return hashlib.sha256(place.encode()).hexdigest()[:32]


def has_ended(pid: int, started: int) -> bool:
    """Whether a process of this machine is certainly gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    stat = _read(pid)
    return stat is not None and (stat.started != started or stat.is_zombie)


async def report_ended(channel: Channel, job: str, own: LocalProcess, patience: float) -> None:
    """Report members of the job whose processes on this machine are gone.

    Otherwise they would hold their ranks until their heartbeats are missed.
    """
    if not own.machine:
        return
    request = pb.ProcessesRequest(
        job=job, machine=own.machine, pid=own.pid, process_started=own.started
    )
    try:
        reply = await channel.call("ListProcesses", request, pb.ProcessList, patience=patience)
        gone = [one for one in reply.processes if has_ended(one.pid, one.process_started)]
        if not gone:
            return
        ended = pb.EndedProcesses(
            job=job, machine=own.machine, incarnations=[one.incarnation for one in gone]
        )
        await channel.call(
            "ReportEndedProcesses", ended, pb.EndedProcessesReported, patience=patience
        )
    except ConnectionError:
        raise
    except StrataError as exc:
        # A coordinator older than this client detects them by their heartbeats.
        log.debug("processes.not_reported", reason=str(exc))
        return
    log.warning(
        "processes.ended",
        job=job,
        workers=", ".join(f"{one.worker_id} (process {one.pid})" for one in gone[:NAMED]),
        count=len(gone),
    )


@dataclass(frozen=True, slots=True)
class _Stat:
    started: int
    is_zombie: bool


def _read(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        # The name is in parentheses and may contain any characters.
        fields = text.rpartition(")")[2].split()
        state, threads, started = fields[0], int(fields[17]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
    return _Stat(started, state in "ZX" and threads <= 1)


def _is_own_proc() -> bool:
    try:
        return os.readlink(_PROC / "self") == str(os.getpid())
    except OSError:
        return False


CPU_SECONDS = 0.1
"""CPU usage over a shorter time is meaningless."""


class ResourceProbe:
    """Samples CPU, memory and, when ``nvidia-ml-py`` is installed, every GPU."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cpu_percent = self._process.cpu_percent()
        self._cpu_at = time.monotonic()
        self._memory_total = psutil.virtual_memory().total
        self._nvml, self._gpus = _open_gpus()

    def sample(self) -> ResourceUsage:
        """The usage since the last sample."""
        return ResourceUsage(
            cpu_percent=self._cpu(),
            memory_used_bytes=self._process.memory_info().rss,
            memory_total_bytes=self._memory_total,
            gpus=tuple(self._gpu(index) for index in range(len(self._gpus))),
        )

    def _cpu(self) -> float:
        now = time.monotonic()
        if now - self._cpu_at >= CPU_SECONDS:
            self._cpu_at = now
            self._cpu_percent = self._process.cpu_percent()
        return self._cpu_percent

    def _gpu(self, index: int) -> GpuUsage:
        nvml, handle = self._nvml, self._gpus[index]
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return GpuUsage(
                index,
                float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                int(memory.used),
                int(memory.total),
                float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            )
        except nvml.NVMLError:
            return GpuUsage(index)


def _open_gpus() -> tuple[Any, list[Any]]:
    with contextlib.suppress(ImportError):
        nvml = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            return nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except nvml.NVMLError:
            pass
    return None, []
