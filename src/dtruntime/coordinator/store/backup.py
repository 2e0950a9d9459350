"""Backup of the coordinator's state: check, copy and restore."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from ...errors import StorageError
from .integrity import (
    DATABASE,
    MARK,
    Examination,
    HighWaterMark,
    MarkRecord,
    Summary,
    behind,
    examine,
    leave_out_damaged,
    upgrade,
)
from .sqlite import lock_directory, refuse_damaged, refuse_newer, translated

FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", MARK)
"""What makes up the state in a data directory."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking a state."""

    path: Path
    found: Examination
    damages: tuple[str, ...]
    """Everything that keeps a coordinator from starting on it."""


def check(place: Path) -> Checked:
    """Check the state in a data directory, even of a running coordinator, or a copy."""
    if not place.is_dir():
        findings = _examine_file(place)
        return Checked(place, findings, tuple(findings.damages))
    # The mark first: commits that come meanwhile only make the database newer than it.
    damages: list[str] = []
    mark: MarkRecord | None = None
    try:
        mark = HighWaterMark(place).read()
    except ValueError as exc:
        damages.append(str(exc))
    path = place / DATABASE
    if mark is None and not damages and not path.exists():
        raise StorageError(f"there is no coordinator's state in {place}: no {DATABASE}")
    findings = _examine_file(path) if path.exists() else Examination()
    lost = behind(mark, findings)
    return Checked(path, findings, (*findings.damages, *damages, *([lost] if lost else [])))


def back_up(data_dir: Path, copy: Path, replace: bool = False) -> Examination:
    """Copy the state into one file, even while its coordinator runs; the copy is checked."""
    source = data_dir / DATABASE
    if not source.exists():
        raise StorageError(f"there is no coordinator's state in {data_dir}: no {DATABASE}")
    if copy.exists() and not replace:
        raise StorageError(f"{copy} exists: name another file, or replace it with --force")
    with translated(source, "copy"), _partial(copy) as partial:
        findings = _copy(source, partial)
        refuse_newer(source, findings)
        refuse_damaged(source, findings.damages)
        os.replace(partial, copy)
        _sync(copy.parent)
    return findings


def restore(copy: Path, data_dir: Path, force: bool = False, salvage: bool = False) -> Path | None:
    """Restore a copy into a data directory; returns where the previous state was moved.

    The restored state gets another identity, by which workers that registered after the copy was
    made are told apart. With ``salvage`` damaged records are left out, in the quarantine.
    """
    if not copy.exists():
        raise StorageError(f"there is no copy {copy}")
    data_dir.mkdir(parents=True, exist_ok=True)
    target = data_dir / DATABASE
    with translated(target, "restore"), _locked(data_dir), _partial(target) as partial:
        findings = _copy(copy, partial)
        refuse_newer(copy, findings)
        if findings.is_empty:
            raise StorageError(f"{copy} is empty: nothing can be restored from it")
        malformed = any("malformed" in damage for damage in findings.damages)
        if malformed or not salvage:
            refuse_damaged(copy, findings.damages)
        if not force:
            _refuse_to_replace(data_dir, copy, findings)
        summary = _adopt(partial, findings)
        return _put_in_place(partial, data_dir, summary)


def _examine_file(path: Path) -> Examination:
    with translated(path, "read"), closing(_open_for_reading(path)) as db:
        return examine(db)


def _open_for_reading(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)


def _copy(source: Path, target: Path) -> Examination:
    """Copy through SQLite, which sees one commit and the write-ahead log; check what came."""
    with (
        closing(_open_for_reading(source)) as state,
        closing(sqlite3.connect(target, isolation_level=None)) as db,
    ):
        try:
            state.backup(db)
        except sqlite3.DatabaseError as exc:
            if isinstance(exc, sqlite3.OperationalError):
                raise
            refuse_damaged(source, [f"the database is malformed: {exc}"])
        findings = examine(db)
        if not findings.damages:
            db.execute("PRAGMA journal_mode = DELETE")
    _sync(target)
    return findings


def _adopt(path: Path, findings: Examination) -> Summary:
    """Give a copy an identity of its own, and digests if it has none."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        if findings.schema == 1:
            upgrade(db)
        if findings.damages:
            leave_out_damaged(db, examine(db))
        before = examine(db).summary
        assert before is not None
        adopted = Summary.of_new_state((*before.ancestors, before.state_id))
        summary = msgspec.structs.replace(
            before, state_id=adopted.state_id, ancestors=adopted.ancestors
        )
        summary.put(db)
    _sync(path)
    return summary


def _refuse_to_replace(data_dir: Path, copy: Path, findings: Examination) -> None:
    """Refuse to replace a state that the copy does not contain."""
    try:
        mark = HighWaterMark(data_dir).read()
    except ValueError as exc:
        raise _would_replace(data_dir, copy, str(exc)) from None
    path = data_dir / DATABASE
    present = _examine_file(path) if path.exists() else Examination()
    if mark is None and present.is_empty:
        return
    newer = behind(mark, findings)
    if not newer and present.summary is not None:
        summary = present.summary
        newer = behind(MarkRecord(summary.state_id, summary.sequence, summary.sequence), findings)
    if newer or present.summary is None:
        raise _would_replace(data_dir, copy, f"the copy: {newer}" if newer else "it is damaged")


def _would_replace(data_dir: Path, copy: Path, why: str) -> StorageError:
    return StorageError(
        f"{data_dir} has a state that {copy} does not contain ({why}): with --force it is moved "
        "aside and replaced"
    )


def _put_in_place(partial: Path, data_dir: Path, summary: Summary) -> Path | None:
    """Move the old state aside, then the copy in; an interruption never leaves an empty state."""
    present = [data_dir / name for name in FILES if (data_dir / name).exists()]
    aside = data_dir / time.strftime("replaced-%Y%m%d-%H%M%S") if present else None
    if aside is not None:
        aside.mkdir()
        if (data_dir / MARK).exists():
            aside.joinpath(MARK).write_bytes((data_dir / MARK).read_bytes())
    mark = HighWaterMark(data_dir)
    mark.write(summary.state_id, summary.sequence, durable=True)
    mark.close()
    for path in present:
        if aside is not None and path.name != MARK:
            path.rename(aside / path.name)
    os.replace(partial, data_dir / DATABASE)
    _sync(data_dir)
    return aside


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A file beside ``path``, gone afterwards unless it was renamed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
    finally:
        for name in ("", "-wal", "-shm", "-journal"):
            partial.with_name(partial.name + name).unlink(missing_ok=True)


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    lock = lock_directory(data_dir)
    try:
        yield
    finally:
        os.close(lock)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
