"""What torch and safetensors have for checkpoints."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .. import states
from .base import Contender, Task, flush


class _Tensors(Contender):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.state = states.make_tensors(task.size)

    def check(self, loaded: Any) -> None:
        states.check_tensors(loaded, self.state)


class TorchSave(_Tensors):
    """``torch.save`` and fsync."""

    def save(self) -> None:
        path = self.next_path(".pt")
        torch.save(self.state, path)
        flush(path)

    def load(self) -> object:
        return torch.load(self.path(".pt"), weights_only=True, mmap=False)


class Safetensors(_Tensors):
    """``safetensors.torch.save_file`` and fsync."""

    def save(self) -> None:
        path = self.next_path(".safetensors")
        safetensors.torch.save_file(self.state, path)
        flush(path)

    def load(self) -> object:
        return safetensors.torch.load_file(self.path(".safetensors"))


class DcpSave(_Tensors):
    """``dcp.save``, which calls fsync by itself."""

    def save(self) -> None:
        dcp.save(self.state, checkpoint_id=self.next_path(), no_dist=True)

    def load(self) -> object:
        empty = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        dcp.load(empty, checkpoint_id=self.path(), no_dist=True)
        return empty


class DcpAsync(DcpSave):
    """``dcp.async_save`` with its defaults."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._options: dict[str, Any] = {}
        self._future: Future[Any] | None = None

    def save(self) -> None:
        self._future = dcp.async_save(
            self.state, checkpoint_id=self.next_path(), no_dist=True, **self._options
        )

    def settle(self) -> None:
        assert self._future is not None
        self._future.result()


class DcpAsyncCached(DcpAsync):
    """The same with memory for the copy that is kept from save to save."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        # Pinned memory needs a device; all else are the defaults.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._options["async_stager"] = self._stager

    def close(self) -> None:
        self._stager.close()
