"""What torch and safetensors have for checkpoints."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .base import SavesTensors, flush


class TorchSave(SavesTensors):
    """``torch.save`` and fsync."""

    def save(self) -> None:
        path = self.next_path(".pt")
        torch.save(self.state, path)
        flush(path)

    def load(self) -> object:
        return torch.load(self.path(".pt"), weights_only=True, mmap=False)


class Safetensors(SavesTensors):
    """``safetensors.torch.save_file`` and fsync."""

    def save(self) -> None:
        path = self.next_path(".safetensors")
        safetensors.torch.save_file(self.state, path)
        flush(path)

    def load(self) -> object:
        return safetensors.torch.load_file(self.path(".safetensors"))


class DcpSave(SavesTensors):
    """``dcp.save``, which calls fsync by itself."""

    def save(self) -> None:
        dcp.save(self.state, checkpoint_id=self.next_path(), no_dist=True)

    def load(self) -> object:
        empty = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        dcp.load(empty, checkpoint_id=self.path(), no_dist=True)
        return empty


class DcpAsync(DcpSave):
    """``dcp.async_save``, if asked with memory for the copy that is kept from save to save."""

    keeps_copy = False

    def make_state(self) -> Any:
        # Pinned memory needs a device; all else are the defaults.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        return super().make_state()

    def save(self) -> None:
        options = {"async_stager": self._stager} if self.keeps_copy else {}
        self._future: Future[Any] = dcp.async_save(
            self.state, checkpoint_id=self.next_path(), no_dist=True, **options
        )

    def settle(self) -> None:
        self._future.result()

    def close(self) -> None:
        self._stager.close()
