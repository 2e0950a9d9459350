"""The catalog of a store: which checkpoints are committed, and which files none of them needs."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Self

import msgspec

from ...errors import CheckpointDamagedError, StorageError, StorageNotFoundError
from ...retention import Retention, RetentionCandidate
from ...storage.backend import StorageBackend, StoredFile
from ...telemetry import EventLog
from ..file_format.chunks import ChunkIndex
from ..file_format.manifest import (
    MANIFESTS,
    PACKS,
    PARTS,
    POINTER,
    Manifest,
    Part,
    PartFile,
    digest_of,
    open_manifest,
    open_part,
    parse_manifest_name,
    seal,
)
from .writer_lock import COMMIT_WAIT_SECONDS, await_sweeps, sweeping

log = EventLog("checkpoint")

ASKED_ONE_BY_ONE = 8
"""Up to so many files are looked up one by one; for more, the store is listed."""


@dataclass(frozen=True, order=True, slots=True)
class CatalogEntry:
    """A committed checkpoint, by the name of its manifest."""

    sequence: int
    step: int
    name: str

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """The entry of a manifest."""
        return cls(manifest.sequence, manifest.step, manifest.name)


class Catalog:
    """The committed checkpoints of one store, in the order of their commits."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.floor = 0
        """Sequences begin above it, so that commits here follow those of the main storage."""
        self._damaged: set[str] = set()
        """Manifests of checkpoints that could not be read."""
        self._damaged_files: set[str] = set()
        """Locations of files that are damaged."""
        self._passed_over = range(0)
        """Sequences of newer checkpoints that were passed over when an older one was loaded."""
        self._manifests: dict[str, Manifest] = {}
        self._chunks = "", ChunkIndex()
        """The chunks of a checkpoint, by the name of its manifest."""
        self._needed_once: set[str] = set()
        """Files that some manifest needed."""
        self._unneeded: set[str] = set()
        """Those of them that no manifest needed at the last sweep."""

    def entries(self) -> list[CatalogEntry]:
        """List them; a failing store raises, and never counts as an empty one."""
        found = []
        for file in self.backend.list(MANIFESTS):
            place = parse_manifest_name(file.name)
            if place is not None:
                found.append(CatalogEntry(*place, file.name))
        there = {entry.name for entry in found}
        for name in list(self._manifests):
            if name not in there:
                self._manifests.pop(name, None)
        return sorted(found)

    def find(self, step: int | None = None) -> CatalogEntry | None:
        """The newest one, or the newest of a step."""
        entries = [e for e in self.entries() if step is None or e.step == step]
        return entries[-1] if entries else None

    def manifest(self, entry: CatalogEntry) -> Manifest:
        """Read a manifest; ``CheckpointDamagedError`` when it is damaged.

        It also is if it belongs to another checkpoint: copied, renamed or swapped.
        """
        known = self._manifests.get(entry.name)
        if known is None:
            where = self.backend.location(entry.name)
            known = open_manifest(self._read(entry.name), where)
            if (known.sequence, known.step) != (entry.sequence, entry.step):
                detail = f"it is the manifest of another checkpoint, {known.name}"
                raise CheckpointDamagedError(
                    f"{where} is damaged: {detail}", file=where, detail=detail
                )
            self._manifests[entry.name] = known
        return known

    def readable(self) -> list[tuple[CatalogEntry, Manifest]]:
        """All checkpoints whose manifests can be read; the others are named in the log."""
        found = []
        for entry in self.entries():
            try:
                found.append((entry, self.manifest(entry)))
            except CheckpointDamagedError as exc:
                self.note_damage(entry, exc)
        return found

    # Damage

    def note_damage(self, entry: CatalogEntry, error: CheckpointDamagedError) -> None:
        """Remember that a checkpoint cannot be read, and log it the first time.

        Nothing is saved by reference to it or to the damaged file from then on, and retention does
        not count it.
        """
        if entry.name not in self._damaged:
            log.error("checkpoint.damaged", step=entry.step, reason=str(error))
        self._damaged.add(entry.name)
        if error.file:
            self._damaged_files.add(error.file)

    def is_damaged(self, file: str) -> bool:
        """Whether a file is known to be damaged."""
        return self.backend.location(file) in self._damaged_files

    def note_load(self, manifest: Manifest, newest: int) -> None:
        """Remember that a checkpoint was loaded while ``newest`` was the newest sequence.

        If an older one was loaded there was a reason, perhaps on another rank: later saves do not
        refer to those that were passed over.
        """
        self._passed_over = range(manifest.sequence + 1, newest + 1)

    def base(self) -> CatalogEntry | None:
        """The newest checkpoint that a save may refer to: one that is not known to be damaged."""
        for entry in reversed(self.entries()):
            if entry.name not in self._damaged and entry.sequence not in self._passed_over:
                return entry
        return None

    def parts(self, manifest: Manifest) -> list[Part]:
        """The parts of all ranks."""
        return [self.part(part) for part in manifest.parts]

    def part(self, part: Part | PartFile) -> Part:
        """A part, from its own file where it has one."""
        if isinstance(part, Part):
            return part
        data = self._read(part.file)
        where = self.backend.location(part.file)
        if digest_of(data) != part.digest:
            detail = "it is not the file that the checkpoint was committed with"
            raise CheckpointDamagedError(f"{where} is damaged: {detail}", file=where, detail=detail)
        return open_part(data, where)

    def stored_chunks(self, rank: int | None = None, damaged: Collection[str] = ()) -> ChunkIndex:
        """The chunks of the newest good checkpoint; none when it cannot be read.

        With a ``rank`` only those of its part. Packs at ``damaged`` locations do not count.
        """
        newest = self.base()
        if newest is None:
            return ChunkIndex()
        chunks = self._chunks[1] if self._chunks[0] == newest.name else None
        if chunks is None:
            try:
                parts = self.manifest(newest).parts
                chunks = ChunkIndex(self.part(part) for part in parts if rank in (None, part.rank))
            except CheckpointDamagedError as exc:
                self.note_damage(newest, exc)
                return self.stored_chunks(rank, damaged)
            except StorageError as exc:
                log.warning("checkpoint.saved_in_full", reason=str(exc))
                return ChunkIndex()
            if rank is None:
                self._chunks = newest.name, chunks
        there = {
            file.name: file.size
            for file in self.backend.list(PACKS)
            if self.backend.location(file.name) not in damaged
        }
        chunks.forget_missing(there)
        chunks.forget(self.is_damaged)
        return chunks

    def remember_chunks(self, manifest: Manifest | None, part: Part | None = None) -> None:
        """Cache the chunks of a checkpoint with a single part for the next `stored_chunks`."""
        self._chunks = "", ChunkIndex()
        if manifest is not None and part is not None and len(manifest.parts) == 1:
            self._chunks = manifest.name, ChunkIndex([part])

    def with_id(self, checkpoint_id: str) -> Manifest | None:
        """A recent checkpoint by its id."""
        return self._with_id(checkpoint_id, self.entries())

    def commit(self, make: Callable[[int], Manifest]) -> Manifest:
        """Commit a checkpoint by writing the manifest that ``make`` returns for a sequence.

        If there is one with the same checkpoint id, that is returned instead. The manifest is
        deleted again, with a ``StorageError``, when a file that it needs was removed meanwhile.
        """
        while True:
            entries = self.entries()
            newest = entries[-1].sequence if entries else 0
            manifest = make(max(newest, self.floor) + 1)
            same = self._with_id(manifest.checkpoint_id, entries)
            if same is not None:
                self._confirm(same)
                return same
            if self._create(manifest):
                self._manifests[manifest.name] = manifest
                self._confirm(manifest)
                self._point_to(manifest)
                return manifest

    def insert(self, manifest: Manifest) -> Manifest:
        """Write a manifest by its own sequence, among newer ones; ``StorageError`` if it is taken.

        One that exists is not written again. It is deleted again as in `commit`.
        """
        if not self._create(manifest) and not self._is_stored(manifest):
            where = self.backend.location(manifest.name)
            raise StorageError(f"{where} is another checkpoint with the same sequence and step")
        self._confirm(manifest)
        return manifest

    def missing(self, files: Collection[str]) -> list[str]:
        """Which of some packs and parts are missing."""
        if len(files) <= ASKED_ONE_BY_ONE:
            return sorted(name for name in files if not self._is_there(name))
        there = {file.name for folder in (PACKS, PARTS) for file in self.backend.list(folder)}
        return sorted(set(files) - there)

    def drop(self, entries: Iterable[CatalogEntry]) -> list[CatalogEntry]:
        """Delete manifests; returns those that were. A failure does not stop the rest."""
        wanted = list(entries)
        self._note_needed(wanted)
        failed = dict(self.backend.delete_many([entry.name for entry in wanted]))
        for name, why in failed.items():
            log.warning("checkpoint.not_deleted", file=self.backend.location(name), reason=str(why))
        for entry in wanted:
            self._manifests.pop(entry.name, None)
        return [entry for entry in wanted if entry.name not in failed]

    def retain(
        self, retention: Retention, spares: Callable[[CatalogEntry], bool] = lambda entry: False
    ) -> list[CatalogEntry]:
        """Delete what retention does not keep, except for what ``spares`` says has to stay.

        A checkpoint that cannot be loaded, because files of it are gone, does not count: it never
        causes the deletion of another.
        """
        entries = self.entries()
        doomed = self._not_kept(entries, retention)
        if not doomed:
            return []
        whole = self._whole(entries)
        stay = set(whole) - set(self._not_kept(whole, retention))
        return self.drop(entry for entry in doomed if entry not in stay and not spares(entry))

    def abandon(self, files: Collection[str]) -> None:
        """Let the next sweep delete files of a failed save, unless it was committed after all.

        A store that did not answer may have carried out a request, or still do so.
        """
        self._needed_once |= set(files)
        self._unneeded |= set(files)

    def sweep(
        self, is_dead: Callable[[StoredFile, float], bool], pinned: Collection[str] = ()
    ) -> list[str]:
        """Delete packs and parts that no manifest needs; returns what was deleted.

        A file that was never committed stays while its writer may commit it: ``is_dead`` says
        whether the writer of a file is gone, at a time of the store's clock. A file that a manifest
        needed stays until the next sweep, because a save that is under way may refer to it. When a
        manifest cannot be read nothing is deleted, since what it needs is not known.
        """
        with sweeping(self.backend) as is_alone:
            return self._sweep(is_dead, pinned) if is_alone else []

    def _sweep(
        self, is_dead: Callable[[StoredFile, float], bool], pinned: Collection[str]
    ) -> list[str]:
        began = time.monotonic()
        files = [file for folder in (PACKS, PARTS) for file in self.backend.list(folder)]
        needed = self._needed(pinned)
        if time.monotonic() - began > COMMIT_WAIT_SECONDS / 2:
            # A commit may have given up waiting for this sweep.
            needed |= self._needed(pinned)
        self._needed_once |= needed
        unneeded = [file for file in files if file.name not in needed]
        # This machine's clock may be wrong; a store's own times agree with each other.
        now = max((file.modified for file in files), default=0.0)
        doomed = [file.name for file in unneeded if self._is_doomed(file, now, is_dead)]
        failed = dict(self.backend.delete_many(doomed))
        for name, why in failed.items():
            log.warning("checkpoint.not_deleted", file=self.backend.location(name), reason=str(why))
        left = {file.name for file in unneeded} - set(doomed) | set(failed)
        self._unneeded = left & self._needed_once
        self._needed_once &= needed | left
        return [name for name in doomed if name not in failed]

    def _needed(self, pinned: Collection[str]) -> set[str]:
        """The files of all checkpoints."""
        needed = set(pinned)
        for entry in self.entries():
            needed |= self.manifest(entry).files
        return needed

    def _is_doomed(
        self, file: StoredFile, now: float, is_dead: Callable[[StoredFile, float], bool]
    ) -> bool:
        if file.name in self._needed_once:
            return file.name in self._unneeded
        return is_dead(file, now)

    def _confirm(self, manifest: Manifest) -> None:
        """Check that the files of a checkpoint exist, now that its manifest is visible.

        Sweeps from here on spare them. One that had read the manifests before this one existed may
        have deleted some, and is waited for.
        """
        await_sweeps(self.backend)
        gone = self.missing(manifest.files)
        if gone:
            taken_back = self.drop([CatalogEntry.of(manifest)])
            raise files_removed(
                self.backend.location(gone[0]),
                "" if taken_back else self.backend.location(manifest.name),
            )

    def _not_kept(self, entries: list[CatalogEntry], retention: Retention) -> list[CatalogEntry]:
        kept = [
            RetentionCandidate(e.sequence, e.step, self._metrics(e, retention)) for e in entries
        ]
        dropped = {one.place for one in retention.dropped(kept)}
        return [entry for entry in entries if (entry.sequence, entry.step) in dropped]

    def _whole(self, entries: list[CatalogEntry]) -> list[CatalogEntry]:
        """Those that can be read, whose files exist, and that are not known to be damaged."""
        needed: dict[CatalogEntry, set[str]] = {}
        for entry in entries:
            try:
                needed[entry] = self.manifest(entry).files
            except CheckpointDamagedError as exc:
                self.note_damage(entry, exc)
            except StorageError as exc:
                log.warning("checkpoint.damaged", step=entry.step, reason=str(exc))
        gone = set(self.missing(set().union(*needed.values())))
        for entry, files in needed.items():
            if files & gone:
                where = self.backend.location(min(files & gone))
                self.note_damage(entry, CheckpointDamagedError(f"{where} is gone", file=where))
        return [
            entry
            for entry, files in needed.items()
            if entry.name not in self._damaged and not any(map(self.is_damaged, files))
        ]

    def _note_needed(self, entries: Iterable[CatalogEntry]) -> None:
        """Remember what checkpoints need before they are deleted."""
        for entry in entries:
            try:
                self._needed_once |= self.manifest(entry).files
            except CheckpointDamagedError as exc:
                self.note_damage(entry, exc)
            except StorageError as exc:
                log.warning("checkpoint.damaged", step=entry.step, reason=str(exc))

    def _is_there(self, name: str) -> bool:
        try:
            return self.backend.exists(name)
        except StorageError as exc:
            if is_damage(exc):
                return False
            raise

    def _read(self, name: str) -> bytes:
        try:
            return self.backend.read(name)
        except StorageError as exc:
            if not is_damage(exc):
                raise
            where = self.backend.location(name)
            detail = "it is gone" if isinstance(exc, StorageNotFoundError) else str(exc)
            raise CheckpointDamagedError(f"{where}: {detail}", file=where, detail=detail) from exc

    def _create(self, manifest: Manifest) -> bool:
        """Write a manifest unless its name is taken; False when it is."""
        try:
            return self.backend.create(manifest.name, seal(manifest))
        except StorageError:
            if not self._is_stored(manifest):
                raise
            return True

    def _is_stored(self, manifest: Manifest) -> bool:
        """Whether a manifest was written, although the store did not say so."""
        try:
            stored = open_manifest(self.backend.read(manifest.name), manifest.name)
        except StorageError:
            return False
        return stored.checkpoint_id == manifest.checkpoint_id

    def _with_id(self, checkpoint_id: str, entries: list[CatalogEntry]) -> Manifest | None:
        """A recent checkpoint by its id; damaged ones are skipped."""
        for entry in reversed(entries[-8:]):
            try:
                manifest = self.manifest(entry)
            except CheckpointDamagedError as exc:
                self.note_damage(entry, exc)
                continue
            if manifest.checkpoint_id == checkpoint_id:
                return manifest
        return None

    def _metrics(self, entry: CatalogEntry, retention: Retention) -> dict[str, float]:
        try:
            return self.manifest(entry).metrics if retention.keep_best else {}
        except CheckpointDamagedError:
            return {}

    def point_to_newest(self) -> None:
        """Update the pointer to the newest checkpoint that can be read, after some were deleted."""
        readable = self.readable()
        if readable:
            self._point_to(readable[-1][1])
        else:
            self.backend.delete(POINTER)

    def _point_to(self, manifest: Manifest) -> None:
        """Write the pointer by which readers find the newest checkpoint without listing."""
        pointer = {
            "manifest": manifest.name,
            "step": manifest.step,
            "checkpoint_id": manifest.checkpoint_id,
        }
        try:
            self.backend.write(POINTER, msgspec.json.encode(pointer))
        except StorageError as exc:
            log.warning("checkpoint.pointer_not_written", reason=str(exc))


def is_damage(error: StorageError) -> bool:
    """Whether a file could not be read because it is gone, a link or folder, or on a bad disk."""
    damages = (errno.EIO, errno.ELOOP, errno.EISDIR)
    return isinstance(error, StorageNotFoundError) or error.errno in damages


class FilesRemovedError(StorageError):
    """A file that a save needs was removed by another manager, and the save has failed."""


def files_removed(where: str, not_deleted: str = "") -> FilesRemovedError:
    """The error about a file; ``not_deleted`` is the manifest that could not be deleted again."""
    outcome = (
        f"and {not_deleted}, which refers to it, could not be deleted: delete it"
        if not_deleted
        else "and the checkpoint is not committed"
    )
    return FilesRemovedError(
        f"{where} was removed while a checkpoint that refers to it was being saved, {outcome}. The "
        "next save stores it again; let one manager at a time save to a place"
    )
