"""Where it was measured, so that the numbers can be judged."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from .._background import usable_cores
from .._version import __version__

PACKAGES = ("grpcio", "numpy", "obstore", "pyarrow", "pygrpc-native", "uvloop", "xxhash")
BUSY_SHARE = 0.5
"""A load average of more than this share of all cores says that something else is running."""


class Machine(msgspec.Struct, frozen=True):
    """This machine, and how busy it was before anything was measured."""

    system: str
    processor: str
    cores: int
    usable_cores: int
    """Cores that this process may use."""
    memory_bytes: int
    available_bytes: int
    python: str
    strata: str
    packages: dict[str, str]
    load_average: list[float]
    """Of the last 1, 5 and 15 minutes; empty where the system has none."""
    busy: bool


def describe() -> Machine:
    """Look at this machine."""
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    load = _load_average()
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=cores,
        usable_cores=usable_cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        python=platform.python_version(),
        strata=__version__,
        packages={name: found for name in PACKAGES if (found := _version(name))},
        load_average=load,
        busy=is_busy(load, cores),
    )


def is_busy(load_average: list[float], cores: int) -> bool:
    """Whether the last minute's load says that others use the machine."""
    return bool(load_average) and load_average[0] > cores * BUSY_SHARE


def _load_average() -> list[float]:
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except OSError:
        return []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
