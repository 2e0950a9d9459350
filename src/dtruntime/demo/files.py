"""Files that appear whole or not at all: parameters in exchange, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile

import numpy as np

from ..errors import StorageError
from .model import Classifier, Floats


def write_whole(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False) -> int:
    """Write under another name and rename; returns the size.

    ``durable`` means that the file survives a power cut once this returns.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        write(file)
        file.flush()
        size = file.tell()
        if durable:
            os.fsync(file.fileno())
    draft.replace(path)
    if durable:
        _sync_folder(path.parent)
    return size


def save_checkpoint(path: Path, model: Classifier, step: int, epoch: int) -> int:
    """Store a model durably; returns the size."""
    return write_whole(
        path,
        lambda file: np.savez(file, parameters=model.parameters, step=step, epoch=epoch),
        durable=True,
    )


def load_checkpoint(path: Path, hidden: int) -> tuple[Classifier, int]:
    """A stored model and its step; raises `StorageError` when the file is not a checkpoint."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return Classifier(hidden, stored["parameters"]), int(stored["step"])
    except (OSError, ValueError, KeyError, BadZipFile) as exc:
        raise StorageError(f"checkpoint {path} cannot be loaded: {exc}") from exc


class Exchange:
    """Parameters that the ranks hand each other through a folder.

    A rank removes its file of one round when the barrier of the next round has passed: by then
    everybody has read it.
    """

    def __init__(self, folder: Path, rank: int, workers: int) -> None:
        self._folder = folder
        self._rank = rank
        self._workers = workers

    def offer(self, round_: int, parameters: Floats, weight: int) -> None:
        """Put this rank's parameters there, with the number of samples behind them."""
        entry = np.concatenate([parameters, np.array([weight], np.float32)])
        write_whole(self._path(round_, self._rank), lambda file: np.save(file, entry))

    def average(self, round_: int) -> Floats | None:
        """The mean over all ranks, in rank order: bit for bit the same for everybody.

        Ranks count by the samples they learned from; ``None`` when there were none.
        """
        total: Floats | None = None
        weights = np.float32(0)
        for rank in range(self._workers):
            entry: Floats = np.load(self._path(round_, rank), allow_pickle=False)
            weighted = entry[:-1] * entry[-1]
            total = weighted if total is None else total + weighted
            weights += entry[-1]
        return None if total is None or not weights else total / weights

    def forget(self, round_: int) -> None:
        """Remove this rank's file of a round that everybody has read."""
        self._path(round_, self._rank).unlink(missing_ok=True)

    def _path(self, round_: int, rank: int) -> Path:
        return self._folder / f"round-{round_}.rank-{rank}.npy"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
