"""The least that can be done: copying memory, writing blocks, reading files."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from dtruntime.bench.raw_storage import read_file, write_file

from .base import SavesBytes, SavesTensors, flush


class Memcpy(SavesTensors):
    """Copies tensors into memory that is used again."""

    def make_state(self) -> Any:
        arrays = [tensor.numpy() for tensor in super().make_state().values()]
        self._buffer = np.empty(sum(array.nbytes for array in arrays) // 4, np.float32)
        return arrays

    def save(self) -> None:
        at = 0
        for array in self.state:
            np.copyto(self._buffer[at : at + array.size], array)
            at += array.size


class Write(SavesBytes):
    """Writes aligned blocks past the page cache as Strata does, or through it, and fsync."""

    direct = True

    def make_state(self) -> Any:
        memory = mmap.mmap(-1, self.task.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:] = super().make_state()
        return memory

    def save(self) -> None:
        path = self.next_path(".bin")
        write_file(path, memoryview(self.state), direct=self.direct)
        flush(path)


class Read(SavesBytes):
    """Reads a file into memory that is new, as that of a loaded state is, or was used before."""

    is_new = True

    def make_state(self) -> Any:
        self._used = None if self.is_new else np.zeros(self.task.size, np.uint8)
        return super().make_state()

    def save(self) -> None:
        path = self.next_path(".bin")
        path.write_bytes(self.state)
        flush(path)

    def load(self) -> object:
        target = np.empty(self.task.size, np.uint8) if self._used is None else self._used
        read_file(self.path(".bin"), target.data)
        return target
