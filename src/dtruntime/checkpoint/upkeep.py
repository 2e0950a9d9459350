"""Clearing away what a place need not keep."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import StorageError
from ..telemetry import EventLog
from .catalog import Entry
from .place import Place
from .retention import Retention

log = EventLog("checkpoint")


class Upkeep:
    """Drops the checkpoints of a place that retention does not keep, and files nobody needs."""

    def __init__(
        self,
        place: Place,
        retention: Retention,
        spares: Callable[[Entry], bool] = lambda entry: False,
    ) -> None:
        """``spares`` says which checkpoints stay whatever retention says."""
        self._place = place
        self._retention = retention
        self._spares = spares

    def clean(self) -> None:
        """Drop both; a failure is logged, since the next time does it as well."""
        try:
            self._place.catalog.retain(self._retention, self._spares)
            self.sweep()
        except StorageError as exc:
            log.warning("checkpoint.not_cleaned", place=self._place.url, reason=str(exc))

    def sweep(self) -> None:
        """Drop files that no checkpoint needs, and what dead writers have left."""
        self._place.catalog.sweep(self._place.session.is_dead)
        self._place.session.forget_dead()
