"""Processes of one machine: what a member says of its own, and whether another still exists.

A number is given to another process sooner or later, so a process is known by its number and the
moment it started. Both mean something only during one boot of one machine, and within one
namespace of numbers: `machine_id` names that place. Where the system does not tell (anything but
Linux, or a foreign ``/proc``), nothing is said, and members are missed by their heartbeats alone.
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
    """A process of one machine."""

    machine: str
    """Empty: not known, and the other two mean nothing."""
    pid: int
    started: int
    """In ticks since the boot."""

    @classmethod
    def own(cls) -> LocalProcess:
        """This process."""
        found = _read(os.getpid())
        # Seen through the /proc of another namespace, this process has another number.
        if found is None or found.started == 0 or not _is_own_proc():
            return cls("", 0, 0)
        return cls(machine_id(), os.getpid(), found.started)


def machine_id() -> str:
    """This boot of this machine, and the namespaces that process numbers and times are of.

    A digest, so that nobody learns more of the machine than that two processes share it. The host
    name is part of it because clones of a virtual machine may share everything else.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        numbers = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return ""
    try:
        times = (_PROC / "self/ns/time").stat().st_ino
    except OSError:
        times = 0
    named = f"{boot} {numbers} {times} {socket.gethostname()}"
    return hashlib.sha256(named.encode()).hexdigest()[:32]


def has_ended(pid: int, started: int) -> bool:
    """Whether a process of this machine is surely gone; what cannot be seen counts as there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    found = _read(pid)
    return found is not None and (found.started != started or found.is_dead)


async def report_ended(channel: Channel, job: str, own: LocalProcess, patience: float) -> None:
    """Tell the coordinator which members of a job were processes of this machine and are gone.

    Otherwise they would hold their ranks until their heartbeats are missed.
    """
    if not own.machine:
        return
    asked = pb.ProcessesRequest(
        job=job, machine=own.machine, pid=own.pid, process_started=own.started
    )
    try:
        reply = await channel.call("ListProcesses", asked, pb.ProcessList, patience=patience)
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
        # A coordinator that is older than this client misses them by their heartbeats.
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
    is_dead: bool
    """Ended, and not yet waited for by its parent."""


def _read(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        # The name stands in parentheses, and may have any characters.
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
"""Over a shorter time, a share of a processor says nothing."""


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
