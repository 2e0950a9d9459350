"""The least that can be done: copying memory, writing blocks, reading files."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from dtruntime._background import side_by_side
from dtruntime.storage.local_writer import BLOCK, LANES

from .. import states
from .base import Contender, Task, flush


class Memcpy(Contender):
    """Copies tensors into memory that is used again."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._tensors = [tensor.numpy() for tensor in states.make_tensors(task.size).values()]
        self._buffer = np.empty(sum(t.nbytes for t in self._tensors) // 4, np.float32)

    def save(self) -> None:
        at = 0
        for tensor in self._tensors:
            np.copyto(self._buffer[at : at + tensor.size], tensor)
            at += tensor.size


class PlainWrite(Contender):
    """Writes bytes through the page cache, and fsync."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._data = states.make_bytes(task.size)

    def save(self) -> None:
        path = self.next_path(".bin")
        with path.open("wb", buffering=0) as file:
            left = memoryview(self._data)
            while left:
                left = left[file.write(left) :]
        flush(path)


class DirectWrite(Contender):
    """Writes aligned blocks past the page cache, as many at a time as Strata does, and fsync."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._memory = mmap.mmap(-1, task.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[:] = states.make_bytes(task.size)

    def save(self) -> None:
        path = self.next_path(".bin")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
        try:
            os.posix_fallocate(handle, 0, self.task.size)
            with memoryview(self._memory) as whole:
                side_by_side(
                    range(0, self.task.size, BLOCK),
                    lambda at: _put(handle, whole[at : at + BLOCK], at),
                    LANES,
                )
        finally:
            os.close(handle)
        flush(path)


class ReadNew(Contender):
    """Reads a file into memory that is new, as that of a loaded state is."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._target: NDArray[np.uint8] | None = None

    def save(self) -> None:
        path = self.next_path(".bin")
        path.write_bytes(states.make_bytes(self.task.size))
        flush(path)

    def load(self) -> object:
        target = self.target()
        with self.path(".bin").open("rb", buffering=0) as file:
            left = memoryview(target.data)
            while left:
                left = left[file.readinto(left) :]
        return target

    def target(self) -> NDArray[np.uint8]:
        """Where to read into."""
        return np.empty(self.task.size, np.uint8)


class ReadAgain(ReadNew):
    """The same into memory that has been used."""

    def target(self) -> NDArray[np.uint8]:
        if self._target is None:
            self._target = np.zeros(self.task.size, np.uint8)
        return self._target


def _put(handle: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written
