"""Checkpoints: saved without stalling training, committed whole, checked when loaded.

Read ``manager`` first, then ``engine``, which every way in and out goes through: the manager's
state dicts and bytes, ``dcp``, ``jax`` and ``safetensors``. It stages and writes with ``save``,
reads with ``load``, and learns from ``store`` what is committed; ``upload`` copies checkpoints from
a local tier. A checkpoint has one part for each rank (``file_format``), and the state dict of a
part is a skeleton and buffers (``state_dict``).
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
