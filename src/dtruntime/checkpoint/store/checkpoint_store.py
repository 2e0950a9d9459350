"""A storage backend with checkpoints: its catalog, this process as a writer, and retention."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable

from ...errors import (
    CheckpointDamagedError,
    StorageError,
    StorageNotFoundError,
    StrataError,
)
from ...retention import Retention
from ...storage import StorageBackend
from ...telemetry import EventLog
from ..file_format.manifest import IDENTITY
from .catalog import Catalog, CatalogEntry
from .writer_lock import WriterLock

log = EventLog("checkpoint")

LEFTOVER_SECONDS = 60.0
"""Unfinished files of dead processes are removed when they are older."""
_IDENTITY = re.compile(r"[0-9a-f]{32}")


class CheckpointStore:
    """One place with checkpoints. Reading from it writes nothing."""

    def __init__(self, backend: StorageBackend, url: str = "", *, is_owner: bool = False) -> None:
        """``url`` is what messages call the place.

        The backend is closed with the store if the store ``is_owner``.
        """
        self.backend = backend
        self.url = url or backend.url
        self.catalog = Catalog(backend)
        self._is_owner = is_owner
        self._session: WriterLock | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    @property
    def session(self) -> WriterLock:
        """This process as a writer; from then on other writers can see that it is alive."""
        with self._lock:
            if self._session is None:
                session = WriterLock(self.backend)
                session.open()
                self._session = session
            return self._session

    @property
    def is_ours(self) -> bool:
        """Whether this process opened it, and has not closed it."""
        return not self._closed and self._process == os.getpid()

    def identity(self) -> str:
        """A random name of this place, in a file that is written when it is first asked for."""
        try:
            data = self.backend.read(IDENTITY)
        except StorageNotFoundError:
            own = secrets.token_hex(16)
            if self.backend.create(IDENTITY, json.dumps({"place": own}).encode()):
                return own
            data = self.backend.read(IDENTITY)
        try:
            identity = json.loads(data)["place"]
            if _IDENTITY.fullmatch(identity):
                return str(identity)
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
            session, self._session = self._session, None
        if session is not None:
            session.close()
        if self._is_owner:
            self.backend.close()


class Cleanup:
    """Deletes checkpoints that retention does not keep, and files that no checkpoint needs."""

    def __init__(
        self,
        store: CheckpointStore,
        retention: Retention,
        spares: Callable[[CatalogEntry], bool] = lambda entry: False,
        on_removed: Callable[[Iterable[str]], None] = lambda ids: None,
        heal: Callable[[], bool] = lambda: True,
    ) -> None:
        """``spares`` says which checkpoints stay whatever retention says.

        ``on_removed`` is called with the ids of deleted checkpoints. ``heal`` is that of the
        committer.
        """
        self._store = store
        self._retention = retention
        self._spares = spares
        self._on_removed = on_removed
        self._heal = heal

    def clean(self, *, for_good: bool = False) -> None:
        """Delete both; a failure is logged, since the next call tries again.

        The files of a deleted checkpoint stay until the next call, for a save under way that
        refers to them; ``for_good`` promises that there is none, and deletes them at once.
        """
        try:
            self.retain()
            self.sweep()
            if for_good:
                self.sweep()
        except StorageError as exc:
            log.warning("checkpoint.not_cleaned", place=self._store.url, reason=str(exc))

    def make_room(self) -> bool:
        """Delete what dead writers and failed saves have left; whether that succeeded."""
        try:
            # Before anything is swept: parts of what was committed must not be taken for leftovers.
            self._heal()
            # Whoever committed the last one may have died before it dropped the one too many.
            self.retain()
            self.sweep()
            self._store.backend.sweep(LEFTOVER_SECONDS)
        except StrataError as exc:
            log.warning("checkpoint.not_cleaned", place=self._store.url, reason=str(exc))
            return False
        return True

    def clean_at_end(self) -> None:
        """Delete all that no checkpoint needs, since no save of this writer follows.

        Not while others write here, who may refer to it, nor where something may be committed
        whose manifest nobody has written yet.
        """
        if not self._store.session.is_alone():
            return
        try:
            is_complete = self._heal()
        except StrataError as exc:
            log.warning("checkpoint.not_cleaned", place=self._store.url, reason=str(exc))
            return
        if is_complete:
            self.clean(for_good=True)

    def retain(self) -> None:
        """Delete checkpoints that retention does not keep."""
        catalog, ids = self._store.catalog, dict[CatalogEntry, str]()

        def spares(entry: CatalogEntry) -> bool:
            # The id of a damaged checkpoint cannot be read.
            with contextlib.suppress(CheckpointDamagedError):
                ids[entry] = catalog.manifest(entry).checkpoint_id
            return self._spares(entry)

        dropped = catalog.retain(self._retention, spares)
        self._on_removed(ids[entry] for entry in dropped if entry in ids)

    def sweep(self) -> None:
        """Delete files that no checkpoint needs, and what dead writers have left."""
        self._store.catalog.sweep(self._store.session.is_dead)
        self._store.session.forget_dead()
