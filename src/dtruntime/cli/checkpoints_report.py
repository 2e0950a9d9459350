"""What ``strata checkpoints`` reads from a place, in the shape that ``--json`` prints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ..checkpoint.file_format.manifest import MANIFESTS, PACKS, PARTS, Manifest, Part
from ..checkpoint.load.verify import Verifier, looks_whole
from ..checkpoint.state_dict import describe
from ..checkpoint.store.catalog import Catalog, CatalogEntry
from ..checkpoint.store.writer_lock import WriterLock
from ..config import Config
from ..errors import CheckpointDamagedError, CheckpointNotFoundError, StorageError
from ..storage import open_backend, resolve_url
from ..storage.urls import with_region

SCHEMA = 1
_PACK_STEP = re.compile(rf"{PACKS}/(\d{{12,}})-")


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """One line of a listing."""

    step: int
    epoch: int = 0
    checkpoint_id: str = ""
    size_bytes: int = 0
    written_bytes: int = 0
    is_full: bool = True
    parts: int = 0
    created_at: float = 0.0
    newest: bool = False
    damaged: str = ""
    """Why its manifest cannot be read."""


class CheckpointList(msgspec.Struct, frozen=True):
    """What ``strata checkpoints ls --json`` prints."""

    place: str
    checkpoints: tuple[ListedCheckpoint, ...]
    stored_bytes: int
    """The size of all files of the place."""
    unneeded_bytes: int | None
    """How much of that no checkpoint needs; None when a manifest cannot be read."""
    schema: int = SCHEMA


class ShownArray(msgspec.Struct, frozen=True):
    """An array, or another piece of memory, of a part."""

    rank: int
    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int


class ShownPack(msgspec.Struct, frozen=True):
    """A file of chunks that a checkpoint needs."""

    file: str
    size: int
    used_bytes: int
    """How much of it this checkpoint needs."""
    step: int | None
    """That of the checkpoint it was written for."""
    needed_by: tuple[int, ...]
    """The steps of all checkpoints that need it."""


class ShownCheckpoint(msgspec.Struct, frozen=True):
    """What ``strata checkpoints show --json`` prints."""

    place: str
    checkpoint: ListedCheckpoint
    manifest: str
    metrics: dict[str, float]
    metadata: dict[str, str]
    arrays: tuple[ShownArray, ...]
    packs: tuple[ShownPack, ...]
    schema: int = SCHEMA


class FoundDamage(msgspec.Struct, frozen=True):
    """A file, or a chunk in it, that is not what was committed."""

    file: str
    detail: str
    chunk: str
    position: int
    length: int


class VerifiedCheckpoint(msgspec.Struct, frozen=True):
    """Whether a checkpoint is good."""

    step: int
    checkpoint_id: str
    good: bool
    chunks: int
    damages: tuple[FoundDamage, ...]


class Verification(msgspec.Struct, frozen=True):
    """What ``strata checkpoints verify --json`` prints."""

    place: str
    checkpoints: tuple[VerifiedCheckpoint, ...]
    newest_good: int | None
    """The newest step that is good, of those that were read."""
    read_bytes: int
    told: int = 0
    """How many of them a coordinator was told of."""
    schema: int = SCHEMA

    @property
    def good(self) -> bool:
        """Whether nothing is damaged."""
        return all(one.good for one in self.checkpoints)


class Removal(msgspec.Struct, frozen=True):
    """What ``strata checkpoints rm --json`` prints."""

    place: str
    removed: tuple[int, ...]
    left: tuple[int, ...]
    deleted_files: int
    freed_bytes: int
    removed_ids: tuple[str, ...] = ()
    """Those that could still be read."""
    told: int = 0
    """How many of them a coordinator was told of."""
    schema: int = SCHEMA


@contextmanager
def opened(place: str) -> Iterator[tuple[str, Catalog]]:
    """A place that has checkpoints, and its catalog."""
    config = Config.load().storage
    url = resolve_url(place, None, config)
    with open_backend(url, **with_region(url, {}, config)) as backend:
        if backend.kind == "local" and not os.path.isdir(backend.location()):
            raise CheckpointNotFoundError(f"there is no folder {backend.location()}")
        catalog = Catalog(backend)
        if not catalog.entries():
            raise CheckpointNotFoundError(
                f"there are no checkpoints in {backend.location()}{_nearby(backend.location())}"
            )
        yield backend.location(), catalog


def read_list(place: str) -> CheckpointList:
    """All checkpoints, in the order of their commits."""
    with opened(place) as (where, catalog):
        entries = catalog.entries()
        needed = {entry.name for entry in entries}
        listed = []
        for entry in entries:
            try:
                manifest = catalog.manifest(entry)
            except CheckpointDamagedError as exc:
                listed.append(ListedCheckpoint(entry.step, damaged=str(exc)))
                continue
            needed |= manifest.files
            listed.append(_listed(manifest, newest=entry == entries[-1]))
        files = [f for folder in (MANIFESTS, PACKS, PARTS) for f in catalog.backend.list(folder)]
        unneeded: int | None = sum(file.size for file in files if file.name not in needed)
        if any(one.damaged for one in listed):
            unneeded = None
        return CheckpointList(where, tuple(listed), sum(file.size for file in files), unneeded)


def read_checkpoint(place: str, step: int | None) -> ShownCheckpoint:
    """Everything about the checkpoint of a step, or the newest."""
    with opened(place) as (where, catalog):
        entry = find(catalog, where, step)
        manifest = catalog.manifest(entry)
        parts = catalog.parts(manifest)
        return ShownCheckpoint(
            where,
            _listed(manifest, newest=entry == catalog.find()),
            catalog.backend.location(manifest.name),
            manifest.metrics,
            manifest.metadata,
            tuple(array for part in parts for array in _arrays(part)),
            tuple(_packs(catalog, parts)),
        )


def verify(
    place: str, steps: Sequence[int], begin: Callable[[int], Callable[[int], None]]
) -> Verification:
    """Read every chunk; ``begin`` is called with all bytes, and returns what counts them."""
    with opened(place) as (where, catalog):
        entries = [find(catalog, where, step) for step in steps] or catalog.entries()
        verifier = Verifier(catalog, entries)
        verdicts = list(verifier.run(begin(verifier.stored_bytes)))
        good = [verdict.entry for verdict in verdicts if verdict.good]
        checkpoints = tuple(
            VerifiedCheckpoint(
                verdict.entry.step,
                verdict.manifest.checkpoint_id if verdict.manifest else "",
                verdict.good,
                verdict.chunks,
                msgspec.convert(verdict.damages, tuple[FoundDamage, ...], from_attributes=True),
            )
            for verdict in verdicts
        )
        newest = max(good).step if good else None
        return Verification(where, checkpoints, newest, verifier.stored_bytes)


def remove(
    place: str, steps: Sequence[int], *, force: bool, confirm: Callable[[str, Sequence[int]], None]
) -> Removal:
    """Delete checkpoints and what only they need; ``confirm`` raises when it is not wanted."""
    with opened(place) as (where, catalog):
        for step in steps:
            find(catalog, where, step)
        doomed = [entry for entry in catalog.entries() if entry.step in set(steps)]
        left = [entry for entry in catalog.entries() if entry not in doomed]
        if not force and not any(looks_whole(catalog, entry) for entry in reversed(left)):
            raise StorageError(
                f"no whole checkpoint would be left in {where}: use --force if that is wanted"
            )
        removed, kept = (tuple(sorted({e.step for e in entries})) for entries in (doomed, left))
        confirm(where, removed)
        ids = []
        for entry in doomed:
            with suppress(CheckpointDamagedError):
                ids.append(catalog.manifest(entry).checkpoint_id)
        dropped = catalog.drop(doomed)
        catalog.point_to_newest()
        sizes = {file.name: file.size for file in catalog.backend.list()}
        is_dead = WriterLock(catalog.backend).is_dead
        # What dropped checkpoints needed goes in the second sweep: saves under way refer to the
        # newest one only, which the first sweep has noted.
        deleted = [*catalog.sweep(is_dead), *catalog.sweep(is_dead)]
        if len(dropped) < len(doomed):
            raise StorageError(f"not all of them could be deleted from {where}: try again")
        freed = sum(sizes.get(name, 0) for name in deleted)
        return Removal(where, removed, kept, len(deleted), freed, tuple(ids))


def find(catalog: Catalog, where: str, step: int | None) -> CatalogEntry:
    """The newest checkpoint, or the newest of a step."""
    entry = catalog.find(step)
    if entry is None:
        there = ", ".join(str(step) for step in sorted({e.step for e in catalog.entries()})[-8:])
        raise CheckpointNotFoundError(
            f"there is no checkpoint of step {step} in {where} (there: {there})"
        )
    return entry


def _listed(manifest: Manifest, *, newest: bool) -> ListedCheckpoint:
    return ListedCheckpoint(
        manifest.step,
        manifest.epoch,
        manifest.checkpoint_id,
        manifest.size_bytes,
        manifest.written_bytes,
        manifest.is_full,
        len(manifest.parts),
        manifest.created_at,
        newest,
    )


def _arrays(part: Part) -> Iterator[ShownArray]:
    if part.kind == "bytes":
        yield ShownArray(part.rank, "", "bytes", "", None, part.length)
    elif part.kind == "state":
        for one in describe(part.skeleton):
            yield ShownArray(part.rank, one.key, one.kind, one.dtype, one.shape, one.nbytes)
    else:
        for extent in part.extents:
            yield ShownArray(part.rank, extent.key, part.kind, extent.dtype, None, extent.length)


def _packs(catalog: Catalog, parts: Sequence[Part]) -> Iterator[ShownPack]:
    needed_by: dict[str, set[int]] = {}
    for entry in catalog.entries():
        with suppress(CheckpointDamagedError):
            for file in catalog.manifest(entry).files:
                needed_by.setdefault(file, set()).add(entry.step)
    used: dict[str, dict[int, int]] = {}
    for part in parts:
        for chunk in (*part.chunks, *part.bases):
            used.setdefault(part.packs[chunk.pack].file, {})[chunk.position] = chunk.stored
    for file, size in {pack.file: pack.size for part in parts for pack in part.packs}.items():
        name = _PACK_STEP.match(file)
        step = int(name[1]) if name else None
        used_bytes = sum(used.get(file, {}).values())
        yield ShownPack(file, size, used_bytes, step, tuple(sorted(needed_by.get(file, ()))))


def _nearby(folder: str) -> str:
    """Where checkpoints are instead, if they are in folders of a local one."""
    names = sorted(path.parent.name for path in Path(folder).glob(f"*/{MANIFESTS}"))
    return f", but in its folders {', '.join(names[:8])}" if names else ""
