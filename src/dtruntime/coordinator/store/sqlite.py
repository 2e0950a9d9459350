"""The coordinator's durable state in one SQLite file.

Writes are committed in groups: while one commit waits for the disk, the next one
collects, so a thousand registrations a second cost a few hundred disk flushes. A commit
that only has to outlive the process (`CRASH_SAFE_KINDS`) does not wait for the disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import msgspec

from ...errors import StorageError
from ...telemetry import EventLog
from ..state.journal import JOURNAL_LENGTH
from ..state.records import (
    CRASH_SAFE_KINDS,
    READ_ON_DEMAND,
    RECORD_TYPES,
    Delete,
    Effect,
    Emit,
    Event,
    Put,
    Record,
)

log = EventLog("coordinator")

SCHEMA_VERSION = 1
WAL_PAGES = 2000

Row = tuple[str, str, str, Record]


def _named_queries() -> dict[str, str]:
    text = resources.files(__package__).joinpath("queries.sql").read_text(encoding="utf-8")
    parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


QUERIES = _named_queries()


def _fields(text: bytes) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError:
        return {}


@contextmanager
def _translated(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except (sqlite3.Error, OSError) as exc:
        raise StorageError(
            f"cannot {doing} the coordinator's state {path}: {exc}. Check free space and "
            "permissions of the data directory; the coordinator stops rather than forget"
        ) from exc


class SqliteStore:
    """Records and journal of one coordinator; used from one event loop."""

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        """Open or create the state in ``data_dir`` and lock it against a second coordinator."""
        self.path = Path(data_dir) / "state.db"
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="strata-store")
        self._queue: list[Effect] = []
        self._lazy: list[Effect] = []
        self._next: asyncio.Future[None] | None = None
        self._current: asyncio.Future[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._commit_began: float | None = None
        self._fsync_on = True
        self.failure: StorageError | None = None
        with _translated(self.path, "open"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            try:
                self._db = sqlite3.connect(
                    self.path, isolation_level=None, check_same_thread=False, cached_statements=32
                )
                self._prepare()
                self.term = int(self._db.execute(QUERIES["next_term"]).fetchone()[0])
            except BaseException:
                os.close(self._lock)
                raise

    def _take_lock(self) -> int:
        path = self.path.parent / "coordinator.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 64).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise StorageError(
                f"data directory {path.parent} is in use by another coordinator (process "
                f"{holder}): stop it, or give this one its own --data-dir"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock

    def _prepare(self) -> None:
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if found > SCHEMA_VERSION:
            raise StorageError(
                f"{self.path} was written by a newer Strata (schema {found}, this one knows "
                f"{SCHEMA_VERSION}): upgrade this coordinator, or use another --data-dir"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        for name, query in QUERIES.items():
            if name.startswith("create_"):
                self._db.execute(query)
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    # Reading, before serving

    def load(self) -> tuple[list[Row], list[str]]:
        """All records but those read on demand, and a line for each that was set aside.

        One unreadable record must not keep the coordinator from starting: it is quarantined.
        """
        rows: list[Row] = []
        problems: list[str] = []
        with _translated(self.path, "read"):
            found = self._db.execute(QUERIES["all_records"], (READ_ON_DEMAND,)).fetchall()
            for kind, job, key, value in found:
                try:
                    rows.append(
                        (kind, job, key, msgspec.json.decode(value, type=RECORD_TYPES[kind]))
                    )
                except (msgspec.DecodeError, KeyError) as exc:
                    problems.append(f"{kind} {job}/{key}: {exc}")
                    self._db.execute(
                        QUERIES["quarantine_record"], (kind, job, key, value, str(exc))
                    )
                    self._db.execute(QUERIES["delete_record"], (kind, job, key))
        return rows, problems

    def events(self) -> list[Event]:
        """The journal, oldest first; fields that cannot be read are left out."""
        with _translated(self.path, "read"):
            rows = self._db.execute(QUERIES["all_events"]).fetchall()
        return [Event(id, at, job, kind, _fields(text)) for id, at, job, kind, text in rows]

    async def read(self, kind: str, job: str, key: str) -> Record | None:
        """One record as it is stored; none when it is absent or unreadable."""
        await self.flush()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._read, kind, job, key)

    def _read(self, kind: str, job: str, key: str) -> Record | None:
        with _translated(self.path, "read"):
            row = self._db.execute(QUERIES["one_record"], (kind, job, key)).fetchone()
        try:
            return msgspec.json.decode(row[0], type=RECORD_TYPES[kind]) if row else None
        except msgspec.DecodeError as exc:
            log.error("state.record_unreadable", record=f"{kind} {job}/{key}", reason=str(exc))
            return None

    # Writing

    @property
    def dirty(self) -> bool:
        """Whether something submitted is not stored (yet); replies wait until it is."""
        return self._current is not None or self.failure is not None

    @property
    def waiting_seconds(self) -> float:
        """How long the commit that is under way has been waiting for the disk."""
        return 0.0 if self._commit_began is None else time.monotonic() - self._commit_began

    def submit(self, effects: Sequence[Effect]) -> None:
        """Store records; events alone may be stored later."""
        urgent = needs_disk = False
        for effect in effects:
            if isinstance(effect, Put | Delete):
                urgent = True
                needs_disk = needs_disk or effect.kind not in CRASH_SAFE_KINDS
        if not urgent:
            self._lazy.extend(effects)
        elif needs_disk or self._current is not None:
            self._enqueue(effects)
        else:
            self._commit_now(effects)

    async def flush(self) -> None:
        """Wait until everything submitted so far is stored; raises `StorageError`."""
        waiting = self._next or self._current
        if waiting is not None:
            await asyncio.shield(waiting)
        if self.failure is not None:
            raise self.failure

    def flush_events(self) -> None:
        """Store events that nothing waited for, and keep the log of writes small.

        Events alone do not wait for the disk, so no reply has to wait for them.
        """
        if self.failure is not None or self._current is not None:
            return
        if self._log_is_long():
            self._enqueue(())
        elif self._lazy:
            self._commit_now(())

    async def close(self) -> None:
        """Store what is left and unlock the data directory."""
        try:
            await self.flush()
            self.flush_events()
            await self.flush()
        finally:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._db.close)
            self._executor.shutdown()
            os.close(self._lock)

    def _enqueue(self, effects: Sequence[Effect]) -> None:
        self._queue.extend(effects)
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
        if self._current is None:
            self._current = self._next
            self._drain_task = loop.create_task(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while self._next is not None:
            done, self._next = self._next, None
            self._current = done
            batch, self._queue = [*self._lazy, *self._queue], []
            self._lazy = []
            self._commit_began = time.monotonic()
            try:
                await loop.run_in_executor(self._executor, self._commit, batch, True)
            except Exception as exc:
                self._fail(exc)
            self._commit_began = None
            done.set_result(None)
        self._current = None

    def _commit_now(self, effects: Sequence[Effect]) -> None:
        batch = [*self._lazy, *effects]
        self._lazy = []
        try:
            self._commit(batch, fsync=False)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        """Whatever went wrong: those who wait must hear of it."""
        if not isinstance(error, StorageError):
            text = f"cannot write the coordinator's state {self.path}: {error!r}"
            error = StorageError(text).with_traceback(error.__traceback__)
        self.failure = self.failure or error

    def _commit(self, batch: Sequence[Effect], fsync: bool) -> None:
        if self.failure is not None:
            return  # What follows a lost write may depend on it.
        with _translated(self.path, "write"):
            if fsync != self._fsync_on:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
                self._fsync_on = fsync
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._write_rows(batch)
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has ended the transaction by itself where the disk is full.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            if fsync:
                self._shrink_log()

    def _write_rows(self, batch: Sequence[Effect]) -> None:
        last_event = 0
        encode = msgspec.json.encode
        for effect in batch:
            if isinstance(effect, Put):
                row = effect.kind, effect.job, effect.key, encode(effect.record)
                self._db.execute(QUERIES["put_record"], row)
            elif isinstance(effect, Delete):
                self._db.execute(QUERIES["delete_record"], (effect.kind, effect.job, effect.key))
            elif isinstance(effect, Emit):
                event = effect.event
                last_event = event.id
                row_event = event.id, event.at, event.job, event.kind, encode(event.fields)
                self._db.execute(QUERIES["add_event"], row_event)
        if last_event > JOURNAL_LENGTH:
            self._db.execute(QUERIES["trim_journal"], (last_event - JOURNAL_LENGTH,))

    def _shrink_log(self) -> None:
        if self._log_is_long():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _log_is_long(self) -> bool:
        log = self.path.with_name(self.path.name + "-wal")
        return log.exists() and log.stat().st_size > WAL_PAGES * 4096
