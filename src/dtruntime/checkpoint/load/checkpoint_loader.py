"""Loading committed checkpoints: which one, from which tier, and as what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """A checkpoint in one of the stores that have it."""

    store: CheckpointStore
    manifest: Manifest

    @property
    def title(self) -> str:
        """Its name in messages."""
        return title(self.manifest)

    def part(self, part: Part | PartFile) -> Part:
        """One of its parts, read from its own file where it has one."""
        return self.store.catalog.part(part)

    def parts(self) -> list[Part]:
        """The parts of all ranks."""
        return self.store.catalog.parts(self.manifest)

    def reader(self, part: Part) -> PartReader:
        """The reader of one of its parts."""
        return PartReader(self.store.backend, part, self.title)


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A committed checkpoint, and the stores that have a manifest of its name."""

    entry: CatalogEntry
    stores: tuple[CheckpointStore, ...]


class CheckpointLoader:
    """Reads checkpoints that lie in one store, or in a local tier and the main storage.

    Stores are given in the order in which they are read, the main storage last: of two checkpoints
    with the same sequence, the main storage has the newer one. ``rank`` says whose part is read
    unless one is named.
    """

    def __init__(
        self,
        stores: Sequence[CheckpointStore],
        rank: Callable[[], int],
        reporter: ConditionReporter,
    ) -> None:
        self._stores = tuple(stores)
        self._url = stores[-1].url
        self._newest = 0
        """The newest sequence of the last listing."""
        self._rank = rank
        self._reporter = reporter

    # Which checkpoint

    def of_step(self, step: int, read: Callable[[CheckpointCopy], R]) -> R:
        """What ``read`` makes of the checkpoint of a step."""
        everything = self._list()
        candidates = [one for one in reversed(everything) if one.entry.step == step]
        if not candidates:
            steps = sorted({one.entry.step for one in everything})
            there = ", ".join(map(str, steps[-8:])) or "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {self._url} (there: {there})"
            )
        return self._first_good(candidates, read)

    def newest_good(
        self,
        read: Callable[[CheckpointCopy], R],
        *,
        own_part: bool = True,
        is_one: Callable[[Manifest], bool] = lambda manifest: True,
    ) -> R:
        """What ``read`` makes of the newest checkpoint, or of the newest that is not damaged.

        With ``own_part`` it reads one rank's part: if a checkpoint of several ranks is damaged,
        no older one is read instead, since the other ranks would not notice. A store that fails is
        no reason to take an older one either. Only those count that ``is_one`` is true of.
        """
        return self._first_good(self._list()[::-1], read, own_part=own_part, is_one=is_one)

    def with_id(self, checkpoint_id: str, read: Callable[[CheckpointCopy], R]) -> R:
        """What ``read`` makes of the checkpoint with an id."""
        damaged = 0
        for located in reversed(self._list()):
            try:
                manifest = self._read_copy(located, _manifest_of)
            except CheckpointDamagedError:
                damaged += 1
                continue
            if manifest.checkpoint_id == checkpoint_id:
                return self._read(located, read)
        hint = f", unless it is one of {damaged} whose manifests are damaged" if damaged else ""
        raise CheckpointNotFoundError(
            f"there is no checkpoint {checkpoint_id!r} in {self._url}{hint}"
        )

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint; nothing but names is read."""
        everything = self._list()
        return everything[-1].entry.step if everything else None

    def latest(self) -> CheckpointInfo | None:
        """Describe the newest checkpoint by its manifest."""
        try:
            return self.newest_good(self.info, own_part=False)
        except CheckpointNotFoundError:
            return None

    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending."""
        return sorted({located.entry.step for located in self._list()})

    def infos(self) -> list[CheckpointInfo]:
        """Describe all checkpoints, in the order of their commits.

        Those whose manifests are damaged are left out, and named in the log. If all are damaged
        that is an error, and not an empty list.
        """
        infos: dict[str, CheckpointInfo] = {}
        damage: CheckpointDamagedError | None = None
        for located in self._list():
            try:
                info = self._read(located, self.info)
            except StorageError as exc:
                if located.entry not in [again.entry for again in self._list()]:
                    continue  # deleted since it was listed
                if not isinstance(exc, CheckpointDamagedError):
                    raise
                damage = exc
                continue
            infos.pop(info.checkpoint_id, None)  # it got another sequence in the main storage
            infos[info.checkpoint_id] = info
        if damage is not None and not infos:
            raise damage
        return list(infos.values())

    def note(self, copy: CheckpointCopy) -> None:
        """Remember that a checkpoint was loaded, which later saves may refer to."""
        for store in self._stores:
            store.catalog.note_load(copy.manifest, self._newest)

    # As what

    def bytes_of(self, copy: CheckpointCopy, rank: int | None = None) -> bytes:
        """What was saved as bytes."""
        part = self.part_of(copy, rank)
        if part.kind != "bytes":
            raise TypeError(f"{copy.title} is a state dict: use load_state()")
        data = copy.reader(part).read()
        self._report_good(copy)
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
            self._report_good(copy)
        return state

    def verified(self, copy: CheckpointCopy) -> CheckpointInfo:
        """Describe a checkpoint after reading all of it; ``StorageError`` when it is damaged."""
        for part in copy.parts():
            if problems := copy.reader(part).verify():
                raise problems[0]
        self._reporter.good(copy.manifest)
        return replace(self.info(copy), verified=True, verified_at=time.time())

    def info(self, copy: CheckpointCopy) -> CheckpointInfo:
        """Describe a checkpoint."""
        manifest = copy.manifest
        return CheckpointInfo(
            checkpoint_id=manifest.checkpoint_id,
            step=manifest.step,
            epoch=manifest.epoch,
            path=copy.store.backend.location(manifest.name),
            size_bytes=manifest.size_bytes,
            is_full=manifest.is_full,
            parts=len(manifest.parts),
            committed_at=manifest.created_at,
            metadata=manifest.metadata,
        )

    def part_of(self, copy: CheckpointCopy, rank: int | None = None) -> Part:
        """The part of a rank; by default this one's, or the only one there is."""
        manifest = copy.manifest
        if is_kind(manifest, "dcp"):
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

    def _report_good(self, copy: CheckpointCopy) -> None:
        """Report a checkpoint whose only part was read and verified."""
        if len(copy.manifest.parts) == 1:
            self._reporter.good(copy.manifest)

    # From which store

    def _list(self) -> list[LocatedCheckpoint]:
        """All checkpoints, in the order of their commits; a store that fails raises."""
        stores: dict[CatalogEntry, list[CheckpointStore]] = {}
        for store in self._stores:
            for entry in store.catalog.entries():
                stores.setdefault(entry, []).append(store)
        main = self._stores[-1]
        order = sorted(stores, key=lambda e: (e.sequence, main in stores[e], e.step))
        self._newest = order[-1].sequence if order else 0
        return [LocatedCheckpoint(entry, tuple(stores[entry])) for entry in order]

    def _first_good(
        self,
        candidates: Sequence[LocatedCheckpoint],
        read: Callable[[CheckpointCopy], R],
        *,
        own_part: bool = False,
        is_one: Callable[[Manifest], bool] = lambda manifest: True,
    ) -> R:
        """What ``read`` makes of the first checkpoint that is not damaged."""
        damage: CheckpointDamagedError | None = None
        for located in candidates:
            parts = 0
            try:
                manifest = self._read(located, _manifest_of)
                if not is_one(manifest):
                    continue
                parts = len(manifest.parts)
                value = self._read(located, read)
            except CheckpointDamagedError as exc:
                if own_part and parts > 1:
                    raise CheckpointDamagedError(
                        f"{exc}. All ranks have to load the same step: 'strata checkpoints verify' "
                        "says which are good; load one of them by its number on every rank"
                    ) from exc
                damage = damage or exc
                continue
            if damage is not None:
                log.error("checkpoint.fell_back", to_step=located.entry.step, place=self._url)
            return value
        if damage is not None:
            raise damage
        kind = "such checkpoint" if candidates else "checkpoint"
        raise CheckpointNotFoundError(f"there is no {kind} in {self._url}")

    def _read(self, located: LocatedCheckpoint, read: Callable[[CheckpointCopy], R]) -> R:
        try:
            return self._read_copy(located, read)
        except CheckpointDamagedError as exc:
            self._reporter.damaged(located.stores[0], located.entry, exc)
            raise

    def _read_copy(self, located: LocatedCheckpoint, read: Callable[[CheckpointCopy], R]) -> R:
        """What ``read`` makes of the first copy that is not damaged."""
        damage: CheckpointDamagedError | None = None
        for store in self._agreeing(located):
            try:
                value = read(CheckpointCopy(store, store.catalog.manifest(located.entry)))
            except CheckpointDamagedError as exc:
                store.catalog.note_damage(located.entry, exc)
                damage = damage or exc
                continue
            if damage is not None:
                log.error("checkpoint.read_elsewhere", step=located.entry.step, place=store.url)
            return value
        assert damage is not None
        raise damage

    def _agreeing(self, located: LocatedCheckpoint) -> tuple[CheckpointStore, ...]:
        """The stores that have the same checkpoint under that name as the main storage."""
        if len(located.stores) == 1:
            return located.stores
        ids: dict[CheckpointStore, str] = {}
        for store in located.stores:
            try:
                ids[store] = store.catalog.manifest(located.entry).checkpoint_id
            except CheckpointDamagedError as exc:
                store.catalog.note_damage(located.entry, exc)
        if len(set(ids.values())) <= 1:
            return tuple(ids) or located.stores
        log.warning("checkpoint.tiers_disagree", step=located.entry.step, place=self._url)
        return located.stores[-1:]


def _check_sizes(copy: CheckpointCopy, part: Part, sizes: Mapping[int, int]) -> None:
    """Make sure that buffers are as large as what was stored of them, before memory is made."""
    for index, size in sizes.items():
        if not 0 <= index < len(part.extents) or part.extents[index].length != size:
            raise CheckpointDamagedError(
                f"{copy.title} is damaged: its skeleton does not fit what was stored (buffer "
                f"{index}, {size} bytes)"
            )


def title(manifest: Manifest) -> str:
    """The name of a checkpoint in messages."""
    return f"checkpoint {manifest.checkpoint_id} of step {manifest.step}"


def is_kind(manifest: Manifest, kind: str) -> bool:
    """Whether a checkpoint is of a kind."""
    return any((part.kind or "state") == kind for part in manifest.parts)


def ranks_of(copy: CheckpointCopy) -> list[int]:
    """The ranks that saved parts of a checkpoint."""
    return sorted(part.rank for part in copy.manifest.parts)


def _manifest_of(copy: CheckpointCopy) -> Manifest:
    return copy.manifest
