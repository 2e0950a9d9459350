"""A place with checkpoints, opened when it is first used."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from typing import Any

from ...errors import StorageError, StorageNotFoundError
from ...storage import StorageBackend, open_backend
from ..file_format.manifest import IDENTITY
from .catalog import Catalog
from .writer_lock import WriterLock

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
