"""What the disk can do at most, by fio."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from dtruntime.storage.local_writer import BLOCK, LANES

LEAST = 64 * 2**20
"""fio counts whole milliseconds: less than this cannot be measured with it."""
_SECONDS = 600


def version() -> str | None:
    """Which version there is, if any."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def write_seconds(folder: Path, size: int, *, direct: bool, jobs: int = 1) -> float:
    """How long ``jobs`` processes take to write a file of ``size`` bytes each, with fsync.

    Blocks are of Strata's size; with ``direct`` as many are under way in each file as Strata has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    how = ["--ioengine=libaio", f"--iodepth={LANES}"] if direct else ["--ioengine=psync"]
    command = [
        *("fio", "--name=limit", f"--directory={folder}", "--rw=write", f"--bs={BLOCK}"),
        *(f"--size={size}", f"--numjobs={jobs}", f"--direct={int(direct)}", *how),
        *("--end_fsync=1", "--group_reporting", "--output-format=json"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    finally:
        shutil.rmtree(folder)
    # Messages may stand before the document.
    document = json.loads(done.stdout[done.stdout.index("{") :])
    return float(document["jobs"][0]["write"]["runtime"]) / 1000
