"""Loading what was committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..errors import CheckpointDamagedError, CheckpointNotFoundError, StorageError
from ..telemetry import EventLog
from ..types import CheckpointInfo
from .format import Manifest, Part
from .place import Place
from .reader import PartReader
from .trees import Rebuild

log = EventLog("checkpoint")

R = TypeVar("R")


class Loads:
    """Reads the checkpoints of a place; ``rank`` says whose part is read."""

    def __init__(self, place: Place, rank: Callable[[], int] = lambda: 0) -> None:
        self._place = place
        self._rank = rank

    def of_step(self, step: int, read: Callable[[Manifest], R]) -> R:
        """What ``read`` makes of the checkpoint of a step."""
        catalog = self._place.catalog
        entry = catalog.find(step)
        if entry is None:
            steps = sorted({entry.step for entry in catalog.entries()})
            there = ", ".join(map(str, steps[-8:])) or "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {self._place.url} (there: {there})"
            )
        return read(catalog.manifest(entry))

    def newest_good(self, read: Callable[[Manifest], R], *, own_part: bool = True) -> R:
        """What ``read`` makes of the newest checkpoint, or of the newest that is not damaged.

        With ``own_part`` it reads one rank's part: of a checkpoint of several ranks that is damaged
        no older one is read instead, since the other ranks would not notice. A store that fails is
        no reason to take an older one either.
        """
        entries = self._place.catalog.entries()
        if not entries:
            raise CheckpointNotFoundError(f"there is no checkpoint in {self._place.url}")
        first: CheckpointDamagedError | None = None
        for entry in reversed(entries):
            manifest = None
            try:
                manifest = self._place.catalog.manifest(entry)
                found = read(manifest)
            except CheckpointDamagedError as exc:
                if own_part and manifest is not None and len(manifest.parts) > 1:
                    raise _cannot_fall_back(exc) from exc
                first = first or exc
                log.error("checkpoint.damaged", step=entry.step, reason=str(exc))
                continue
            if first is not None:
                log.error("checkpoint.fell_back", to_step=entry.step, place=self._place.url)
            return found
        assert first is not None
        raise first

    def with_id(self, checkpoint_id: str) -> Manifest:
        """A checkpoint by its id."""
        for entry in reversed(self._place.catalog.entries()):
            manifest = self._place.catalog.manifest(entry)
            if manifest.checkpoint_id == checkpoint_id:
                return manifest
        raise CheckpointNotFoundError(
            f"there is no checkpoint {checkpoint_id!r} in {self._place.url}"
        )

    def bytes_of(self, manifest: Manifest) -> bytes:
        """What was saved as bytes."""
        part = self._own_part(manifest)
        if part.kind != "bytes":
            raise TypeError(f"{title(manifest)} is a state dict: use load_state()")
        return bytes(PartReader(self._place.backend, part, title(manifest)).read())

    def state_of(self, manifest: Manifest, map_location: Any, keys: Iterable[str] | None) -> Any:
        """What was saved as a state dict, read straight into its arrays."""
        part = self._own_part(manifest)
        if part.kind != "state":
            raise TypeError(f"{title(manifest)} is bytes, not a state dict: use load()")
        reader = PartReader(self._place.backend, part, title(manifest))
        plan = Rebuild(part.skeleton, map_location=map_location, keys=keys)
        reader.read_into((part.extents[i].offset, view) for i, view in plan.destinations())
        return plan.finish()

    def verified(self, manifest: Manifest) -> CheckpointInfo:
        """Describe a checkpoint after reading all of it; ``StorageError`` when it is damaged."""
        for part in self._place.catalog.parts(manifest):
            problems = PartReader(self._place.backend, part, title(manifest)).verify()
            if problems:
                raise problems[0]
        return self.info(manifest)

    def info(self, manifest: Manifest) -> CheckpointInfo:
        """Describe a checkpoint."""
        return CheckpointInfo(
            checkpoint_id=manifest.checkpoint_id,
            step=manifest.step,
            epoch=manifest.epoch,
            path=self._place.backend.location(manifest.name),
            size_bytes=manifest.size_bytes,
            is_full=manifest.is_full,
            parts=len(manifest.parts),
            committed_at=manifest.created_at,
            metadata=manifest.metadata,
        )

    def _own_part(self, manifest: Manifest) -> Part:
        if any(part.kind == "dcp" for part in manifest.parts):
            raise TypeError(
                f"{title(manifest)} was saved by torch's distributed checkpoint: use dcp.load(state"
                ", storage_reader=StrataReader(...)) with StrataReader of dtruntime.checkpoint.dcp"
            )
        rank = self._rank()
        for part in manifest.parts:
            if part.rank == rank:
                return self._place.catalog.part(part)
        if len(manifest.parts) == 1:
            return self._place.catalog.part(manifest.parts[0])
        raise StorageError(
            f"{title(manifest)} was saved by {len(manifest.parts)} ranks and has no part of rank "
            f"{rank}: load it with as many ranks, or save through torch's distributed "
            "checkpoint, which can be loaded by any number"
        )


def title(manifest: Manifest) -> str:
    """What messages call a checkpoint."""
    return f"checkpoint {manifest.checkpoint_id} of step {manifest.step}"


def _cannot_fall_back(error: CheckpointDamagedError) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"{error}. All ranks have to load the same step: 'strata checkpoints verify' says which "
        "are good; load one of them by its number on every rank"
    )
