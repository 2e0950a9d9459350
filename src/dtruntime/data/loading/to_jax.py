"""Batches as JAX arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def convert(array: Any) -> Any:
    """An array on the default device."""
    return jnp.asarray(array)
