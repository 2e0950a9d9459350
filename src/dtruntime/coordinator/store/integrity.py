"""Detection of damage to and loss of the stored state.

- A *digest* of each record and each entry of the journal, over its place and its value: a flipped
  bit or two swapped rows do not match it.
- The *summary*, one row that every commit rewrites: whose state this is, the number of the commit,
  and count and sum of the digests, which a missing or an outdated row does not match.
- The *high-water mark*, a small file beside the database with the number of the last commit: a
  write-ahead log that is gone, or an emptied database, falls behind it.

`examine` compares all of them; the coordinator does so before it serves.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import msgspec
import xxhash

from ..state.records import RECORD_TYPES

SCHEMA_VERSION = 2
DATABASE = "state.db"
MARK = "state.mark"
MARK_BYTES = 512
"""One sector, so that a power failure cannot leave a partial write."""
DIGEST_BITS = 2**63 - 1
ANCESTORS_KEPT = 64
DAMAGES_KEPT = 1000
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TROUBLE_OF_THE_DISK = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
"""SQLite error codes that are about the disk and not about what is stored."""


def _named_queries() -> dict[str, str]:
    text = resources.files(__package__).joinpath("queries.sql").read_text(encoding="utf-8")
    parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


QUERIES = _named_queries()


def create_tables(db: sqlite3.Connection) -> None:
    """Make the tables of `SCHEMA_VERSION`."""
    for name, query in QUERIES.items():
        if name.startswith("create_"):
            db.execute(query)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def record_digest(kind: str, job: str, key: str, value: bytes) -> int:
    """The digest of a record's place and value."""
    place = f"{kind}\0{job}\0{key}\0".encode(errors="surrogatepass")
    return xxhash.xxh3_64_intdigest(place + value) & DIGEST_BITS


def event_digest(id: int, at: float, job: str, kind: str, fields: bytes) -> int:
    """The digest of an entry of the journal."""
    place = f"{id}\0{float(at)!r}\0{job}\0{kind}\0".encode(errors="surrogatepass")
    return xxhash.xxh3_64_intdigest(place + fields) & DIGEST_BITS


class Summary(msgspec.Struct, frozen=True):
    """The state after one commit, the ``sequence``-th."""

    state_id: str
    ancestors: tuple[str, ...] = ()
    """The states whose copies this one was restored from, oldest first."""
    term: int = 0
    """How often a coordinator has started on it."""
    sequence: int = 0
    records: int = 0
    record_sum: int = 0
    events: int = 0
    event_sum: int = 0
    last_event: int = 0

    @classmethod
    def of_new_state(cls, ancestors: tuple[str, ...] = ()) -> Summary:
        """The summary of an empty state."""
        return cls(secrets.token_hex(8), ancestors[-ANCESTORS_KEPT:])

    def counting(self, records: DigestTally, events: DigestTally, last_event: int) -> Summary:
        """The same state with these rows."""
        return msgspec.structs.replace(
            self,
            records=records.count,
            record_sum=records.total,
            events=events.count,
            event_sum=events.total,
            last_event=last_event,
        )

    def put(self, db: sqlite3.Connection) -> None:
        """Write it, in the commit that it summarizes."""
        value = msgspec.json.encode(self)
        db.execute(QUERIES["put_summary"], (value, xxhash.xxh3_64_intdigest(value) & DIGEST_BITS))


class DigestTally:
    """Count and sum of digests, while rows are added and removed."""

    __slots__ = ("count", "total")

    def __init__(self, count: int = 0, total: int = 0) -> None:
        self.count = count
        self.total = total

    def add(self, digest: int) -> None:
        """Count a row in."""
        self.count += 1
        self.total = (self.total + digest) & DIGEST_BITS

    def remove(self, digest: int) -> None:
        """Count a row out."""
        self.count -= 1
        self.total = (self.total - digest) & DIGEST_BITS


class MarkRecord(msgspec.Struct, frozen=True):
    """How far a state had come."""

    state_id: str
    sequence: int
    """Of the newest commit, which cannot be lost while the machine runs."""
    durable: int
    """Of the newest commit that waited for the disk, which survives a power failure."""
    boot: str = ""
    """The boot of the machine in which ``sequence`` was written."""

    def expected(self) -> int:
        """The number of the newest commit that must be there."""
        return self.sequence if self.boot and self.boot == boot_id() else self.durable


def boot_id() -> str:
    """Identifies this boot of the machine; empty where unsupported."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


class HighWaterMark:
    """The file that holds the newest `MarkRecord` of a data directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / MARK
        self._file = -1
        self._boot = boot_id()
        self._durable = 0

    def read(self) -> MarkRecord | None:
        """The mark, none when there is no file; raises `ValueError` when it is damaged."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        line, _, digest = content.rstrip().rpartition(b" ")
        if digest != xxhash.xxh3_64_hexdigest(line).encode():
            raise ValueError(f"{self.path} does not match its digest")
        return msgspec.json.decode(line, type=MarkRecord)

    def write(self, state_id: str, sequence: int, durable: bool) -> None:
        """Note a commit that has been made."""
        if durable:
            self._durable = sequence
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        mark = MarkRecord(state_id, sequence, self._durable, self._boot)
        line = msgspec.json.encode(mark)
        content = b"%b %b" % (line, xxhash.xxh3_64_hexdigest(line).encode())
        os.pwrite(self._file, content.ljust(MARK_BYTES - 1) + b"\n", 0)

    def close(self, sync: bool = True) -> None:
        """Close the file once it is on disk."""
        if self._file >= 0:
            try:
                if sync:
                    os.fsync(self._file)
            finally:
                os.close(self._file)
                self._file = -1


@dataclass(slots=True)
class Examination:
    """What is stored, and what is wrong with it."""

    schema: int = 0
    summary: Summary | None = None
    """None: there is no state, or it is of a version without digests."""
    records: int = 0
    jobs: int = 0
    events: int = 0
    damages: list[str] = field(default_factory=list)
    """What keeps the coordinator from starting: the record and what is wrong with it."""
    damaged_records: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Kind, job, key and problem of those among them that could be left out."""
    journal: list[str] = field(default_factory=list)
    """What is wrong with the journal; it does not keep the coordinator from starting."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.schema == 0 and not self.damages

    def damage(self, problem: str) -> None:
        """Note what is wrong."""
        if len(self.damages) < DAMAGES_KEPT:
            self.damages.append(problem)


@contextmanager
def naming_damage(findings: Examination) -> Iterator[None]:
    """Note what SQLite cannot read; disk errors are raised."""
    try:
        yield
    except sqlite3.Error as exc:
        if getattr(exc, "sqlite_errorcode", 0) & 0xFF in TROUBLE_OF_THE_DISK:
            raise
        findings.damage(f"the database is malformed: {exc}")
    except (UnicodeDecodeError, OverflowError) as exc:
        findings.damage(f"the database is malformed: {exc}")


def examine(db: sqlite3.Connection) -> Examination:
    """Check everything that is stored; damage is reported, not raised."""
    findings = Examination()
    with naming_damage(findings):
        findings.schema = int(db.execute("PRAGMA user_version").fetchone()[0])
        tables = _tables(db)
        if not tables and not findings.schema:
            return findings
        for (line,) in db.execute("PRAGMA quick_check(20)"):
            if line != "ok":
                findings.damage(f"the database is malformed: {line}")
        if findings.schema > SCHEMA_VERSION or findings.damages:
            return findings
        if findings.schema == 1 and "summary" not in tables:
            _examine_schema_1(db, findings)
        elif findings.schema != SCHEMA_VERSION or tables != _expected_tables():
            findings.damage("the database is malformed: its tables are not those of this schema")
        else:
            _examine_summary(db, findings)
            _examine_records(db, findings)
            _examine_journal(db, findings)
    return findings


def behind(mark: MarkRecord | None, findings: Examination) -> str:
    """What the high-water mark says is missing; empty when nothing is."""
    summary = findings.summary
    if mark is None or (findings.damages and summary is None):
        return ""
    if findings.is_empty:
        return f"it is empty, after {mark.expected()} commits"
    if summary is None or summary.state_id != mark.state_id:
        return f"it is not the state that this directory had ({mark.state_id})"
    missing = mark.expected() - summary.sequence
    if missing <= 0:
        return ""
    return (
        f"its last {missing} commits are missing (found {summary.sequence} of {mark.expected()}): "
        f"the write-ahead log {DATABASE}-wal was lost or damaged, or an older copy was put there"
    )


def _tables(db: sqlite3.Connection) -> dict[str, str]:
    """The definition of each table; SQLite quotes the name of a renamed one."""
    rows = db.execute(QUERIES["tables"]).fetchall()
    return {name: str(sql).replace('"', "") for name, sql in rows}


def _expected_tables() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:")) as db:
        create_tables(db)
        return _tables(db)


def _examine_summary(db: sqlite3.Connection, findings: Examination) -> None:
    rows = db.execute(QUERIES["all_summaries"]).fetchall()
    try:
        ((value, digest),) = rows
        if xxhash.xxh3_64_intdigest(value) & DIGEST_BITS != digest:
            raise ValueError("it does not match its digest")
        findings.summary = msgspec.json.decode(value, type=Summary)
    except (ValueError, TypeError) as exc:
        findings.damage(f"the summary of the state: {exc}")


def _examine_records(db: sqlite3.Connection, findings: Examination) -> None:
    tally = DigestTally()
    jobs: set[str] = set()
    for kind, job, key, value, digest in db.execute(QUERIES["all_records"]):
        problem = record_problem(kind, job, key, value, digest)
        tally.add(digest if isinstance(digest, int) else 0)
        jobs.add(job)
        if problem:
            _damaged_record(findings, kind, job, key, problem)
    findings.records, findings.jobs = tally.count, len(jobs)
    summary = findings.summary
    if summary is None or (summary.records, summary.record_sum) == (tally.count, tally.total):
        return
    findings.damage(
        f"records are missing or outdated: {tally.count} are there, and {summary.records} with "
        f"other digests were in commit {summary.sequence}"
    )


def record_problem(kind: str, job: str, key: str, value: bytes, digest: int) -> str:
    """What is wrong with a record; empty when nothing is."""
    try:
        if record_digest(kind, job, key, value) != digest:
            return "it does not match its digest"
        msgspec.json.decode(value, type=RECORD_TYPES[kind])
    except (ValueError, TypeError) as exc:
        return str(exc)
    except KeyError:
        return "this version of Strata does not know records of this kind"
    return ""


def _damaged_record(findings: Examination, kind: str, job: str, key: str, problem: str) -> None:
    findings.damage(f"{kind} {job}/{key}: {problem}")
    findings.damaged_records.append((kind, job, key, problem))


def _examine_journal(db: sqlite3.Connection, findings: Examination) -> None:
    tally = DigestTally()
    for id, at, job, kind, fields, digest in db.execute(QUERIES["all_events"]):
        tally.add(digest if isinstance(digest, int) else 0)
        if event_problem(id, at, job, kind, fields, digest):
            findings.journal.append(f"entry {id} does not match its digest")
    findings.events = tally.count
    summary = findings.summary
    if summary is not None and (summary.events, summary.event_sum) != (tally.count, tally.total):
        findings.journal.append(
            f"entries are missing or outdated: {tally.count} of {summary.events} are there"
        )


def event_problem(id: int, at: float, job: str, kind: str, fields: bytes, digest: int) -> bool:
    """Whether an entry of the journal is damaged."""
    try:
        return event_digest(id, at, job, kind, fields) != digest
    except (TypeError, ValueError):
        return True


def _examine_schema_1(db: sqlite3.Connection, findings: Examination) -> None:
    """Check a state without digests: only whether each record can be decoded."""
    jobs = set()
    for kind, job, key, value in db.execute("SELECT kind, job, key, value FROM records"):
        findings.records += 1
        jobs.add(job)
        digest = record_digest(str(kind), str(job), str(key), bytes(value))
        problem = record_problem(kind, job, key, value, digest)
        if problem:
            _damaged_record(findings, kind, job, key, problem)
    findings.jobs = len(jobs)
    findings.events = int(db.execute("SELECT count(*) FROM journal").fetchone()[0])


def upgrade(db: sqlite3.Connection) -> None:
    """Add digests to an intact state of schema 1, in a transaction of its own."""
    db.execute("BEGIN IMMEDIATE")
    try:
        for (name,) in db.execute(QUERIES["schema_1_tables"]).fetchall():
            db.execute(f"ALTER TABLE {name} RENAME TO schema_1_{name}")
        create_tables(db)
        records, events, last_event = DigestTally(), DigestTally(), 0
        for row in db.execute(QUERIES["schema_1_records"]).fetchall():
            digest = record_digest(*row)
            db.execute(QUERIES["put_record"], (*row, digest))
            records.add(digest)
        for row in db.execute(QUERIES["schema_1_events"]).fetchall():
            digest = event_digest(*row)
            db.execute(QUERIES["add_event"], (*row, digest))
            events.add(digest)
            last_event = row[0]
        db.execute(QUERIES["schema_1_quarantine"])
        term = db.execute(QUERIES["schema_1_term"]).fetchone()
        for name in ("records", "journal", "quarantine", "meta"):
            db.execute(f"DROP TABLE schema_1_{name}")
        summary = Summary.of_new_state().counting(records, events, last_event)
        msgspec.structs.replace(summary, term=int(term[0]) if term else 0).put(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def leave_out_damaged(db: sqlite3.Connection, findings: Examination) -> None:
    """Move damaged records to the quarantine and update the summary."""
    for kind, job, key, problem in findings.damaged_records:
        row = db.execute(QUERIES["one_record"], (kind, job, key)).fetchone()
        value = row[0] if row else b""
        db.execute(QUERIES["quarantine_record"], (kind, job, key, value, problem))
        db.execute(QUERIES["delete_record"], (kind, job, key)).fetchall()
    records, events, last_event = DigestTally(), DigestTally(), 0
    for *_, digest in db.execute(QUERIES["all_records"]):
        records.add(digest)
    for row in db.execute(QUERIES["all_events"]).fetchall():
        if event_problem(*row):
            db.execute(QUERIES["delete_event"], row[:1])
        else:
            events.add(row[-1])
            last_event = row[0]
    summary = findings.summary or Summary.of_new_state()
    summary.counting(records, events, last_event).put(db)
