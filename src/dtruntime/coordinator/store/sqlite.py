"""The coordinator's durable state in one SQLite file.

Writes are committed in groups: while one commit waits for the disk, the next one
collects, so a thousand registrations a second cost a few hundred disk flushes. A commit
that only has to outlive the process (`CRASH_SAFE_KINDS`) does not wait for the disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec

from ...errors import StorageError
from ...telemetry import EventLog
from ..state.effects import Delete, DeleteJob, Effect, Emit, Put
from ..state.records import CRASH_SAFE_KINDS, READ_ON_DEMAND, RECORD_TYPES, Event, Record
from .integrity import (
    DATABASE,
    QUERIES,
    SCHEMA_VERSION,
    DigestTally,
    Examination,
    HighWaterMark,
    MarkRecord,
    Summary,
    behind,
    create_tables,
    event_digest,
    event_problem,
    examine,
    record_digest,
    record_problem,
    upgrade,
)

log = EventLog("coordinator")

WAL_PAGES = 2000
DAMAGES_SHOWN = 5
EVENT_DAMAGED = "journal.entry_damaged"
"""The kind that an entry of the journal has when it cannot be read."""

NO_MARK = "commits that were lost cannot be seen; it is written anew"

Row = tuple[str, str, str, Record]


@contextmanager
def translated(path: Path, doing: str) -> Iterator[None]:
    """Translate errors of SQLite and the system to `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except (sqlite3.Error, OSError, UnicodeDecodeError) as exc:
        raise StorageError(
            f"cannot {doing} the coordinator's state {path}: {exc}. Check free space and "
            "permissions of the data directory; the coordinator stops rather than forget"
        ) from exc


def lock_directory(folder: Path) -> int:
    """Lock a data directory against coordinators; it is unlocked by closing what is returned."""
    path = folder / "coordinator.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 64).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise StorageError(
            f"data directory {folder} is in use by another coordinator (process "
            f"{holder}): stop it, or give this one its own --data-dir"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def refuse_newer(path: Path, findings: Examination) -> None:
    """Raise when a newer Strata wrote the state."""
    if findings.schema > SCHEMA_VERSION and not findings.damages:
        raise StorageError(
            f"{path} was written by a newer Strata (schema {findings.schema}, this one knows "
            f"{SCHEMA_VERSION}): upgrade this coordinator, or use another --data-dir"
        )


def refuse_damaged(path: Path, damages: Sequence[str]) -> None:
    """Raise if there is damage, naming it and the remedy."""
    if not damages:
        return
    shown = "; ".join(damages[:DAMAGES_SHOWN])
    more = len(damages) - DAMAGES_SHOWN
    folder = path.parent
    where = f"--data-dir {folder}" if path.name == DATABASE else path
    raise StorageError(
        f"the coordinator's state {path} is damaged: {shown}{f'; and {more} more' * (more > 0)}. "
        f"Nothing was changed. 'strata state check {where}' lists everything; 'strata state "
        f"restore COPY --data-dir {folder}' brings a backup back, and 'strata state restore "
        f"--salvage --data-dir {folder}' goes on with what is intact"
    )


class SqliteStore:
    """Records and journal of one coordinator; used from one event loop."""

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        """Open or create the state in ``data_dir`` and lock it against a second coordinator."""
        self.path = Path(data_dir) / DATABASE
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="strata-store")
        self._queue: list[Effect] = []
        self._lazy: list[Effect] = []
        self._next: asyncio.Future[None] | None = None
        self._current: asyncio.Future[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._commit_began: float | None = None
        self._fsync_on = True
        self.failure: StorageError | None = None
        with translated(self.path, "open"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.path.parent)
            self._mark = HighWaterMark(self.path.parent)
            with ExitStack() as unless_opened:
                unless_opened.callback(os.close, self._lock)
                unless_opened.callback(self._mark.close, sync=False)
                self._db = unless_opened.enter_context(closing(self._connect()))
                self._summary = self._prepare()
                unless_opened.pop_all()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, cached_statements=32
        )

    @property
    def state_id(self) -> str:
        """Identifies this state; a restored copy gets a new id."""
        return self._summary.state_id

    @property
    def ancestors(self) -> tuple[str, ...]:
        """The states that this one was restored from."""
        return self._summary.ancestors

    @property
    def term(self) -> int:
        """How often a coordinator has started on this state."""
        return self._summary.term

    def _prepare(self) -> Summary:
        """Check what is stored, and begin a term."""
        mark, mark_is_lost = self._read_mark()
        findings = examine(self._db)
        refuse_newer(self.path, findings)
        lost = behind(mark, findings)
        if findings.is_empty and mark_is_lost and self._mark.path.exists():
            lost = f"it is empty, and {self._mark.path.name} beside it shows that it was not"
        refuse_damaged(self.path, [*findings.damages, *([lost] if lost else [])])
        if findings.journal:
            shown = "; ".join(findings.journal[:DAMAGES_SHOWN])
            log.error(
                "state.journal_damaged",
                path=str(self.path),
                problems=len(findings.journal),
                first=shown,
            )
        if mark_is_lost and findings.summary is not None:
            log.warning("state.mark_missing", path=str(self._mark.path), remedy=NO_MARK)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        return self._begin_term(findings)

    def _read_mark(self) -> tuple[MarkRecord | None, bool]:
        try:
            mark = self._mark.read()
        except ValueError as exc:
            log.error("state.mark_damaged", problem=str(exc), remedy=NO_MARK)
            return None, True
        return mark, mark is None

    def _begin_term(self, findings: Examination) -> Summary:
        if findings.is_empty:
            self._db.execute("BEGIN IMMEDIATE")
            create_tables(self._db)
            Summary.of_new_state().put(self._db)
            self._db.execute("COMMIT")
        elif findings.summary is None:
            upgrade(self._db)
            log.info("state.upgraded", path=str(self.path), schema=SCHEMA_VERSION)
        before = findings.summary or examine(self._db).summary
        assert before is not None
        summary = msgspec.structs.replace(
            before, term=before.term + 1, sequence=before.sequence + 1
        )
        summary.put(self._db)
        self._mark.write(summary.state_id, summary.sequence, durable=True)
        return summary

    # Reading, before serving

    def load(self) -> list[Row]:
        """All records but those read on demand; raises `StorageError` for what is damaged."""
        rows: list[Row] = []
        damages: list[str] = []
        with translated(self.path, "read"):
            for kind, job, key, value, digest in self._db.execute(
                QUERIES["records_of_other_kinds"], (READ_ON_DEMAND,)
            ):
                problem = record_problem(kind, job, key, value, digest)
                if problem:
                    damages.append(f"{kind} {job}/{key}: {problem}")
                else:
                    record = msgspec.json.decode(value, type=RECORD_TYPES[kind])
                    rows.append((kind, job, key, record))
        refuse_damaged(self.path, damages)
        return rows

    def events(self) -> list[Event]:
        """The journal, oldest first; of a damaged entry only the number."""
        events: list[Event] = []
        last_at = 0.0
        with translated(self.path, "read"):
            rows = self._db.execute(QUERIES["all_events"]).fetchall()
        for id, at, job, kind, fields, digest in rows:
            if not event_problem(id, at, job, kind, fields, digest):
                last_at = at
                known = msgspec.json.decode(fields, type=dict[str, str])
                events.append(Event(id, at, job, kind, known))
            elif 0 < id <= self._summary.last_event:
                events.append(Event(id, last_at, "", EVENT_DAMAGED, {}))
        return events

    async def read(self, kind: str, job: str, key: str) -> Record | None:
        """One stored record; None if it is absent or unreadable."""
        await self.flush()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._read, kind, job, key)

    def _read(self, kind: str, job: str, key: str) -> Record | None:
        with translated(self.path, "read"):
            row = self._db.execute(QUERIES["one_record"], (kind, job, key)).fetchone()
        if row is None:
            return None
        problem = record_problem(kind, job, key, *row)
        if problem:
            log.error("state.record_damaged", record=f"{kind} {job}/{key}", problem=problem)
            return None
        return msgspec.json.decode(row[0], type=RECORD_TYPES[kind])

    # Writing

    @property
    def dirty(self) -> bool:
        """Whether something submitted is not stored (yet); replies wait until it is."""
        return self._current is not None or self.failure is not None

    @property
    def waiting_seconds(self) -> float:
        """How long the current commit has been waiting for the disk."""
        return 0.0 if self._commit_began is None else time.monotonic() - self._commit_began

    def submit(self, effects: Sequence[Effect]) -> None:
        """Store records; events alone may be stored later."""
        urgent = needs_disk = False
        for effect in effects:
            if isinstance(effect, DeleteJob):
                urgent = needs_disk = True
            elif isinstance(effect, Put | Delete):
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
        """Store pending events, and keep the write-ahead log small.

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
            self._mark.close()
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
        """Note a failure, so that everybody who waits gets it."""
        if not isinstance(error, StorageError):
            text = f"cannot write the coordinator's state {self.path}: {error!r}"
            error = StorageError(text).with_traceback(error.__traceback__)
        self.failure = self.failure or error

    def _commit(self, batch: Sequence[Effect], fsync: bool) -> None:
        if self.failure is not None:
            return  # What follows a lost write may depend on it.
        with translated(self.path, "write"):
            if fsync != self._fsync_on:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
                self._fsync_on = fsync
            self._db.execute("BEGIN IMMEDIATE")
            try:
                summary = self._write_rows(batch)
                summary.put(self._db)
                self._db.execute("COMMIT")
            except BaseException:
                # When the disk is full, SQLite has rolled back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._summary = summary
            self._mark.write(summary.state_id, summary.sequence, durable=fsync)
            if fsync and self._log_is_long():
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _write_rows(self, batch: Sequence[Effect]) -> Summary:
        """Write the changes; returns the new summary."""
        before = self._summary
        records = DigestTally(before.records, before.record_sum)
        events = DigestTally(before.events, before.event_sum)
        last_event, forgotten, removed = before.last_event, list[int](), list[str]()
        # Within one commit only the last change of a record counts.
        changes: dict[tuple[str, str, str], Put | Delete] = {}
        for effect in batch:
            if isinstance(effect, Put | Delete):
                changes[effect.kind, effect.job, effect.key] = effect
            elif isinstance(effect, DeleteJob):
                removed.append(effect.job)
                changes = {place: one for place, one in changes.items() if one.job != effect.job}
            elif isinstance(effect, Emit):
                last_event = effect.event.id
                self._append(effect.event, events)
                forgotten += effect.forgotten
        for job in removed:
            for kind in RECORD_TYPES:
                self._delete(QUERIES["delete_job"], (kind, job), records)
        for number in forgotten:
            self._delete(QUERIES["forget_event"], (number,), events)
        for place, change in changes.items():
            if isinstance(change, Put):
                self._put(place, change.record, records)
            else:
                self._delete(QUERIES["delete_record"], place, records)
        summary = before.counting(records, events, last_event)
        return msgspec.structs.replace(summary, sequence=before.sequence + 1)

    def _put(self, place: tuple[str, str, str], record: Record, tally: DigestTally) -> None:
        value = msgspec.json.encode(record)
        digest = record_digest(*place, value)
        before = self._db.execute(QUERIES["digest_of_record"], place).fetchone()
        if before is not None:
            tally.remove(before[0])
        tally.add(digest)
        self._db.execute(QUERIES["put_record"], (*place, value, digest))

    def _append(self, event: Event, tally: DigestTally) -> None:
        row = event.id, event.at, event.job, event.kind, msgspec.json.encode(event.fields)
        digest = event_digest(*row)
        tally.add(digest)
        self._db.execute(QUERIES["add_event"], (*row, digest))

    def _delete(self, query: str, which: tuple[object, ...], tally: DigestTally) -> None:
        for (digest,) in self._db.execute(query, which).fetchall():
            tally.remove(digest)

    def _log_is_long(self) -> bool:
        log = self.path.with_name(self.path.name + "-wal")
        return log.exists() and log.stat().st_size > WAL_PAGES * 4096
