"""A place with checkpoints, opened when it is first used."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ...errors import CheckpointDamagedError, StorageError, StorageNotFoundError
from ...retention import Retention
from ...storage import StorageBackend, open_backend
from ...telemetry import EventLog
from ..file_format.manifest import IDENTITY
from .catalog import Catalog, CatalogEntry
from .writer_lock import WriterLock

log = EventLog("checkpoint")

_IDENTITY = re.compile(r"[0-9a-f]{32}")


class CheckpointStore:
    """A storage backend with its catalog, and this process's standing as a writer in it."""

    def __init__(
        self, url: str, options: dict[str, Any], backend: StorageBackend | None = None
    ) -> None:
        """``backend`` is one that is open already; it stays its owner's, and is not closed."""
        self.url = url
        self._given = backend
        self._options = options
        self._catalog: Catalog | None = None
        self._session: WriterLock | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    @property
    def catalog(self) -> Catalog:
        """The checkpoints there; looking at them writes nothing."""
        with self._lock:
            return self._found()

    @property
    def session(self) -> WriterLock:
        """This writer; others can tell from then on that it lives."""
        return self._open()[1]

    @property
    def backend(self) -> StorageBackend:
        """What stores them."""
        return self.catalog.backend

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and has not closed it."""
        return not self._closed and self._process == os.getpid()

    def identity(self) -> str:
        """What tells this place from every other; written when it is first asked for."""
        try:
            data = self.backend.read(IDENTITY)
        except StorageNotFoundError:
            own = secrets.token_hex(16)
            if self.backend.create(IDENTITY, json.dumps({"place": own}).encode()):
                return own
            data = self.backend.read(IDENTITY)
        try:
            found = json.loads(data)["place"]
            if _IDENTITY.fullmatch(found):
                return str(found)
        except (ValueError, KeyError, TypeError):
            pass
        raise StorageError(
            f"{self.backend.location(IDENTITY)} is damaged: remove it, and it is written anew"
        )

    def check_usable(self) -> None:
        """Raise ``StorageError`` when it is closed or belongs to another process."""
        if self._closed:
            raise StorageError(f"the manager of {self.url} is closed")
        if self._process != os.getpid():
            raise StorageError(
                f"the manager of {self.url} was made in process {self._process}, not in this one: "
                "make one here"
            )

    def close(self) -> None:
        """Release everything."""
        self._closed = True
        with self._lock:
            catalog, self._catalog = self._catalog, None
            session, self._session = self._session, None
        if session is not None:
            session.close()
        if catalog is not None and self._given is None:
            catalog.backend.close()

    def _open(self) -> tuple[Catalog, WriterLock]:
        with self._lock:
            catalog = self._found()
            if self._session is None:
                session = WriterLock(catalog.backend)
                session.open()
                self._session = session
            return catalog, self._session

    def _found(self) -> Catalog:
        if self._catalog is None:
            self._catalog = Catalog(self._given or open_backend(self.url, **self._options))
        return self._catalog


class Cleanup:
    """Drops the checkpoints of a place that retention does not keep, and files nobody needs."""

    def __init__(
        self,
        place: CheckpointStore,
        retention: Retention,
        spares: Callable[[CatalogEntry], bool] = lambda entry: False,
        on_removed: Callable[[Iterable[str]], None] = lambda ids: None,
    ) -> None:
        """``spares`` says which checkpoints stay whatever retention says.

        ``on_removed`` is called with the ids of checkpoints that were dropped.
        """
        self._place = place
        self._retention = retention
        self._spares = spares
        self._on_removed = on_removed

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
        self._on_removed(ids[entry] for entry in dropped if entry in ids)

    def sweep(self) -> None:
        """Drop files that no checkpoint needs, and what dead writers have left."""
        self._place.catalog.sweep(self._place.session.is_dead)
        self._place.session.forget_dead()
