"""How a part becomes a committed checkpoint: alone, or together with all other ranks."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ...errors import (
    CheckpointAbortedError,
    CheckpointDamagedError,
    StorageError,
    StrataError,
    SyncError,
)
from ...retention import FINISHED_KEY, PLACE_KEY, RETENTION_KEY, SECONDS_KEY, WRITTEN_KEY, Retention
from ...storage.backend import StoredFile
from ...telemetry import EventLog
from ...types import REPORTED_AT_ONCE, CheckpointCondition, CheckpointInfo
from ..file_format.manifest import (
    PARTS,
    Manifest,
    Part,
    PartFile,
    digest_of,
    is_stored_in_full,
    open_part,
    seal,
)
from ..store.catalog import CatalogEntry, FilesRemovedError, files_removed
from ..store.checkpoint_store import CheckpointStore

log = EventLog("checkpoint")

COMMIT_MS = 1_800_000
"""How long the ranks wait for the slowest one's part."""
MANIFEST_SECONDS = 60.0
"""A manifest is written so soon after the part of the rank that writes it."""
_USUAL = ("state", "bytes")
"""Kinds of parts that a manifest does not name."""
_PART = re.compile(r"(\d{5,})-s[0-9a-f]{12}-part\.json")


class CheckpointCoordinator(Protocol):
    """What is asked of a registered worker's orchestrator."""

    @property
    def rank(self) -> int:
        """Its rank."""

    def begin_checkpoint(self, step: int) -> str:
        """Agree with all other ranks on the id of a checkpoint that they save together."""

    def commit_checkpoint(
        self,
        checkpoint_id: str,
        step: int,
        *,
        epoch: int,
        path: str,
        size_bytes: int,
        is_full: bool,
        partial: bool = False,
        timeout_ms: int = COMMIT_MS,
        **metadata: str,
    ) -> None:
        """Record a checkpoint, or a part of one: then it returns when all parts are there."""

    def latest_checkpoint(self) -> CheckpointInfo | None:
        """The checkpoint that was recorded last."""

    def report_checkpoints(
        self,
        checkpoint_ids: list[str],
        condition: CheckpointCondition,
        *,
        path: str = "",
        detail: str = "",
    ) -> int:
        """Say what became of checkpoints; returns how many of them are known."""


FindCoordinator = Callable[[], CheckpointCoordinator | None]
"""Looks for who is told of commits: who that is may change as long as a manager lives."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the caller says about a checkpoint."""

    step: int
    epoch: int
    is_full: bool
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    coordinator: CheckpointCoordinator | None = None
    """Through whom it is committed: the one there was when the save was asked for."""
    began: float = field(default_factory=time.perf_counter, compare=False)
    """When the save was called, by the clock that measures it."""


class Committer(ABC):
    """Commits parts."""

    retention: Retention | None = None
    """What is kept of the commits; the coordinator shows what will be dropped."""

    def __init__(self, place: CheckpointStore, find: FindCoordinator) -> None:
        self._place = place
        self.find = find

    @property
    def rank(self) -> int:
        """Whose parts are read, unless one is named."""
        return 0

    @property
    def leads(self) -> bool:
        """Whether this process sees to what concerns all ranks."""
        return True

    def check(self, wanted: SaveRequest) -> None:  # noqa: B027 - one writer needs nobody
        """Raise ``ValueError`` when a save cannot be committed from here."""

    def rank_of(self, wanted: SaveRequest) -> int:
        """Whose part a save is."""
        return 0

    def heal(self) -> bool:
        """Make visible what was committed by ranks that died before they could.

        Returns whether everything that was committed can be seen then, as far as anybody knows.
        """
        return True  # one writer leaves nothing behind

    def new_id(self, step: int) -> str:
        """The id of a new checkpoint, where it can be told at once; else nothing."""
        return ""

    @abstractmethod
    def begin(self, wanted: SaveRequest) -> str:
        """The id of a new checkpoint."""

    @abstractmethod
    def commit(
        self, checkpoint_id: str, wanted: SaveRequest, part: Part, written: int
    ) -> Manifest | None:
        """Commit a part that is stored; returns the manifest if it was written here."""


class SingleCommitter(Committer):
    """One writer, whose checkpoints have one part; a coordinator is told if there is one."""

    def new_id(self, step: int) -> str:
        """The id of a new checkpoint."""
        return f"step-{step:012d}-{os.urandom(4).hex()}"

    def begin(self, wanted: SaveRequest) -> str:
        """The id of a new checkpoint."""
        return self.new_id(wanted.step)

    def commit(
        self, checkpoint_id: str, wanted: SaveRequest, part: Part, written: int
    ) -> Manifest | None:
        """Write the manifest, then tell the coordinator."""
        manifest = self._place.catalog.commit(
            lambda sequence: _manifest(
                checkpoint_id,
                sequence,
                wanted,
                (part,),
                part.length,
                written,
                is_stored_in_full(part, written),
            )
        )
        coordinator = wanted.coordinator or self.find()
        if coordinator is not None:
            seconds = time.perf_counter() - wanted.began
            told = told_of(self._place, self.retention, wanted)
            told |= {WRITTEN_KEY: str(written), SECONDS_KEY: f"{seconds:.6f}"}
            announce(self._place, manifest, coordinator, told)
        return manifest


class SharedCommitter(Committer):
    """Every rank writes a part of each checkpoint, and the coordinator commits it.

    A part's file is written first, then the coordinator is told. When it has heard from all
    ranks the checkpoint is committed for good; the lowest rank then writes the manifest. Should
    it die before that, whoever looks next writes it, since all parts are there.
    """

    def __init__(self, place: CheckpointStore, find: FindCoordinator) -> None:
        super().__init__(place, find)
        self._left: tuple[str, SaveRequest, int] | None = None
        """The last checkpoint whose manifest was left to another rank, with its parts' number."""

    @property
    def rank(self) -> int:
        """That of the registered worker; ``ValueError`` when there is none."""
        return _found(self.find()).rank

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return self.find() is not None and self.rank == 0

    def check(self, wanted: SaveRequest) -> None:
        """Raise ``ValueError`` when no worker is registered."""
        _found(wanted.coordinator)

    def rank_of(self, wanted: SaveRequest) -> int:
        """That of the worker that was registered when the save was asked for."""
        return _found(wanted.coordinator).rank

    def begin(self, wanted: SaveRequest) -> str:
        """The id that all ranks of this checkpoint use."""
        return _found(wanted.coordinator).begin_checkpoint(wanted.step)

    def commit(
        self, checkpoint_id: str, wanted: SaveRequest, part: Part, written: int
    ) -> Manifest | None:
        """Store the part's file, wait for all others, and write the manifest if it falls to us."""
        name = part_name(checkpoint_id, self._place.session.tag(f"{part.rank:05d}"))
        coordinator = _found(wanted.coordinator)
        backend = self._place.backend
        described = msgspec.structs.replace(
            part, written_bytes=written, metrics=wanted.metrics, metadata=wanted.metadata
        )
        backend.write(name, seal(described))
        try:
            coordinator.commit_checkpoint(
                checkpoint_id,
                wanted.step,
                epoch=wanted.epoch,
                path=backend.location(name),
                size_bytes=part.length,
                is_full=is_stored_in_full(part, written),
                partial=True,
                timeout_ms=COMMIT_MS,
                **told_of(self._place, self.retention, wanted),
            )
        except CheckpointAbortedError as exc:
            if exc.may_be_committed:
                self._place.catalog.abandon([name])
            else:
                backend.delete(name)
            raise
        except BaseException:
            # It may be committed all the same, or be yet: then the part is needed.
            self._place.catalog.abandon([name])
            raise
        ranks = self._ranks_here(checkpoint_id, coordinator)
        if part.rank != ranks[0]:
            self._left = checkpoint_id, wanted, len(ranks)
            return None
        self._catch_up()
        return self.write_manifest(checkpoint_id, wanted, len(ranks))

    def _ranks_here(self, checkpoint_id: str, coordinator: CheckpointCoordinator) -> list[int]:
        """The ranks whose parts are in this place: all that the coordinator has heard from."""
        ranks = sorted(rank for rank, _ in self._listed(checkpoint_id))
        try:
            latest = coordinator.latest_checkpoint()
        except StrataError as exc:
            # It is committed all the same; a part that is missing is noticed when it is read.
            log.warning("checkpoint.parts_not_counted", id=checkpoint_id, reason=str(exc))
            return ranks
        if latest is not None and latest.checkpoint_id == checkpoint_id:
            self._check_count(checkpoint_id, ranks, latest.parts)
        return ranks

    def heal(self) -> bool:
        """Write the manifest of the coordinator's last checkpoint if it has none here.

        All its ranks died between the commit and the manifest. Any rank may do it, also several.
        """
        coordinator = self.find()
        latest = None if coordinator is None else coordinator.latest_checkpoint()
        if latest is not None and self._listed(latest.checkpoint_id):
            wanted = SaveRequest(latest.step, latest.epoch, latest.is_full, coordinator=coordinator)
            self._heal(latest.checkpoint_id, wanted, latest.parts)
        return latest is not None  # one without files was saved elsewhere, or has been removed

    def write_manifest(self, checkpoint_id: str, wanted: SaveRequest, parts: int) -> Manifest:
        """Write the manifest of a checkpoint that the coordinator has committed.

        When files of it have been removed, the coordinator is told that it is damaged.
        """
        try:
            return self._write_manifest(checkpoint_id, wanted, parts)
        except FilesRemovedError as exc:
            _tell_lost(checkpoint_id, wanted.coordinator, exc)
            raise

    def _write_manifest(self, checkpoint_id: str, wanted: SaveRequest, parts: int) -> Manifest:
        backend = self._place.backend
        files, opened = [], []
        for _, file in sorted(self._listed(checkpoint_id), key=lambda listed: listed[0]):
            data = backend.read(file.name)
            part = open_part(data, backend.location(file.name))
            opened.append(part)
            packs, kind = part.pack_files, "" if part.kind in _USUAL else part.kind
            digest = digest_of(data)
            files.append(PartFile(part.rank, file.name, digest, packs, part.length, kind))
        self._check_whole(checkpoint_id, opened, parts)
        first = opened[0]
        wanted = SaveRequest(
            wanted.step, wanted.epoch, wanted.is_full, first.metrics, first.metadata
        )
        return self._place.catalog.commit(
            lambda sequence: _manifest(
                checkpoint_id,
                sequence,
                wanted,
                tuple(files),
                sum(part.length for part in opened),
                sum(part.written_bytes for part in opened),
                all(is_stored_in_full(part, part.written_bytes) for part in opened),
            )
        )

    def _catch_up(self) -> None:
        """Write the manifest that another rank should have written, if it did not."""
        left, self._left = self._left, None
        if left is not None:
            self._heal(*left)

    def _heal(self, checkpoint_id: str, wanted: SaveRequest, parts: int) -> None:
        if self._place.catalog.with_id(checkpoint_id) is not None:
            return
        abandoned = self._is_abandoned(checkpoint_id)
        try:
            self.write_manifest(checkpoint_id, wanted, parts)
        except StorageError as exc:
            log.error("checkpoint.not_healed", checkpoint=checkpoint_id, reason=str(exc))
            return
        if abandoned:
            log.warning("checkpoint.healed", checkpoint=checkpoint_id, step=wanted.step)
        else:
            log.debug("checkpoint.manifest_written", checkpoint=checkpoint_id, step=wanted.step)

    def _is_abandoned(self, checkpoint_id: str) -> bool:
        """Whether the rank that writes the manifest is gone, and not just about to do so.

        Where locks do not tell, it is not expected any more after a while.
        """
        parts = sorted(self._listed(checkpoint_id), key=lambda listed: listed[0])
        if not parts:
            return False
        first = parts[0][1]
        if self._place.backend.kind == "local":
            return self._place.session.is_dead(first, first.modified)
        return time.time() - first.modified > MANIFEST_SECONDS

    def _listed(self, checkpoint_id: str) -> list[tuple[int, StoredFile]]:
        """The part files of a checkpoint, with their ranks."""
        found = []
        for file in self._place.backend.list(f"{PARTS}/{checkpoint_id}"):
            name = _PART.fullmatch(file.name.rpartition("/")[2])
            if name is not None:
                found.append((int(name[1]), file))
        return found

    def _check_count(self, checkpoint_id: str, ranks: list[int], wanted: int) -> None:
        if len(ranks) != wanted or len(set(ranks)) != wanted:
            raise StorageError(
                f"checkpoint {checkpoint_id} was committed with {wanted} parts, and in "
                f"{self._place.url} are {len(ranks)}, of ranks {sorted(set(ranks))}: all ranks "
                "have to save to the same place (a local_tier has to be a folder that they share)"
            )

    def _check_whole(self, checkpoint_id: str, parts: list[Part], wanted: int) -> None:
        """Make sure that what the coordinator has committed is all here."""
        self._check_count(checkpoint_id, [part.rank for part in parts], wanted)
        catalog = self._place.catalog
        gone = catalog.missing({file for part in parts for file in part.pack_files})
        if gone:
            raise files_removed(catalog.backend.location(gone[0]))


def _found(coordinator: CheckpointCoordinator | None) -> CheckpointCoordinator:
    if coordinator is None:
        raise ValueError(
            "sharded checkpoints need a registered worker: call TrainingOrchestrator().register() "
            "before the first save, or pass orchestrator="
        )
    return coordinator


def _tell_lost(
    checkpoint_id: str, coordinator: CheckpointCoordinator | None, error: FilesRemovedError
) -> None:
    """Let it be seen that a checkpoint of which all ranks have been told is none."""
    try:
        _found(coordinator).report_checkpoints(
            [checkpoint_id], CheckpointCondition.DAMAGED, detail=str(error)
        )
    except (StrataError, ValueError) as exc:
        log.warning("checkpoint.not_reported", id=checkpoint_id, reason=str(exc))


def told_of(
    place: CheckpointStore, retention: Retention | None, wanted: SaveRequest
) -> dict[str, str]:
    """What the coordinator is told of a commit: how long it is kept, and whether it is the last."""
    told = {key: wanted.metadata[key] for key in (FINISHED_KEY,) if key in wanted.metadata}
    if retention is None:
        return told
    return {**told, RETENTION_KEY: retention.told(), PLACE_KEY: place.url[:1024]}


def announce(
    place: CheckpointStore,
    manifest: Manifest,
    coordinator: CheckpointCoordinator,
    told: Mapping[str, str] | None = None,
) -> None:
    """Tell the coordinator of a checkpoint; a writer that was replaced takes it back."""
    try:
        coordinator.commit_checkpoint(
            manifest.checkpoint_id,
            manifest.step,
            epoch=manifest.epoch,
            path=place.backend.location(manifest.name),
            size_bytes=manifest.size_bytes,
            is_full=manifest.is_full,
            partial=False,
            timeout_ms=COMMIT_MS,
            **(told or {}),
        )
    except SyncError:
        place.catalog.drop([CatalogEntry.of(manifest)])
        raise
    except StrataError as exc:
        # It is stored and will be found; that the coordinator does not show it is no loss.
        log.warning("checkpoint.not_announced", step=manifest.step, reason=str(exc))


def part_name(checkpoint_id: str, tag: str) -> str:
    """Where a rank's part of a shared checkpoint is stored; ``tag`` has the rank and writer."""
    return f"{PARTS}/{checkpoint_id}/{tag}part.json"


def _manifest(
    checkpoint_id: str,
    sequence: int,
    wanted: SaveRequest,
    parts: tuple[Any, ...],
    size: int,
    written: int,
    is_full: bool,
) -> Manifest:
    return Manifest(
        checkpoint_id=checkpoint_id,
        sequence=sequence,
        step=wanted.step,
        epoch=wanted.epoch,
        is_full=is_full,
        created_at=time.time(),
        size_bytes=size,
        written_bytes=written,
        parts=parts,
        metrics=wanted.metrics,
        metadata=wanted.metadata,
    )


class ConditionReporter:
    """Says what was found. Who cannot be told misses it, and nothing fails because of that."""

    def __init__(self, find: FindCoordinator = lambda: None) -> None:
        """``find`` is asked for the coordinator each time."""
        self._find = find
        self._damaged: set[str] = set()
        """The manifests of those that were reported as damaged."""
        self._removed: dict[str, None] = {}
        """Those that are gone and not told."""

    def good(self, manifest: Manifest) -> None:
        """All of a checkpoint was read."""
        self._damaged.discard(manifest.name)
        self._tell([manifest.checkpoint_id], CheckpointCondition.GOOD)

    def damaged(
        self, place: CheckpointStore, entry: CatalogEntry, error: CheckpointDamagedError
    ) -> None:
        """A checkpoint that is there cannot be read."""
        if self._find() is None or entry.name in self._damaged:
            return
        ids: list[str] = []
        path = ""
        try:
            if entry not in place.catalog.entries():
                return  # it was dropped since it was listed
            ids = [place.catalog.manifest(entry).checkpoint_id]
        except StrataError:
            path = place.backend.location(entry.name)
        if self._tell(ids, CheckpointCondition.DAMAGED, path=path, detail=str(error)):
            self._damaged.add(entry.name)

    def removed(self, checkpoint_ids: Iterable[str]) -> None:
        """Checkpoints were deleted; what cannot be told now is told the next time."""
        if self._find() is None:
            return
        self._removed.update(dict.fromkeys(checkpoint_ids))
        untold = list(self._removed)[:REPORTED_AT_ONCE]
        if untold and self._tell(untold, CheckpointCondition.REMOVED, detail="by retention"):
            for key in untold:
                del self._removed[key]

    def _tell(
        self, ids: list[str], condition: CheckpointCondition, *, path: str = "", detail: str = ""
    ) -> bool:
        coordinator = self._find()
        if coordinator is None:
            return False
        try:
            coordinator.report_checkpoints(ids, condition, path=path, detail=detail)
        except (StrataError, ValueError) as exc:
            log.warning("checkpoint.not_reported", condition=condition, reason=str(exc))
            return False
        return True
