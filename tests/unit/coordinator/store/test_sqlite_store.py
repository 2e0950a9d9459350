"""The coordinator's state on disk: what is stored when, and what survives."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from dtruntime.coordinator.state.effects import Delete, DeleteJob, Emit, Put
from dtruntime.coordinator.state.records import (
    READ_ON_DEMAND,
    RECORD_TYPES,
    ActionRecord,
    AskRecord,
    AttemptRecord,
    CheckpointRecord,
    CoverageRecord,
    DatasetRecord,
    EpochRecord,
    Event,
    IndexRecord,
    JobRecord,
    LayoutRecord,
    PartRecord,
    PendingRecord,
    ReaderRecord,
    Record,
    RemovedRecord,
    RoundRecord,
    SegmentRecord,
    ShareRecord,
    TakenBack,
    WorkerRecord,
)
from dtruntime.coordinator.store.integrity import SCHEMA_VERSION, examine, record_digest
from dtruntime.coordinator.store.sqlite import WAL_PAGES, SqliteStore
from dtruntime.errors import StorageError

RECORDS: dict[str, Record] = {
    "job": JobRecord(world_size=4, generation=7, loss_generation=5, next_incarnation=9),
    "worker": WorkerRecord(
        worker_id="worker-0",
        rank=0,
        incarnation=1,
        session="s",
        membership="live",
        registered_at=1.5,
        metadata={"k": "v"},
    ),
    "dataset": DatasetRecord(
        dataset_id="d",
        path="/p",
        format="csv",
        total_samples=2**63 - 1,
        shard_size=2**32 - 1,
        shuffle=True,
        seed=2**64 - 1,
        exact=True,
        layout=LayoutRecord(
            fingerprint="f",
            shard_count=2,
            shard_samples=b"\x01\xff",
            shard_bytes=bytes(4),
            root="/p/",
            files=("a.csv",),
            file_samples=bytes(8),
            total_bytes=2**63 - 1,
            columns=("x: int64",),
            options="{}",
        ),
    ),
    "index": IndexRecord(bytes(range(256))),
    "checkpoint": CheckpointRecord(
        checkpoint_id="c",
        step=2**63 - 1,
        epoch=1,
        path="/c",
        size_bytes=10,
        is_full=True,
        worker_id="worker-0",
        committed_at=2.5,
    ),
    "part": PartRecord(
        checkpoint_id="c",
        incarnation=1,
        rank=0,
        step=1,
        epoch=0,
        path="/c",
        size_bytes=1,
        is_full=True,
    ),
    "pending": PendingRecord(checkpoint_id="c", step=1, expected={1: 0, 2: 1}),
    "round": RoundRecord(
        barrier_id="b",
        round=3,
        generation=2,
        participants=2,
        tickets={1: 2**64 - 1, 2: 4},
        values={0: bytes(range(256)), 1: b""},
    ),
    "action": ActionRecord(
        action_id="action-000001",
        number=1,
        kind="drain",
        requested_at=1.5,
        worker_id="worker-1",
        incarnation=2,
        reason="maintenance",
    ),
    "epoch": EpochRecord(
        dataset_id="d", epoch=2**63 - 1, plan="p", samples=9, sequence=1, digest=bytes(range(256))
    ),
    "segment": SegmentRecord(
        dataset_id="d",
        epoch=0,
        ledger=1,
        number=2,
        slot_count=3,
        dead=(1,),
        weights=(100, 1, 50),
        taken=(2**63 - 1, 0, 1),
        taken_back=(TakenBack(1, 2, 3, 4),),
    ),
    "reader": ReaderRecord(
        dataset_id="d",
        epoch=0,
        ledger=1,
        incarnation=2**63 - 1,
        slot=2,
        segment=1,
        claim=4,
        length=5,
        committed_segment=1,
        digest=bytes(512),
        busy=0.25,
        active_at=1.5,
    ),
    "coverage": CoverageRecord(
        dataset_id="d", epoch=0, sequence=1, base=bytes(512), world_size=4, expected=2**63 - 1
    ),
    "share": ShareRecord(dataset_id="d", epoch=0, slot=3, incarnation=2, digest=b"\xff" * 512),
    "attempt": AttemptRecord(
        checkpoint_id="step-000000000007-000001",
        step=7,
        number=1,
        generation=3,
        ranks=(0, 1, 2**31),
        ended="w-1 was lost",
    ),
    "ask": AskRecord(checkpoint_id="step-000000000007-000001", incarnation=2**63 - 1, ticket=1),
    "removed": RemovedRecord(next_incarnation=7, attempts_begun=3, actions_requested=2),
}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path)
    yield store
    await store.close()


def rows_of(folder: Path) -> dict[str, bytes]:
    """What another process would find on disk at this moment."""
    db = sqlite3.connect(f"file:{folder}/state.db?mode=ro", uri=True)
    try:
        return dict(db.execute("SELECT kind || '/' || key, value FROM records").fetchall())
    finally:
        db.close()


def put(kind: str, key: str = "k", record: Record | None = None) -> Put:
    return Put(kind, "job", key, record or RECORDS[kind])


def test_example_of_every_kind_of_record() -> None:
    assert RECORDS.keys() == RECORD_TYPES.keys()


@pytest.mark.parametrize("kind", RECORDS)
async def test_record_is_on_disk_after_a_flush_and_comes_back(tmp_path: Path, kind: str) -> None:
    first = SqliteStore(tmp_path)
    first.submit([put(kind)])
    await first.flush()
    assert f"{kind}/k" in rows_of(tmp_path)
    await first.close()
    second = SqliteStore(tmp_path)
    rows = second.load()
    assert await second.read(kind, "job", "k") == RECORDS[kind]
    assert await second.read(kind, "job", "other") is None
    await second.close()
    assert rows == ([] if kind == READ_ON_DEMAND else [(kind, "job", "k", RECORDS[kind])])


async def test_record_read_on_demand_is_there_before_it_is_on_disk(store: SqliteStore) -> None:
    store.submit([put("checkpoint")])
    store.submit([put("index")])
    assert await store.read("index", "job", "k") == RECORDS["index"]


async def test_unreadable_record_is_absent_when_asked_for(store: SqliteStore) -> None:
    store.submit([put("index")])
    await store.flush()
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE records SET value = '{' WHERE kind = 'index'")
    db.close()
    assert await store.read("index", "job", "k") is None


async def test_store_is_dirty_until_what_needs_the_disk_is_there(store: SqliteStore) -> None:
    assert not store.dirty
    store.submit([put("checkpoint")])
    assert store.dirty
    await store.flush()
    assert "checkpoint/k" in rows_of(store.path.parent)


async def test_what_must_only_outlive_the_process_is_written_at_once(store: SqliteStore) -> None:
    store.submit([put("round")])
    assert not store.dirty
    assert "round/k" in rows_of(store.path.parent)


async def test_round_submitted_behind_a_commit_is_written_in_order(store: SqliteStore) -> None:
    old, new = (
        RoundRecord(barrier_id="b", round=n, generation=1, participants=1, tickets={})
        for n in (1, 2)
    )
    store.submit([put("checkpoint"), put("round", "b", old)])
    store.submit([put("round", "b", new)])
    await store.flush()
    rows = {key: record for _, _, key, record in store.load()}
    assert rows["b"] == new


async def test_newest_record_wins_and_deleted_ones_are_gone(store: SqliteStore) -> None:
    for generation in range(50):
        record = JobRecord(
            world_size=0, generation=generation, loss_generation=0, next_incarnation=1
        )
        store.submit([put("job", "", record), put("worker", str(generation))])
        if generation:
            store.submit([Delete("worker", "job", str(generation - 1))])
    await store.flush()
    rows = store.load()
    by_kind = {kind: (key, record) for kind, _, key, record in rows}
    assert len(rows) == 2
    assert by_kind["worker"][0] == "49"
    assert by_kind["job"][1].generation == 49  # type: ignore[attr-defined]


async def test_event_that_came_during_a_commit_is_stored_by_a_clean_stop(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.submit([put("checkpoint")])
    await asyncio.sleep(0)  # the commit has taken what it stores
    store.submit([Emit(Event(1, 1.0, "job", "worker.registered", {}))])
    await store.close()
    reopened = SqliteStore(tmp_path)
    assert [event.id for event in reopened.events()] == [1]
    await reopened.close()


async def test_many_flushes_at_once_share_a_commit(store: SqliteStore) -> None:
    async def commit(number: int) -> None:
        store.submit([put("checkpoint", str(number))])
        await store.flush()

    await asyncio.gather(*[commit(number) for number in range(500)])
    assert len(rows_of(store.path.parent)) == 500


def event(number: int) -> Emit:
    return Emit(Event(id=number, at=float(number), job="job", kind="k", fields={"n": "é\n"}))


async def test_events_alone_wait_for_the_next_flush(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.submit([event(1)])
    assert not store.dirty
    assert store.events() == []
    store.flush_events()
    await store.flush()
    assert store.events() == [event(1).event]
    store.submit([event(2)])
    await store.close()
    again = SqliteStore(tmp_path)
    assert [e.id for e in again.events()] == [1, 2]
    await again.close()


async def test_all_records_of_a_job_are_deleted_and_what_follows_is_kept(
    store: SqliteStore, tmp_path: Path
) -> None:
    store.submit([put("checkpoint"), put("worker")])
    await store.flush()
    store.submit([put("dataset"), DeleteJob("job"), put("round")])
    await store.flush()
    assert [kind for kind, *_ in store.load()] == ["round"]
    with closing(sqlite3.connect(tmp_path / "state.db")) as db:
        assert examine(db).damages == []


async def test_events_that_made_room_are_forgotten(store: SqliteStore, tmp_path: Path) -> None:
    store.submit([put("checkpoint"), *[event(n) for n in range(1, 11)]])
    store.submit([Emit(event(11).event, forgotten=(2, 5))])
    await store.flush()
    store.flush_events()
    assert [e.id for e in store.events()] == [1, 3, 4, 6, 7, 8, 9, 10, 11]
    with closing(sqlite3.connect(tmp_path / "state.db")) as db:
        assert examine(db).journal == []


async def test_event_with_unreadable_fields_is_kept_without_them(store: SqliteStore) -> None:
    store.submit([event(1), event(2)])
    store.flush_events()
    await store.flush()
    store._db.execute("UPDATE journal SET fields = x'00' WHERE id = 1")
    assert [(e.id, e.fields) for e in store.events()] == [(1, {}), (2, {"n": "é\n"})]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("checkpoint", b"\xff\x00"),
        ("checkpoint", b"{}"),
        ("checkpoint", b'{"checkpoint_id": 7}'),
        ("worker", b'{"worker_id": "w", "rank": -1}'),
        ("unheard of", b"{}"),
    ],
)
async def test_unreadable_record_is_named_and_nothing_is_loaded(
    store: SqliteStore, kind: str, value: bytes
) -> None:
    store.submit([put("job")])
    await store.flush()
    row = kind, "job", "bad", value, record_digest(kind, "job", "bad", value)
    store._db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", row)
    with pytest.raises(StorageError, match=f"{kind} job/bad"):
        store.load()


async def test_each_start_is_counted(tmp_path: Path) -> None:
    terms = []
    for _ in range(3):
        store = SqliteStore(tmp_path)
        terms.append(store.term)
        await store.close()
    assert terms == [1, 2, 3]


async def test_second_store_on_the_same_folder_is_refused(store: SqliteStore) -> None:
    folder = store.path.parent
    with pytest.raises(StorageError, match=f"in use by another .*{os.getpid()}") as caught:
        SqliteStore(folder)
    assert "free space" not in str(caught.value), "the remedy is another one"


async def test_newer_schema_is_refused_and_the_folder_is_not_left_locked(tmp_path: Path) -> None:
    await SqliteStore(tmp_path).close()
    db = sqlite3.connect(tmp_path / "state.db")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    for _ in range(2):
        with pytest.raises(StorageError, match=f"newer Strata .schema {SCHEMA_VERSION + 1}"):
            SqliteStore(tmp_path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.close()
    await SqliteStore(tmp_path).close()


async def failing_flush(store: SqliteStore) -> str:
    with pytest.raises(StorageError) as caught:
        await asyncio.wait_for(store.flush(), 10)
    return str(caught.value)


async def test_failed_write_is_reported_to_all_and_nothing_is_written_after_it(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path)
    store._db.execute("ALTER TABLE records RENAME TO elsewhere")
    store.submit([put("checkpoint", "1")])
    assert "no such table" in await failing_flush(store)
    store._db.execute("ALTER TABLE elsewhere RENAME TO records")
    store.submit([put("checkpoint", "2")])
    store.submit([put("round", "3")])
    await failing_flush(store)
    assert store.dirty, "nothing may be answered any more"
    assert rows_of(tmp_path) == {}
    with pytest.raises(StorageError):
        await store.close()
    await SqliteStore(tmp_path).close()


async def test_half_of_a_batch_is_never_stored_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    class Odd(Record, frozen=True):
        value: object

    store = SqliteStore(tmp_path)
    store.submit([put("checkpoint", "good"), Put("checkpoint", "job", "bad", Odd(object()))])
    assert "TypeError" in await failing_flush(store)
    assert rows_of(tmp_path) == {}
    with pytest.raises(StorageError):
        await store.close()


async def test_log_of_writes_stays_short_when_nothing_waits_for_the_disk(
    store: SqliteStore,
) -> None:
    log = store.path.with_name("state.db-wal")
    number = 0
    while log.stat().st_size <= WAL_PAGES * 4096:
        number += 1
        record = RoundRecord(barrier_id="b", round=number, generation=1, participants=1, tickets={})
        store.submit([put("round", f"b-{number % 64}", record)])
    store.flush_events()
    await store.flush()
    assert log.stat().st_size < WAL_PAGES * 4096
    assert len(rows_of(store.path.parent)) == 64
