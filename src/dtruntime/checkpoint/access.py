"""What the other ways to save and load need of a `CheckpointManager`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar, cast

from ..errors import CheckpointDamagedError, CheckpointNotFoundError, StorageError
from ..telemetry import EventLog
from ..types import check_whole
from .codecs import Compressor
from .commits import Coordinator, SharedCommits, SingleCommits
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
    shared: bool
    """Whether every rank saves its part of each checkpoint."""
    incremental: bool
    settle: Callable[[], None]
    """Waits for the saves of this manager that are under way."""
    submit: Callable[[Callable[[], None]], None]
    """Takes a job for the thread that saves."""

    def load(
        self, step: int | None, is_one: Callable[[Manifest], bool], read: Callable[[Manifest], R]
    ) -> R:
        """What ``read`` makes of a checkpoint: that of a step, or the newest good one of a kind.

        ``is_one`` says whether a checkpoint is of that kind.
        """
        self.settle()
        if step is not None:
            return self.loads.of_step(check_whole("step", step), read)
        first: CheckpointDamagedError | None = None
        for entry in reversed(self.place.catalog.entries()):
            try:
                manifest = self.place.catalog.manifest(entry)
                if not is_one(manifest):
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
        raise CheckpointNotFoundError(f"there is no such checkpoint in {self.place.url}")

    def own_part(self, manifest: Manifest) -> Part:
        """The part of this rank."""
        return self.loads._own_part(manifest)

    def in_turn(self, job: Callable[[], R]) -> R:
        """Do something behind the saves that are under way, as one more of them."""
        self.place.check_usable()
        # Through these, the thread that saves keeps nothing of the caller's alive afterwards.
        jobs, outcomes, ready = [job], list[tuple[R | None, BaseException | None]](), Event()

        def run() -> None:
            outcomes.append(_attempt(jobs.pop()))
            ready.set()

        self.submit(run)
        ready.wait()
        result, error = outcomes.pop()
        if error is not None:
            raise error
        return cast(R, result)

    def announce(self, manifest: Manifest) -> None:
        """Tell the coordinator of a checkpoint, if there is one."""
        if self.coordinator is not None:
            SingleCommits(self.place)._announce(manifest, self.coordinator)

    def clean(self) -> None:
        """Drop what retention does not keep, and what nobody needs; a failure is logged."""
        try:
            self.place.catalog.retain(self.retention)
            self.place.catalog.sweep(self.place.session.is_dead)
            self.place.session.forget_dead()
        except StorageError as exc:
            log.warning("checkpoint.not_cleaned", place=self.place.url, reason=str(exc))


def _attempt(job: Callable[[], R]) -> tuple[R | None, BaseException | None]:
    try:
        return job(), None
    except BaseException as exc:
        return None, exc


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
        isinstance(pipeline._commits, SharedCommits),
        manager._incremental,
        manager._settle,
        pipeline._saver.submit,
    )


def is_kind(manifest: Manifest, kind: str) -> bool:
    """Whether a checkpoint is of a kind."""
    return any((part.kind or "state") == kind for part in manifest.parts)


def part_of_rank(manifest: Manifest, rank: int) -> Part | PartFile:
    """The part of a rank; ``CheckpointDamagedError`` when there is none."""
    for part in manifest.parts:
        if part.rank == rank:
            return part
    raise CheckpointDamagedError(
        f"checkpoint {manifest.checkpoint_id} is damaged: it refers to a part of rank {rank}, and "
        "has none"
    )
