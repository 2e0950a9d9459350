"""Loading what was committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ...errors import CheckpointDamagedError, CheckpointNotFoundError, StorageError
from ...telemetry import EventLog
from ...types import CheckpointInfo
from ..file_format.manifest import Manifest, Part, PartFile
from ..save.commit import ConditionReporter
from ..state_dict import Rebuild
from ..store.catalog import CatalogEntry
from ..store.checkpoint_store import CheckpointStore
from .pack_reader import PartReader

log = EventLog("checkpoint")

R = TypeVar("R")


class CheckpointLoader:
    """Reads the checkpoints of a run; ``rank`` says whose part is read unless one is named."""

    def __init__(
        self,
        stores: Sequence[CheckpointStore],
        rank: Callable[[], int],
        reporter: ConditionReporter,
    ) -> None:
        self._tiers = Tiers(stores)
        self._rank = rank
        self._reporter = reporter

    def of_step(self, step: int, read: Callable[[CheckpointCopy], R]) -> R:
        """What ``read`` makes of the checkpoint of a step."""
        everything = self._tiers.listed()
        found = [listed for listed in reversed(everything) if listed.entry.step == step]
        if not found:
            steps = sorted({listed.entry.step for listed in everything})
            there = ", ".join(map(str, steps[-8:])) or "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {self._tiers.url} (there: {there})"
            )
        return self._first_good(found, read)

    def newest_good(
        self,
        read: Callable[[CheckpointCopy], R],
        *,
        own_part: bool = True,
        is_one: Callable[[Manifest], bool] = lambda manifest: True,
    ) -> R:
        """What ``read`` makes of the newest checkpoint, or of the newest that is not damaged.

        With ``own_part`` it reads one rank's part: of a checkpoint of several ranks that is damaged
        no older one is read instead, since the other ranks would not notice. A store that fails is
        no reason to take an older one either. Only those count that ``is_one`` is true of.
        """
        first: CheckpointDamagedError | None = None
        everything = self._tiers.listed()
        for listed in reversed(everything):
            attempt = _Attempt(read, is_one)
            try:
                found = self._read(listed, attempt)
            except _OtherKindError:
                continue
            except CheckpointDamagedError as exc:
                if own_part and attempt.parts > 1:
                    raise _cannot_fall_back(exc) from exc
                first = first or exc
                continue
            if first is not None:
                log.error("checkpoint.fell_back", to_step=listed.entry.step, place=self._tiers.url)
            return found
        if first is not None:
            raise first
        kind = "such checkpoint" if everything else "checkpoint"
        raise CheckpointNotFoundError(f"there is no {kind} in {self._tiers.url}")

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint; nothing but names is read."""
        listed = self._tiers.listed()
        return listed[-1].entry.step if listed else None

    def latest(self) -> CheckpointInfo | None:
        """Describe the newest checkpoint by its manifest."""
        try:
            return self.newest_good(self.info, own_part=False)
        except CheckpointNotFoundError:
            return None

    def with_id(self, checkpoint_id: str, read: Callable[[CheckpointCopy], R]) -> R:
        """What ``read`` makes of a checkpoint by its id."""
        damaged = 0
        for listed in reversed(self._tiers.listed()):
            try:
                found = self._tiers.read(listed, _id_of)
            except CheckpointDamagedError:
                damaged += 1
                continue
            if found == checkpoint_id:
                return self._read(listed, read)
        hint = f", unless it is one of {damaged} whose manifests are damaged" if damaged else ""
        raise CheckpointNotFoundError(
            f"there is no checkpoint {checkpoint_id!r} in {self._tiers.url}{hint}"
        )

    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending."""
        return sorted({listed.entry.step for listed in self._tiers.listed()})

    def infos(self) -> list[CheckpointInfo]:
        """Describe all checkpoints, in the order of their commits.

        Those whose manifests are damaged are left out, and named in the log. When all are, that is
        an error: it is not the same as none.
        """
        found: dict[str, CheckpointInfo] = {}
        damage: CheckpointDamagedError | None = None
        for listed in self._tiers.listed():
            try:
                info = self._read(listed, self.info)
            except StorageError as exc:
                if listed.entry not in [again.entry for again in self._tiers.listed()]:
                    continue  # it was dropped since it was listed
                if not isinstance(exc, CheckpointDamagedError):
                    raise
                damage = exc
                continue
            found.pop(info.checkpoint_id, None)  # it was numbered anew in the main storage
            found[info.checkpoint_id] = info
        if damage is not None and not found:
            raise damage
        return list(found.values())

    def bytes_of(self, copy: CheckpointCopy, rank: int | None = None) -> bytes:
        """What was saved as bytes."""
        part = self.part_of(copy, rank)
        if part.kind != "bytes":
            raise TypeError(f"{copy.title} is a state dict: use load_state()")
        data = copy.reader(part).read()
        self._found_good(copy)
        return data

    def state_of(
        self,
        copy: CheckpointCopy,
        map_location: Any,
        keys: Iterable[str] | None,
        rank: int | None = None,
    ) -> Any:
        """What was saved as a state dict, read straight into its arrays."""
        part = self.part_of(copy, rank)
        if part.kind != "state":
            raise TypeError(f"{copy.title} is bytes, not a state dict: use load()")
        plan = Rebuild(part.skeleton, map_location=map_location, keys=keys)
        _check_sizes(copy, part, plan.sizes)
        copy.reader(part).read_into(
            (part.extents[i].offset, view) for i, view in plan.destinations()
        )
        state = plan.finish()
        if keys is None:
            self._found_good(copy)
        return state

    def verified(self, copy: CheckpointCopy) -> CheckpointInfo:
        """Describe a checkpoint after reading all of it; ``StorageError`` when it is damaged."""
        for part in copy.parts():
            problems = copy.reader(part).verify()
            if problems:
                raise problems[0]
        self._reporter.good(copy.manifest)
        return replace(self.info(copy), verified=True, verified_at=time.time())

    def note(self, copy: CheckpointCopy) -> None:
        """Take note that a checkpoint was loaded, which later saves may refer to."""
        self._tiers.note_load(copy.manifest)

    def _first_good(
        self, some: Iterable[LocatedCheckpoint], read: Callable[[CheckpointCopy], R]
    ) -> R:
        """What ``read`` makes of the first of several checkpoints of one step that is good."""
        first: CheckpointDamagedError | None = None
        for listed in some:
            try:
                return self._read(listed, read)
            except CheckpointDamagedError as exc:
                first = first or exc
        assert first is not None
        raise first

    def _read(self, listed: LocatedCheckpoint, read: Callable[[CheckpointCopy], R]) -> R:
        try:
            return self._tiers.read(listed, read)
        except CheckpointDamagedError as exc:
            self._reporter.damaged(listed.places[0], listed.entry, exc)
            raise

    def _found_good(self, copy: CheckpointCopy) -> None:
        """One part was read and checked: that is all of a checkpoint that has no other."""
        if len(copy.manifest.parts) == 1:
            self._reporter.good(copy.manifest)

    def info(self, copy: CheckpointCopy) -> CheckpointInfo:
        """Describe a checkpoint."""
        manifest = copy.manifest
        return CheckpointInfo(
            checkpoint_id=manifest.checkpoint_id,
            step=manifest.step,
            epoch=manifest.epoch,
            path=copy.place.backend.location(manifest.name),
            size_bytes=manifest.size_bytes,
            is_full=manifest.is_full,
            parts=len(manifest.parts),
            committed_at=manifest.created_at,
            metadata=manifest.metadata,
        )

    def part_of(self, copy: CheckpointCopy, rank: int | None = None) -> Part:
        """The part of a rank; by default this one's, or the only one there is."""
        manifest = copy.manifest
        if any(part.kind == "dcp" for part in manifest.parts):
            raise TypeError(
                f"{copy.title} was saved by torch's distributed checkpoint: use dcp.load(state"
                ", storage_reader=StrataReader(...)) with StrataReader of dtruntime.checkpoint.dcp"
            )
        wanted = self._rank() if rank is None else rank
        for part in manifest.parts:
            if part.rank == wanted:
                return copy.part(part)
        if rank is not None:
            there = ", ".join(map(str, ranks_of(copy)))
            raise CheckpointNotFoundError(
                f"{copy.title} has no part of rank {rank} (there: {there})"
            )
        if len(manifest.parts) == 1:
            return copy.part(manifest.parts[0])
        raise StorageError(
            f"{copy.title} was saved by {len(manifest.parts)} ranks and has no part of rank "
            f"{wanted}: load the parts that are there (rank=..., see ranks()), load it with as "
            "many ranks, or save through torch's distributed checkpoint, which can be loaded by "
            "any number"
        )


def _check_sizes(copy: CheckpointCopy, part: Part, sizes: Mapping[int, int]) -> None:
    """Make sure that buffers are as large as what was stored of them, before memory is made."""
    for index, size in sizes.items():
        if not 0 <= index < len(part.extents) or part.extents[index].length != size:
            raise CheckpointDamagedError(
                f"{copy.title} is damaged: its skeleton does not fit what was stored (buffer "
                f"{index}, {size} bytes)"
            )


def is_kind(manifest: Manifest, kind: str) -> bool:
    """Whether a checkpoint is of a kind."""
    return any((part.kind or "state") == kind for part in manifest.parts)


def ranks_of(copy: CheckpointCopy) -> list[int]:
    """The ranks that saved parts of a checkpoint."""
    return sorted(part.rank for part in copy.manifest.parts)


def _id_of(copy: CheckpointCopy) -> str:
    return copy.manifest.checkpoint_id


class _OtherKindError(Exception):
    """The checkpoint is not one of those that are looked for."""


class _Attempt(Generic[R]):
    """Reads a checkpoint, and remembers of how many parts it was."""

    def __init__(
        self, read: Callable[[CheckpointCopy], R], is_one: Callable[[Manifest], bool]
    ) -> None:
        self._read = read
        self._is_one = is_one
        self.parts = 0

    def __call__(self, copy: CheckpointCopy) -> R:
        if not self._is_one(copy.manifest):
            raise _OtherKindError
        self.parts = len(copy.manifest.parts)
        return self._read(copy)


def _cannot_fall_back(error: CheckpointDamagedError) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"{error}. All ranks have to load the same step: 'strata checkpoints verify' says which "
        "are good; load one of them by its number on every rank"
    )


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """A checkpoint, in one of the places that have it."""

    place: CheckpointStore
    manifest: Manifest

    @property
    def title(self) -> str:
        """What messages call it."""
        return title(self.manifest)

    def part(self, part: Part | PartFile) -> Part:
        """One of its parts, from its own file where it has one."""
        return self.place.catalog.part(part)

    def parts(self) -> list[Part]:
        """The parts of all ranks."""
        return self.place.catalog.parts(self.manifest)

    def reader(self, part: Part) -> PartReader:
        """Reads one of its parts."""
        return PartReader(self.place.backend, part, self.title)


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A committed checkpoint, and the places that have a manifest of its name."""

    entry: CatalogEntry
    places: tuple[CheckpointStore, ...]


class Tiers:
    """The places of one run's checkpoints, in the order in which they are read.

    The last is the main storage: of two checkpoints with the same sequence, the one that is there
    is the newer one. The other came about where nobody knew of it.
    """

    def __init__(self, places: Sequence[CheckpointStore]) -> None:
        self._places = tuple(places)
        self.url = places[-1].url
        self._newest = 0
        """The newest sequence when last looked."""

    def listed(self) -> list[LocatedCheckpoint]:
        """All checkpoints, in the order of their commits; a place that fails raises."""
        found: dict[CatalogEntry, list[CheckpointStore]] = {}
        for place in self._places:
            for entry in place.catalog.entries():
                found.setdefault(entry, []).append(place)
        main = self._places[-1]
        order = sorted(found, key=lambda e: (e.sequence, main in found[e], e.step))
        self._newest = order[-1].sequence if order else 0
        return [LocatedCheckpoint(entry, tuple(found[entry])) for entry in order]

    def note_load(self, manifest: Manifest) -> None:
        """Take note of what was loaded, of the checkpoints that were listed last."""
        for place in self._places:
            place.catalog.note_load(manifest, self._newest)

    def read(self, listed: LocatedCheckpoint, read: Callable[[CheckpointCopy], R]) -> R:
        """What ``read`` makes of a checkpoint: of its first copy that is not damaged."""
        first: CheckpointDamagedError | None = None
        for place in self._agreeing(listed):
            try:
                found = read(CheckpointCopy(place, place.catalog.manifest(listed.entry)))
            except CheckpointDamagedError as exc:
                place.catalog.note_damage(listed.entry, exc)
                first = first or exc
                continue
            if first is not None:
                log.error("checkpoint.read_elsewhere", step=listed.entry.step, place=place.url)
            return found
        assert first is not None
        raise first

    def _agreeing(self, listed: LocatedCheckpoint) -> tuple[CheckpointStore, ...]:
        """The places whose manifests of that name are of one checkpoint, that of the main one."""
        if len(listed.places) == 1:
            return listed.places
        ids: dict[CheckpointStore, str] = {}
        for place in listed.places:
            try:
                ids[place] = place.catalog.manifest(listed.entry).checkpoint_id
            except CheckpointDamagedError as exc:
                place.catalog.note_damage(listed.entry, exc)
        if len(set(ids.values())) <= 1:
            return tuple(ids) or listed.places
        log.warning("checkpoint.tiers_disagree", step=listed.entry.step, place=self.url)
        return listed.places[-1:]


def title(manifest: Manifest) -> str:
    """What messages call a checkpoint."""
    return f"checkpoint {manifest.checkpoint_id} of step {manifest.step}"
