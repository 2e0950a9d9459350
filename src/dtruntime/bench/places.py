"""A place for checkpoints that is new, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..storage import LocalBackend, open_backend
from ..storage.data_files import is_remote
from .object_place import ObjectPlace
from .raw_storage import LocalPlace


class RawPlace(Protocol):
    """A place for checkpoints, and how fast it is without Strata."""

    url: str

    @property
    def raw_write(self) -> str:
        """How `write` writes."""

    @property
    def raw_read(self) -> str:
        """How `read` reads."""

    def write(self, memory: memoryview) -> None:
        """Write one file, durably."""

    def read(self, size: int) -> NDArray[np.uint8]:
        """Read it."""

    def delete(self) -> None:
        """Delete it."""

    def forget(self) -> None:
        """Let the next read come from the disk."""

    def remove(self) -> None:
        """Remove everything that was written."""


@contextmanager
def new_place(named: str, needed: int) -> Iterator[RawPlace]:
    """Make a place under a folder or URL for ``needed`` bytes, and remove it at the end.

    ``ConfigError`` when nothing can be stored there, ``StorageError`` when it does not answer.
    """
    place = _open(named, needed)
    try:
        yield place
    finally:
        place.remove()


def _open(named: str, needed: int) -> RawPlace:
    if named.lower().startswith("memory:"):
        raise ConfigError(f"{named} is memory of this process: name a folder or a bucket")
    backend = open_backend(named)
    if isinstance(backend, LocalBackend) and not is_remote(named):
        return LocalPlace(Path(backend.root), needed)
    return ObjectPlace(named)
