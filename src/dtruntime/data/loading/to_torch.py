"""Batches as torch tensors."""

from __future__ import annotations

from typing import Any

import torch


def convert(array: Any) -> Any:
    """A tensor that shares the array's memory."""
    return torch.from_numpy(array)


def nested(values: Any, ends: Any) -> Any:
    """A nested tensor of rows that lie one after the other."""
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(ends))


def none_of(rows: Any) -> Any:
    """A nested tensor like ``rows`` without rows."""
    return torch.nested.nested_tensor_from_jagged(rows.values()[:0], rows.offsets()[:1])
