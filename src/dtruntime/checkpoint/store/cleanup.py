"""Clearing away what a place need not keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ...errors import CheckpointDamagedError, StorageError
from ...retention import Retention
from ...telemetry import EventLog
from .catalog import CatalogEntry
from .checkpoint_store import CheckpointStore
from .condition_reports import ConditionReporter

log = EventLog("checkpoint")


class Cleanup:
    """Drops the checkpoints of a place that retention does not keep, and files nobody needs."""

    def __init__(
        self,
        place: CheckpointStore,
        retention: Retention,
        spares: Callable[[CatalogEntry], bool] = lambda entry: False,
        witness: ConditionReporter | None = None,
    ) -> None:
        """``spares`` says which checkpoints stay whatever retention says.

        ``witness`` is told what was dropped.
        """
        self._place = place
        self._retention = retention
        self._spares = spares
        self._witness = witness or ConditionReporter()

    def clean(self, *, for_good: bool = False) -> None:
        """Drop both; a failure is logged, since the next time does it as well.

        What a dropped checkpoint had stays for a save under way until the next time; ``for_good``
        says that there will be none, and no save either.
        """
        try:
            self.retain()
            self.sweep()
            if for_good:
                self.sweep()
        except StorageError as exc:
            log.warning("checkpoint.not_cleaned", place=self._place.url, reason=str(exc))

    def retain(self) -> None:
        """Drop checkpoints that retention does not keep."""
        catalog, ids = self._place.catalog, dict[CatalogEntry, str]()

        def spares(entry: CatalogEntry) -> bool:
            # The id of one that is damaged is known to nobody any more.
            with contextlib.suppress(CheckpointDamagedError):
                ids[entry] = catalog.manifest(entry).checkpoint_id
            return self._spares(entry)

        dropped = catalog.retain(self._retention, spares)
        self._witness.removed(ids[entry] for entry in dropped if entry in ids)

    def sweep(self) -> None:
        """Drop files that no checkpoint needs, and what dead writers have left."""
        self._place.catalog.sweep(self._place.session.is_dead)
        self._place.session.forget_dead()
