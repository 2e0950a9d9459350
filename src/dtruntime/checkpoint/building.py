"""The writer as a building block, for checkpoints of several names in one place."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from ..storage import StorageBackend
from ..types import check_id
from .manager import CheckpointManager
from .save.handle import Saved


class CheckpointWriter:
    """Writes and reads checkpoints by name and step, and waits until they are committed."""

    def __init__(self, backend: StorageBackend | str | os.PathLike[str], **options: Any) -> None:
        """``backend`` is where they are; ``options`` are those of `CheckpointManager`."""
        self._url = backend.url if isinstance(backend, StorageBackend) else os.fspath(backend)
        self._options = {"keep_every": 1, **options}
        self._managers: dict[str, CheckpointManager] = {}

    def write_checkpoint(self, name: str, step: int, data: Any) -> Saved:
        """Store bytes or a state dict; returns when it is committed."""
        return self._manager(name).save(data, step).wait()

    def load_checkpoint(self, name: str, step: int | None = None) -> bytes:
        """The bytes of a step, or the newest."""
        return self._manager(name).load_bytes(step)

    def load_state(self, name: str, step: int | None = None) -> Any:
        """The state dict of a step, or the newest."""
        return self._manager(name).load_state(step)

    def close(self) -> None:
        """Release everything."""
        for manager in self._managers.values():
            manager.close()

    def _manager(self, name: str) -> CheckpointManager:
        if name not in self._managers:
            folder = check_id("checkpoint name", name)
            options = dict(self._options)
            if options.get("local_tier") is not None:
                options["local_tier"] = os.path.join(options["local_tier"], folder)
            place = f"{self._url.rstrip('/')}/{folder}"
            self._managers[name] = CheckpointManager(place, **options)
        return self._managers[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
