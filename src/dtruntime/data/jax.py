"""Batches as JAX arrays, with the interface of Grain's iterators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from .loader import Loader


class JaxIterator:
    """Batches of a loader, epoch after epoch, as JAX arrays.

    With a ``sharding``, each process contributes its part of global arrays.
    """

    def __init__(
        self, loader: Loader, *, num_epochs: int | None = None, sharding: Any = None
    ) -> None:
        """``num_epochs``: stop before this epoch, counted from 0; ``None``: never stop."""
        self.loader = loader
        self._num_epochs = num_epochs
        self._sharding = sharding
        self._batches: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one."""
        return self.loader.epoch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while self._num_epochs is None or self.loader.epoch < self._num_epochs:
            if self._batches is None:
                self._batches = iter(self.loader)
            for batch in self._batches:
                return self._global(batch)
            self._batches = None
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch handed out."""
        return self.loader.state_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of any loader of the same dataset and order."""
        self.loader.load_state_dict(state)
        self._batches = None

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Stop prefetching."""
        self.loader.close()
        self._batches = None

    def _global(self, batch: Any) -> Any:
        if self._sharding is None:
            return batch
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(self._sharding, part), batch
        )


def convert(array: Any) -> Any:
    """An array on the default device."""
    return jnp.asarray(array)
