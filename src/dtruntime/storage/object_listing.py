"""Listing a bucket over connections that break."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..telemetry import EventLog
from .object_store.client import BACKOFF

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

log = EventLog("storage")

PAGE = 1000
_BROKE_OFF = "list response body"
"""In messages of obstore about an answer that had begun: it does not repeat such a request."""


class Listing:
    """The objects under a prefix; after an answer that breaks off, from the last name on."""

    def __init__(self, store: ObjectStore, under: str, retry_seconds: float) -> None:
        """``retry_seconds``: for how long answers may break off before anything comes."""
        self._store = store
        self._under = under
        self._retry_seconds = retry_seconds
        self._last = ""
        self._in_order = True

    def pages(self) -> Iterator[Sequence[ObjectMeta]]:
        """Objects by the page, each of them once. Raises obstore's errors."""
        import obstore

        pages, delays, deadline = self._ask(), BACKOFF.delays(), 0.0
        while True:
            try:
                page = next(pages, None)
            except obstore.exceptions.BaseError as exc:
                delay, now = next(delays), time.monotonic()
                deadline = deadline or now + self._retry_seconds
                if now + delay > deadline or not self._can_go_on(exc):
                    raise
                log.info("storage.listing_broke_off", under=self._under, after=self._last)
                time.sleep(delay)
                pages = self._ask()
                continue
            if page is None:
                return
            self._note(page)
            delays, deadline = BACKOFF.delays(), 0.0
            yield page

    def _ask(self) -> Iterator[Sequence[ObjectMeta]]:
        import obstore

        under, offset = self._under or None, self._last or None
        return iter(obstore.list(self._store, under, offset=offset, chunk_size=PAGE))

    def _can_go_on(self, error: Exception) -> bool:
        # Where names do not come in order, what comes after the last one is not the rest.
        return self._in_order and _BROKE_OFF in str(error)

    def _note(self, page: Sequence[ObjectMeta]) -> None:
        for meta in page:
            self._in_order = self._in_order and self._last < meta["path"]
            self._last = meta["path"]
