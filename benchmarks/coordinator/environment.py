"""Where a run took place, so that its numbers can be judged."""

from __future__ import annotations

from pathlib import Path

import psutil

from .. import machine
from .tools import Tools

PACKAGES = ("dtruntime", "grpcio", "protobuf", "pygrpc-native", "uvloop")


def describe(tools: Tools, scratch: Path) -> dict[str, object]:
    """Machine, versions, load generators and their cores."""
    return {
        **machine.describe(PACKAGES),
        "tools": tools.versions(),
        "server_cores": tools.server_cores,
        "load_cores": tools.load_cores,
        "data_on_tmpfs": _filesystem(scratch) == "tmpfs",
    }


def _filesystem(folder: Path) -> str:
    mounts = [
        part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)
    ]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
