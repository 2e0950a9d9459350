"""Folders of files as checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import CheckpointDamagedError

FILES = "files"


def read_folder(folder: Path) -> dict[str, Any]:
    """The state of a folder: its files, mapped into memory."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = _mapped(path) if path.stat().st_size else np.empty(0, np.uint8)
    return {FILES: files}


def write_folder(state: Any, folder: Path) -> None:
    """Make a folder of its state; a folder of that name is replaced when everything is there."""
    files = state.get(FILES) if isinstance(state, dict) else None
    if not isinstance(files, dict):
        raise CheckpointDamagedError(f"{folder} cannot be made: the checkpoint is not of a folder")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, content in files.items():
        path = unfinished / _checked(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(memoryview(content))
            file.flush()
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _mapped(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Its bytes, which stay readable when the file is deleted."""
    return np.memmap(path, np.uint8, mode="r")


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise CheckpointDamagedError(f"the checkpoint has a file that is to lie outside: {name!r}")
    return path
