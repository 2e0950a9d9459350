"""What the other ways to save and load need of a `CheckpointManager`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import CheckpointDamagedError, CheckpointNotFoundError, StorageError
from ..telemetry import EventLog
from .codecs import Compressor
from .commits import Coordinator
from .format import Manifest, Part, PartFile
from .loads import Loads
from .manager import CheckpointManager
from .place import Place
from .retention import Retention
from .staging import StagingPool

log = EventLog("checkpoint")

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Access:
    """A manager's place, and how it saves there."""

    place: Place
    loads: Loads
    pool: StagingPool
    compressor: Compressor
    retention: Retention
    coordinator: Coordinator | None
    incremental: bool
    settle: Callable[[], None]
    """Waits for the saves of this manager that are under way."""

    def load(self, step: int | None, kind: str, read: Callable[[Manifest], R]) -> R:
        """What ``read`` makes of a checkpoint: that of a step, or the newest good one of a kind."""
        self.settle()
        if step is not None:
            return self.loads.of_step(step, read)
        first: CheckpointDamagedError | None = None
        for entry in reversed(self.place.catalog.entries()):
            try:
                manifest = self.place.catalog.manifest(entry)
                if not is_kind(manifest, kind):
                    continue
                found = read(manifest)
            except CheckpointDamagedError as exc:
                first = first or exc
                log.error("checkpoint.damaged", step=entry.step, reason=str(exc))
                continue
            if first is not None:
                log.error("checkpoint.fell_back", to_step=entry.step, place=self.place.url)
            return found
        if first is not None:
            raise first
        raise CheckpointNotFoundError(f"there is no {kind} checkpoint in {self.place.url}")

    def clean(self) -> None:
        """Drop what retention does not keep, and what nobody needs; a failure is logged."""
        try:
            self.place.catalog.retain(self.retention)
            self.place.catalog.sweep(self.place.session.is_dead)
            self.place.session.forget_dead()
        except StorageError as exc:
            log.warning("checkpoint.not_cleaned", place=self.place.url, reason=str(exc))


def manager_of(
    place: CheckpointManager | str | os.PathLike[str], options: dict[str, Any]
) -> tuple[CheckpointManager, bool]:
    """The manager that was given or is made for a path, and whether it was made."""
    if not isinstance(place, CheckpointManager):
        return CheckpointManager(place, **options), True
    if options:
        raise TypeError(f"give {', '.join(options)} to the CheckpointManager, not here")
    return place, False


def access(manager: CheckpointManager) -> Access:
    """Look into a manager."""
    pipeline = manager._pipeline
    return Access(
        manager._place,
        manager._loads,
        pipeline.pool,
        pipeline._compressor,
        pipeline._retention,
        getattr(pipeline._commits, "_coordinator", None),
        manager._incremental,
        manager._settle,
    )


def is_kind(manifest: Manifest, kind: str) -> bool:
    """Whether a checkpoint is of a kind."""
    return any(part.kind == kind for part in manifest.parts)


def is_full(part: Part) -> bool:
    """Whether all chunks of a part were stored with it."""
    return len(part.packs) <= 1 and not part.bases


def part_of_rank(manifest: Manifest, rank: int) -> Part | PartFile:
    """The part of a rank; ``CheckpointDamagedError`` when there is none."""
    for part in manifest.parts:
        if part.rank == rank:
            return part
    raise CheckpointDamagedError(
        f"checkpoint {manifest.checkpoint_id} is damaged: it refers to a part of rank {rank}, and "
        "has none"
    )
