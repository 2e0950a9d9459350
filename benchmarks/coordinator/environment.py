"""Where a run took place, so that its numbers can be judged."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from .tools import Tools

PACKAGES = ("dtruntime", "grpcio", "protobuf", "pygrpc-native", "uvloop")


def describe(tools: Tools, scratch: Path) -> dict[str, object]:
    """Machine, versions and how busy it was at the start."""
    return {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tools": tools.versions(),
        "server_cores": tools.server_cores,
        "load_cores": tools.load_cores,
        "load_average": os.getloadavg()[0],
        "data_on_tmpfs": _filesystem(scratch) == "tmpfs",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _filesystem(folder: Path) -> str:
    mounts = [
        part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)
    ]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
