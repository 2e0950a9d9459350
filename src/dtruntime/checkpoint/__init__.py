"""Checkpoints: saved without stalling training, committed whole, checked when loaded.

Read ``manager`` first, then ``save`` and ``load``. A checkpoint consists of one part for each rank
(``file_format``), whose state dict is a skeleton and buffers (``state_dict``); ``store`` knows
which are committed, ``upload`` copies them from a local tier, and ``dcp``, ``jax`` and
``safetensors`` are the other ways in and out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from ..retention import Retention as Retention
    from .manager import CheckpointManager as CheckpointManager
    from .manager import CheckpointWriter as CheckpointWriter
    from .save.handle import Saved as Saved
    from .save.handle import SaveHandle as SaveHandle
    from .save.handle import SavePolicy as SavePolicy
else:
    __getattr__, __dir__, __all__ = _lazy.exports(
        __name__,
        {
            "..retention": "Retention",
            ".manager": "CheckpointManager CheckpointWriter",
            ".save.handle": "SaveHandle SavePolicy Saved",
        },
    )
