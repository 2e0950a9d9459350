"""How a part becomes a committed checkpoint: alone, or together with all other ranks."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import StorageError
from ..telemetry import EventLog
from .format import PARTS, Manifest, Part, PartFile, digest_of, open_part, seal
from .place import Place

if TYPE_CHECKING:
    from .pipeline import Wanted

log = EventLog("checkpoint")

COMMIT_MS = 1_800_000
"""How long the ranks wait for the slowest one's part."""


class Coordinator(Protocol):
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
    ) -> None:
        """Record a checkpoint, or a part of one: then it returns when all parts are there."""


class Commits(ABC):
    """Commits parts."""

    rank = 0

    def new_id(self, step: int) -> str:
        """The id of a new checkpoint, where it can be told at once; else nothing."""
        return ""

    @abstractmethod
    def begin(self, step: int) -> str:
        """The id of a new checkpoint."""

    @abstractmethod
    def commit(
        self, checkpoint_id: str, wanted: Wanted, part: Part, written: int
    ) -> Manifest | None:
        """Commit a part that is stored; returns the manifest if it was written here."""


class SingleCommits(Commits):
    """One writer, whose checkpoints have one part; a coordinator is told if there is one."""

    def __init__(self, place: Place, coordinator: Coordinator | None = None) -> None:
        self._place = place
        self._coordinator = coordinator

    def new_id(self, step: int) -> str:
        """The id of a new checkpoint."""
        return f"step-{step:012d}-{os.urandom(4).hex()}"

    begin = new_id

    def commit(
        self, checkpoint_id: str, wanted: Wanted, part: Part, written: int
    ) -> Manifest | None:
        """Write the manifest, then tell the coordinator."""
        manifest = self._place.catalog.commit(
            lambda sequence: _manifest(
                checkpoint_id, sequence, wanted, (part,), part.length, written, _is_full(part)
            )
        )
        if self._coordinator is not None:
            self._coordinator.commit_checkpoint(
                checkpoint_id,
                wanted.step,
                epoch=wanted.epoch,
                path=self._place.backend.location(manifest.name),
                size_bytes=manifest.size_bytes,
                is_full=manifest.is_full,
            )
        return manifest


class SharedCommits(Commits):
    """Every rank writes a part of each checkpoint, and the coordinator commits it.

    A part's file is written first, then the coordinator is told. When it has heard from all
    ranks the checkpoint is committed for good; the lowest rank then writes the manifest. Should
    it die before that, whoever looks next writes it, since all parts are there.
    """

    def __init__(self, place: Place, coordinator: Coordinator) -> None:
        self._place = place
        self._coordinator = coordinator
        self.rank = coordinator.rank

    def begin(self, step: int) -> str:
        """The id that all ranks of this checkpoint use."""
        self.rank = self._coordinator.rank
        return self._coordinator.begin_checkpoint(step)

    def commit(
        self, checkpoint_id: str, wanted: Wanted, part: Part, written: int
    ) -> Manifest | None:
        """Store the part's file, wait for all others, and write the manifest if it falls to us."""
        name = part_name(checkpoint_id, self.rank, self._place.session.tag(f"{self.rank:05d}"))
        backend = self._place.backend
        backend.write(name, seal(part))
        try:
            self._coordinator.commit_checkpoint(
                checkpoint_id,
                wanted.step,
                epoch=wanted.epoch,
                path=backend.location(name),
                size_bytes=part.length,
                is_full=_is_full(part),
                partial=True,
                timeout_ms=COMMIT_MS,
            )
        except BaseException:
            backend.delete(name)
            raise
        files = self._files(checkpoint_id)
        if self.rank != min(file.rank for file in files):
            return None
        return self.write_manifest(checkpoint_id, wanted, files)

    def write_manifest(
        self, checkpoint_id: str, wanted: Wanted, files: list[PartFile] | None = None
    ) -> Manifest:
        """Write the manifest of a checkpoint that the coordinator has committed."""
        parts = files or self._files(checkpoint_id)
        size = sum(part.size_bytes for part in parts)
        return self._place.catalog.commit(
            lambda sequence: _manifest(
                checkpoint_id, sequence, wanted, tuple(parts), size, size, wanted.is_full
            )
        )

    def _files(self, checkpoint_id: str) -> list[PartFile]:
        """The part files of a checkpoint, by rank."""
        backend = self._place.backend
        found = []
        for file in backend.list(f"{PARTS}/{checkpoint_id}"):
            data = backend.read(file.name)
            part = open_part(data, backend.location(file.name))
            found.append(
                PartFile(part.rank, file.name, digest_of(data), part.pack_files, part.length)
            )
        if not found:
            raise StorageError(
                f"checkpoint {checkpoint_id} is committed, but its parts are not in "
                f"{self._place.url}: do all ranks save to the same place?"
            )
        return sorted(found, key=lambda file: file.rank)


def part_name(checkpoint_id: str, rank: int, tag: str) -> str:
    """Where a rank's part of a shared checkpoint is stored."""
    return f"{PARTS}/{checkpoint_id}/{tag}part.json"


def _manifest(
    checkpoint_id: str,
    sequence: int,
    wanted: Wanted,
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


def _is_full(part: Part) -> bool:
    """Whether all its chunks were stored with it."""
    return len(part.packs) <= 1 and not part.bases
