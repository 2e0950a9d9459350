"""Tells a coordinator what became of committed checkpoints in their place, which it cannot see."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import CheckpointDamagedError, StrataError
from ...telemetry import EventLog
from ...types import REPORTED_AT_ONCE, CheckpointCondition
from ..file_format.manifest import Manifest
from ..save.commit import FindCoordinator
from .tiers import LocatedCheckpoint

log = EventLog("checkpoint")


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

    def damaged(self, listed: LocatedCheckpoint, error: CheckpointDamagedError) -> None:
        """A checkpoint that is there cannot be read."""
        if self._find() is None or listed.entry.name in self._damaged:
            return
        place = listed.places[0]
        ids: list[str] = []
        path = ""
        try:
            if listed.entry not in place.catalog.entries():
                return  # it was dropped since it was listed
            ids = [place.catalog.manifest(listed.entry).checkpoint_id]
        except StrataError:
            path = place.backend.location(listed.entry.name)
        if self._tell(ids, CheckpointCondition.DAMAGED, path=path, detail=str(error)):
            self._damaged.add(listed.entry.name)

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
