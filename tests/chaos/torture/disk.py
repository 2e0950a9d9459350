"""A small disk that can be filled up; needs the right to mount."""

import errno
import os
import subprocess
from pathlib import Path
from typing import Self

SIZE_MB = 24


class SmallDisk:
    """A tmpfs of a few megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "strata-chaos"]
        subprocess.run([*command, str(self.folder)], check=True, capture_output=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True, capture_output=True)

    def fill(self) -> None:
        """Leave no room for anything."""
        with open(self._filler, "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink(missing_ok=True)


def why_no_small_disk(folder: Path) -> str:
    """Why a small disk cannot be had, or nothing."""
    if os.geteuid() != 0:
        return "only root can mount a small disk"
    try:
        with SmallDisk(folder):
            return ""
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"a small disk cannot be mounted here: {exc}"
