"""Commits of checkpoints, by a single writer or all ranks together, and reports about them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

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
from .handle import SaveRequest

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
        """Report the condition of checkpoints; returns how many of them are known."""


FindCoordinator = Callable[[], CheckpointCoordinator | None]
"""Returns the coordinator that commits are reported to; it may change while a manager lives."""


@dataclass(frozen=True, slots=True)
class CommittedParts:
    """The parts of a checkpoint that is being committed, and their sums."""

    parts: tuple[Part | PartFile, ...]
    size: int
    written: int
    """How many bytes had to be stored."""
    is_full: bool
    """Whether all chunks were stored with these parts."""


class Committer:
    """Commits the checkpoints of a single writer, and reports them to the coordinator if any."""

    retention: Retention | None = None
    """Sent with each commit, so that the coordinator shows what will be deleted."""

    def __init__(self, store: CheckpointStore, find: FindCoordinator) -> None:
        self._store = store
        self.find = find

    @property
    def rank(self) -> int:
        """The rank whose parts are read by default."""
        return 0

    @property
    def leads(self) -> bool:
        """Whether this process does what one rank does for all."""
        return True

    def check(self, request: SaveRequest) -> None:
        """Raise ``ValueError`` when a save cannot be committed from here."""

    def rank_of(self, request: SaveRequest) -> int:
        """The rank whose part a save is."""
        return 0

    def publish(
        self, checkpoint_id: str, request: SaveRequest, committed: CommittedParts
    ) -> Manifest:
        """Write the manifest, which is the commit, then report it to the coordinator.

        A writer that was replaced takes the checkpoint back.
        """
        manifest = self._write(checkpoint_id, request, committed)
        coordinator = request.coordinator or self.find()
        if coordinator is None:
            return manifest
        seconds = time.perf_counter() - request.began
        try:
            coordinator.commit_checkpoint(
                checkpoint_id,
                manifest.step,
                epoch=manifest.epoch,
                path=self._store.backend.location(manifest.name),
                size_bytes=manifest.size_bytes,
                is_full=manifest.is_full,
                partial=False,
                timeout_ms=COMMIT_MS,
                **self._notes(request),
                **{WRITTEN_KEY: str(committed.written), SECONDS_KEY: f"{seconds:.6f}"},
            )
        except SyncError:
            self._store.catalog.drop([CatalogEntry.of(manifest)])
            raise
        except StrataError as exc:
            # It is stored and will be found, even if the coordinator does not show it.
            log.warning("checkpoint.not_announced", step=manifest.step, reason=str(exc))
        return manifest

    def _write(
        self, checkpoint_id: str, request: SaveRequest, committed: CommittedParts
    ) -> Manifest:
        return self._store.catalog.commit(
            lambda sequence: Manifest(
                checkpoint_id=checkpoint_id,
                sequence=sequence,
                step=request.step,
                epoch=request.epoch,
                is_full=committed.is_full,
                created_at=time.time(),
                size_bytes=committed.size,
                written_bytes=committed.written,
                parts=committed.parts,
                metrics=request.metrics,
                metadata=request.metadata,
            )
        )

    def _notes(self, request: SaveRequest) -> dict[str, str]:
        """Metadata for the coordinator: how long it is kept, and whether it is the last."""
        notes = {key: request.metadata[key] for key in (FINISHED_KEY,) if key in request.metadata}
        if self.retention is None:
            return notes
        return notes | {RETENTION_KEY: self.retention.to_json(), PLACE_KEY: self._store.url[:1024]}

    def heal(self) -> bool:
        """Write manifests that ranks have left unwritten because they died.

        Returns whether all committed checkpoints have a manifest then, as far as is known.
        """
        return True  # a single writer commits by the manifest itself

    def new_id(self, step: int) -> str:
        """The id of a new checkpoint; empty if only `begin` can tell."""
        return new_id(step)

    def begin(self, request: SaveRequest) -> str:
        """The id of a new checkpoint, agreed upon with all ranks."""
        return new_id(request.step)

    def commit(
        self, checkpoint_id: str, request: SaveRequest, part: Part, written: int
    ) -> Manifest | None:
        """Commit a part that is stored; returns the manifest if it was written here."""
        full = is_stored_in_full(part, written)
        committed = CommittedParts((part,), part.length, written, full)
        return self.publish(checkpoint_id, request, committed)


class SharedCommitter(Committer):
    """Commits checkpoints of which every rank writes a part, through the coordinator.

    Each rank writes its part's file and then reports it. When the coordinator has all reports the
    checkpoint is committed for good, and the lowest rank writes the manifest. Should that rank die
    first, any other writes it later, since all parts are there.
    """

    def __init__(self, store: CheckpointStore, find: FindCoordinator) -> None:
        super().__init__(store, find)
        self._left: tuple[str, SaveRequest, int] | None = None
        """The last checkpoint whose manifest was left to another rank, with its number of parts."""

    @property
    def rank(self) -> int:
        """The rank of the registered worker; ``ValueError`` when there is none."""
        return _required(self.find()).rank

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return self.find() is not None and self.rank == 0

    def check(self, request: SaveRequest) -> None:
        """Raise ``ValueError`` when no worker is registered."""
        _required(request.coordinator)

    def rank_of(self, request: SaveRequest) -> int:
        """The rank of the worker that was registered at the time of the call."""
        return _required(request.coordinator).rank

    def new_id(self, step: int) -> str:
        """Nothing: the coordinator gives all ranks the same id."""
        return ""

    def begin(self, request: SaveRequest) -> str:
        """The id that all ranks of this checkpoint use."""
        return _required(request.coordinator).begin_checkpoint(request.step)

    def commit(
        self, checkpoint_id: str, request: SaveRequest, part: Part, written: int
    ) -> Manifest | None:
        """Store the part's file, wait for all ranks, and write the manifest on the lowest."""
        name = part_name(checkpoint_id, self._store.session.tag(f"{part.rank:05d}"))
        coordinator = _required(request.coordinator)
        backend = self._store.backend
        described = msgspec.structs.replace(
            part, written_bytes=written, metrics=request.metrics, metadata=request.metadata
        )
        backend.write(name, seal(described))
        try:
            coordinator.commit_checkpoint(
                checkpoint_id,
                request.step,
                epoch=request.epoch,
                path=backend.location(name),
                size_bytes=part.length,
                is_full=is_stored_in_full(part, written),
                partial=True,
                timeout_ms=COMMIT_MS,
                **self._notes(request),
            )
        except CheckpointAbortedError as exc:
            if exc.may_be_committed:
                self._store.catalog.abandon([name])
            else:
                backend.delete(name)
            raise
        except BaseException:
            # It may have been committed, or still be: then the part is needed.
            self._store.catalog.abandon([name])
            raise
        ranks = self._ranks_here(checkpoint_id, coordinator)
        if part.rank != ranks[0]:
            self._left = checkpoint_id, request, len(ranks)
            return None
        left, self._left = self._left, None
        if left is not None:
            self._heal(*left)
        return self.write_manifest(checkpoint_id, request, len(ranks))

    def _ranks_here(self, checkpoint_id: str, coordinator: CheckpointCoordinator) -> list[int]:
        """The ranks whose parts are in the store, checked against the coordinator's count."""
        ranks = [rank for rank, _ in self._listed(checkpoint_id)]
        try:
            latest = coordinator.latest_checkpoint()
        except StrataError as exc:
            # It is committed anyway; a missing part is noticed when it is read.
            log.warning("checkpoint.parts_not_counted", id=checkpoint_id, reason=str(exc))
            return ranks
        if latest is not None and latest.checkpoint_id == checkpoint_id:
            self._check_count(checkpoint_id, ranks, latest.parts)
        return ranks

    def heal(self) -> bool:
        """Write the manifest of the coordinator's last checkpoint if it has none here.

        Its lowest rank died between the commit and the manifest. Several ranks may do this.
        """
        coordinator = self.find()
        latest = None if coordinator is None else coordinator.latest_checkpoint()
        if latest is not None and self._listed(latest.checkpoint_id):
            request = SaveRequest(
                latest.step, latest.epoch, latest.is_full, coordinator=coordinator
            )
            self._heal(latest.checkpoint_id, request, latest.parts)
        return latest is not None  # without files here it was saved elsewhere, or deleted

    def write_manifest(self, checkpoint_id: str, request: SaveRequest, parts: int) -> Manifest:
        """Write the manifest of a checkpoint that the coordinator has committed.

        If files of it were removed, it is reported to the coordinator as damaged.
        """
        try:
            return self._write_manifest(checkpoint_id, request, parts)
        except FilesRemovedError as exc:
            _report_lost(checkpoint_id, request.coordinator, exc)
            raise

    def _write_manifest(self, checkpoint_id: str, request: SaveRequest, parts: int) -> Manifest:
        backend = self._store.backend
        files, opened = [], []
        for _, file in self._listed(checkpoint_id):
            data = backend.read(file.name)
            part = open_part(data, backend.location(file.name))
            opened.append(part)
            packs, kind = part.pack_files, "" if part.kind in _USUAL else part.kind
            digest = digest_of(data)
            files.append(PartFile(part.rank, file.name, digest, packs, part.length, kind))
        self._check_whole(checkpoint_id, opened, parts)
        first = opened[0]
        request = SaveRequest(
            request.step, request.epoch, request.is_full, first.metrics, first.metadata
        )
        committed = CommittedParts(
            tuple(files),
            sum(part.length for part in opened),
            sum(part.written_bytes for part in opened),
            all(is_stored_in_full(part, part.written_bytes) for part in opened),
        )
        return self._write(checkpoint_id, request, committed)

    def _heal(self, checkpoint_id: str, request: SaveRequest, parts: int) -> None:
        """Write a manifest that another rank should have written, if it did not."""
        if self._store.catalog.with_id(checkpoint_id) is not None:
            return
        abandoned = self._is_abandoned(checkpoint_id)
        try:
            self.write_manifest(checkpoint_id, request, parts)
        except StorageError as exc:
            log.error("checkpoint.not_healed", checkpoint=checkpoint_id, reason=str(exc))
            return
        if abandoned:
            log.warning("checkpoint.healed", checkpoint=checkpoint_id, step=request.step)
        else:
            log.debug("checkpoint.manifest_written", checkpoint=checkpoint_id, step=request.step)

    def _is_abandoned(self, checkpoint_id: str) -> bool:
        """Whether the rank that should write the manifest is dead, rather than about to write it.

        Where there are no locks, it counts as dead after a while.
        """
        parts = self._listed(checkpoint_id)
        if not parts:
            return False
        first = parts[0][1]
        if self._store.backend.kind == "local":
            return self._store.session.is_dead(first, first.modified)
        return time.time() - first.modified > MANIFEST_SECONDS

    def _listed(self, checkpoint_id: str) -> list[tuple[int, StoredFile]]:
        """The ranks and part files of a checkpoint, by rank."""
        listed = []
        for file in self._store.backend.list(f"{PARTS}/{checkpoint_id}"):
            name = _PART.fullmatch(file.name.rpartition("/")[2])
            if name is not None:
                listed.append((int(name[1]), file))
        return sorted(listed, key=lambda part: part[0])

    def _check_count(self, checkpoint_id: str, ranks: list[int], expected: int) -> None:
        if len(ranks) != expected or len(set(ranks)) != expected:
            raise StorageError(
                f"checkpoint {checkpoint_id} was committed with {expected} parts, and in "
                f"{self._store.url} are {len(ranks)}, of ranks {sorted(set(ranks))}: all ranks "
                "have to save to the same place (a local_tier has to be a folder that they share)"
            )

    def _check_whole(self, checkpoint_id: str, parts: list[Part], expected: int) -> None:
        """Make sure that what the coordinator has committed is all here."""
        self._check_count(checkpoint_id, [part.rank for part in parts], expected)
        catalog = self._store.catalog
        gone = catalog.missing({file for part in parts for file in part.pack_files})
        if gone:
            raise files_removed(catalog.backend.location(gone[0]))


def _required(coordinator: CheckpointCoordinator | None) -> CheckpointCoordinator:
    if coordinator is None:
        raise ValueError(
            "sharded checkpoints need a registered worker: call TrainingOrchestrator().register() "
            "before the first save, or pass orchestrator="
        )
    return coordinator


def _report_lost(
    checkpoint_id: str, coordinator: CheckpointCoordinator | None, error: FilesRemovedError
) -> None:
    """Report that a checkpoint that all ranks believe committed is lost."""
    try:
        _required(coordinator).report_checkpoints(
            [checkpoint_id], CheckpointCondition.DAMAGED, detail=str(error)
        )
    except (StrataError, ValueError) as exc:
        log.warning("checkpoint.not_reported", id=checkpoint_id, reason=str(exc))


def new_id(step: int) -> str:
    """The id of a new checkpoint of a single writer."""
    return f"step-{step:012d}-{os.urandom(4).hex()}"


def part_name(checkpoint_id: str, tag: str) -> str:
    """Where a rank's part of a shared checkpoint is stored; ``tag`` has the rank and writer."""
    return f"{PARTS}/{checkpoint_id}/{tag}part.json"


class ConditionReporter:
    """Reports to the coordinator which checkpoints are good, damaged or deleted.

    Nothing fails when the coordinator cannot be reached.
    """

    def __init__(self, find: FindCoordinator) -> None:
        self._find = find
        self._damaged: set[str] = set()
        """The manifests of checkpoints that were reported as damaged."""
        self._removed: dict[str, None] = {}
        """Ids of deleted checkpoints that are still to be reported."""

    def good(self, manifest: Manifest) -> None:
        """Report that all of a checkpoint was read."""
        self._damaged.discard(manifest.name)
        self._report([manifest.checkpoint_id], CheckpointCondition.GOOD)

    def damaged(
        self, store: CheckpointStore, entry: CatalogEntry, error: CheckpointDamagedError
    ) -> None:
        """Report that a checkpoint is listed and cannot be read."""
        if self._find() is None or entry.name in self._damaged:
            return
        ids: list[str] = []
        path = ""
        try:
            if entry not in store.catalog.entries():
                return  # deleted since it was listed
            ids = [store.catalog.manifest(entry).checkpoint_id]
        except StrataError:
            path = store.backend.location(entry.name)
        if self._report(ids, CheckpointCondition.DAMAGED, path=path, detail=str(error)):
            self._damaged.add(entry.name)

    def removed(self, checkpoint_ids: Iterable[str]) -> None:
        """Report deleted checkpoints; those that cannot be are reported the next time."""
        if self._find() is None:
            return
        self._removed.update(dict.fromkeys(checkpoint_ids))
        batch = list(self._removed)[:REPORTED_AT_ONCE]
        if batch and self._report(batch, CheckpointCondition.REMOVED, detail="by retention"):
            for key in batch:
                del self._removed[key]

    def _report(
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
