"""Checkpoints: saved without stalling training, committed whole, checked when loaded.

Read ``manager`` first, then ``save`` and ``load``. A checkpoint consists of one part for each rank
(``file_format``), whose state dict is a skeleton and buffers (``state_dict``); ``store`` knows
which are committed, ``upload`` copies them from a local tier, and ``dcp``, ``jax`` and
``safetensors`` are the other ways in and out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..retention import Retention
    from .manager import CheckpointManager, CheckpointWriter
    from .save.handle import Saved, SaveHandle
    from .save.timing import SavePolicy

_HOME_OF = {
    "CheckpointManager": ".manager",
    "CheckpointWriter": ".manager",
    "Retention": "..retention",
    "SaveHandle": ".save.handle",
    "SavePolicy": ".save.timing",
    "Saved": ".save.handle",
}

__all__ = [
    "CheckpointManager",
    "CheckpointWriter",
    "Retention",
    "SaveHandle",
    "SavePolicy",
    "Saved",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home, __name__), name)
