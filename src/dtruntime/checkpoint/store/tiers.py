"""Checkpoints that may lie in two places: a fast one near the machine, and the main storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import CheckpointDamagedError
from ...telemetry import EventLog
from ..file_format.manifest import Manifest, Part, PartFile
from ..load.pack_reader import PartReader
from .catalog import CatalogEntry
from .checkpoint_store import CheckpointStore

log = EventLog("checkpoint")

R = TypeVar("R")


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
