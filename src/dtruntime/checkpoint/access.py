"""What the other ways to save and load need of a `CheckpointManager`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar, cast

from ..errors import CheckpointDamagedError
from ..types import check_whole
from .file_format.chunks import Compressor
from .file_format.manifest import Manifest, Part, PartFile
from .load.checkpoint_loader import CheckpointCopy, CheckpointLoader
from .manager import CheckpointManager
from .save.commit import FindCoordinator, SaveRequest, SharedCommitter, announce
from .save.handle import SaveHandle
from .save.staging import StagingPool
from .state_dict import Buffer
from .store.checkpoint_store import CheckpointStore

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Access:
    """What a manager saves to, and how."""

    place: CheckpointStore
    """Where saves go; with two tiers, the local one."""
    has_tiers: bool
    loads: CheckpointLoader
    pool: StagingPool
    compressor: Compressor
    find: FindCoordinator
    """Looks for the coordinator."""
    shared: bool
    """Whether every rank saves its part of each checkpoint."""
    incremental: bool
    settle: Callable[[], None]
    """Waits for the saves of this manager that are under way."""
    wanted: Callable[..., SaveRequest]
    """What a save is asked for, as the arguments of `CheckpointManager.save` say it."""
    take: Callable[[str, Callable[[], tuple[Any, list[Buffer]]], SaveRequest], SaveHandle]
    """Saves a part of some kind in the background; a function tells its skeleton and memory."""
    submit: Callable[[Callable[[], None]], None]
    """Takes a job for the thread that saves."""
    before_save: Callable[[], None]
    """Learns what a commit has to follow."""
    committed: Callable[[Manifest], None]
    """Sees to a checkpoint that was committed here."""
    clean: Callable[[], None]
    """Drops what retention does not keep, and what nobody needs; a failure is logged."""

    def load(
        self,
        step: int | None,
        is_one: Callable[[Manifest], bool],
        read: Callable[[CheckpointCopy], R],
    ) -> R:
        """What ``read`` makes of a checkpoint: that of a step, or the newest good one of a kind.

        ``is_one`` says whether a checkpoint is of that kind.
        """
        self.settle()

        def noted(copy: CheckpointCopy) -> R:
            found = read(copy)
            self.loads.note(copy)
            return found

        if step is not None:
            return self.loads.of_step(check_whole("step", step), noted)
        return self.loads.newest_good(noted, own_part=False, is_one=is_one)

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
        coordinator = self.find()
        if coordinator is not None:
            announce(self.place, manifest, coordinator)


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
        manager._uploads is not None,
        manager._loads,
        pipeline.pool,
        pipeline.compressor,
        manager._commits.find,
        isinstance(manager._commits, SharedCommitter),
        manager._incremental,
        manager._settle,
        manager._wanted,
        pipeline.take_planned,
        pipeline.submit,
        pipeline.before_save,
        pipeline.committed,
        pipeline.upkeep.clean,
    )


def identity_of(manager: CheckpointManager) -> str:
    """What tells a manager's main storage from every other place."""
    return manager._main.identity()


def location_of(manager: CheckpointManager) -> str:
    """Where a manager's main storage is, for messages."""
    return manager._main.backend.location()


def has_kind(manager: CheckpointManager, step: int, kind: str) -> bool:
    """Whether the checkpoint of a step is of a kind."""
    return access(manager).loads.of_step(step, lambda copy: is_kind(copy.manifest, kind))


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
