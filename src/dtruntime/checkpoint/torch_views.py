"""Tensors on memory that is there already."""

from __future__ import annotations

from typing import Any

import torch

from .state_dict.torch_tensors import DTYPES


def tensor_on(view: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor of these bytes; ``ValueError`` when this version of torch has no such elements."""
    if dtype not in DTYPES:
        raise ValueError(f"this version of torch has no {dtype}: install a newer one")
    if not view.nbytes:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(view, dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)
