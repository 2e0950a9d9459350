"""A coordinator that starts on damaged, emptied or older state names what is wrong."""

import os
import random
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from dtruntime.coordinator.state.effects import Delete, Emit, Put
from dtruntime.coordinator.state.records import CheckpointRecord, Event, JobRecord
from dtruntime.coordinator.store import SqliteStore, backup, integrity
from dtruntime.errors import StorageError
from tests.support.paths import STORED

SCHEMA_1 = STORED / "state-schema-1.db"
"""What version 1.0 left after a clean stop: two jobs, three live workers, two checkpoints."""

State = tuple[list[str], list[Event]]


def checkpoint(number: int) -> Put:
    record = CheckpointRecord(
        checkpoint_id=f"c-{number}",
        step=number,
        epoch=0,
        path=f"/checkpoints/c-{number}",
        size_bytes=number * 1000,
        is_full=True,
        worker_id="worker-0",
        committed_at=float(number),
        metadata={"note": "x" * (number * 13 % 300)},
    )
    return Put("checkpoint", "job", f"c-{number}", record)


def event(number: int) -> Emit:
    return Emit(Event(number, float(number), "job", "checkpoint.committed", {"step": str(number)}))


async def write(folder: Path, numbers: range = range(1, 60)) -> None:
    store = SqliteStore(folder)
    job = JobRecord(world_size=2, generation=3, loss_generation=0, next_incarnation=3)
    store.submit([Put("job", "job", "", job)])
    for number in numbers:
        store.submit([checkpoint(number), event(number)])
    store.submit([Delete("checkpoint", "job", "c-7")])
    await store.flush()
    await store.close()


async def start(folder: Path) -> State:
    """What a coordinator that starts there knows."""
    store = SqliteStore(folder)
    try:
        return sorted(map(repr, store.load())), store.events()
    finally:
        await store.close()


def edit(folder: Path, *statements: str) -> None:
    db = sqlite3.connect(folder / "state.db", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


async def outcome(folder: Path, good: State) -> str:
    try:
        found = await start(folder)
    except StorageError as exc:
        if "strata state" in str(exc) or "newer Strata" in str(exc):
            return "named"
        raise
    if found == good:
        return "same"
    assert found[0] == good[0], "a record changed, and nothing was said"
    kinds = {e.id: e for e in found[1]}
    odd = [e for e in good[1] if kinds.get(e.id) != e]
    assert all(kinds[e.id].kind == "journal.entry_damaged" for e in odd if e.id in kinds)
    return "journal"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def put_files(folder: Path, files: dict[str, bytes]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        folder.joinpath(name).write_bytes(content)
    return folder


async def flip_bits(folder: Path, file: str, count: int, seed: int) -> Counter[str]:
    """Start ``count`` times, each time with another bit of the file flipped."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    files = files_in(folder)
    good = await start(put_files(folder.parent / "good", files))
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        content = bytearray(files[file])
        bit = rng.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        trial = put_files(folder.parent / "trial", {**files, file: bytes(content)})
        outcomes[await outcome(trial, good)] += 1
    print(outcomes)
    return outcomes


@pytest.mark.parametrize("file", ["state.db", "state.mark"])
async def test_flipped_bit_never_changes_a_record_without_a_word(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "state"
    await write(folder)
    outcomes = await flip_bits(folder, file, 150, seed=16)
    assert sum(outcomes.values()) == 150
    if file == "state.db":
        assert outcomes["named"] > 20, "the flips hit records"


async def test_flipped_bit_in_the_write_ahead_log_loses_no_commit_silently(tmp_path: Path) -> None:
    await write(tmp_path / "first")
    store = SqliteStore(tmp_path / "first")
    for number in range(100, 140):
        store.submit([checkpoint(number)])
        await store.flush()
    crashed = tmp_path / "state"
    shutil.copytree(tmp_path / "first", crashed)  # as SIGKILL leaves it
    (crashed / "state.db-shm").unlink()
    await store.close()
    assert (crashed / "state.db-wal").stat().st_size > 100_000
    outcomes = await flip_bits(crashed, "state.db-wal", 60, seed=17)
    assert outcomes["named"] > 20


async def test_state_without_its_write_ahead_log_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "first")
    for number in range(1, 6):
        store.submit([checkpoint(number)])
        await store.flush()
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "first", crashed)
    await store.close()
    for file in crashed.glob("state.db-*"):
        file.unlink()
    with pytest.raises(StorageError, match=r"empty, after \d+ commits.*strata state restore COPY"):
        SqliteStore(crashed)


async def test_older_copy_put_in_place_is_refused(tmp_path: Path) -> None:
    await write(tmp_path, range(1, 10))
    old = (tmp_path / "state.db").read_bytes()
    await write(tmp_path, range(10, 20))
    (tmp_path / "state.db").write_bytes(old)
    with pytest.raises(StorageError, match=r"its last \d+ commits are missing .* older copy"):
        SqliteStore(tmp_path)


@pytest.mark.parametrize("how", ["deleted", "truncated", "another"])
async def test_emptied_or_exchanged_database_is_refused(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "state"
    await write(folder)
    if how == "deleted":
        (folder / "state.db").unlink()
    elif how == "truncated":
        (folder / "state.db").write_bytes(b"")
    else:
        await write(tmp_path / "other")
        shutil.copy(tmp_path / "other" / "state.db", folder / "state.db")
    expected = "not the state that this directory had" if how == "another" else "it is empty"
    with pytest.raises(StorageError, match=f"{expected}.*strata state restore"):
        SqliteStore(folder)


async def test_empty_directory_is_a_new_state(tmp_path: Path) -> None:
    assert await start(tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE records SET value = value || ' ' WHERE key = 'c-9'", "job/c-9: "),
        ("DELETE FROM records WHERE key = 'c-9'", "records are missing"),
        ("UPDATE records SET key = 'c-99' WHERE key = 'c-9'", "job/c-99: "),
        ("UPDATE records SET digest = 0 WHERE key = 'c-9'", "job/c-9: "),
        ("UPDATE summary SET value = replace(value, '\"term\":1', '\"term\":3')", "the summary"),
        ("DELETE FROM summary", "the summary"),
        ("PRAGMA user_version = 1", "tables are not those"),
        ("CREATE TABLE another (x)", "tables are not those"),
    ],
)
async def test_damage_is_named_with_what_it_concerns(
    tmp_path: Path, statement: str, named: str
) -> None:
    await write(tmp_path)
    edit(tmp_path, statement)
    before = (tmp_path / "state.db").read_bytes()
    with pytest.raises(StorageError) as caught:
        SqliteStore(tmp_path)
    message = str(caught.value)
    assert named in message
    assert f"strata state check --data-dir {tmp_path}" in message
    assert f"strata state restore COPY --data-dir {tmp_path}" in message
    assert (tmp_path / "state.db").read_bytes() == before, "nothing was changed"
    checked = backup.check(tmp_path)
    assert any(named in damage for damage in checked.damages)


async def test_swapped_records_are_seen(tmp_path: Path) -> None:
    await write(tmp_path)
    edit(
        tmp_path,
        "UPDATE records SET key = 'x' WHERE key = 'c-3'",
        "UPDATE records SET key = 'c-3' WHERE key = 'c-4'",
        "UPDATE records SET key = 'c-4' WHERE key = 'x'",
    )
    with pytest.raises(StorageError, match=r"checkpoint job/c-3: .*checkpoint job/c-4: "):
        SqliteStore(tmp_path)


async def test_damaged_entry_of_the_journal_is_shown_as_such(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await write(tmp_path)
    edit(tmp_path, "UPDATE journal SET kind = 'worker.dead' WHERE id = 5")
    _, events = await start(tmp_path)
    kinds = {e.id: e.kind for e in events}
    assert kinds[5] == "journal.entry_damaged"
    assert Counter(kinds.values())["checkpoint.committed"] == len(events) - 1
    assert backup.check(tmp_path).damages == ()
    assert any("entry 5" in problem for problem in backup.check(tmp_path).found.journal)


async def test_state_of_the_schema_before_is_taken_over_with_digests(tmp_path: Path) -> None:
    shutil.copy(SCHEMA_1, tmp_path / "state.db")
    db = sqlite3.connect(SCHEMA_1)
    before = sorted(db.execute("SELECT kind, job, key, value FROM records").fetchall())
    events = db.execute("SELECT id, at, job, kind FROM journal ORDER BY id").fetchall()
    db.close()
    store = SqliteStore(tmp_path)
    assert store.term == 3
    assert len(store.load()) == len(before) == 9
    assert [(e.id, e.at, e.job, e.kind) for e in store.events()] == events
    await store.close()
    db = sqlite3.connect(tmp_path / "state.db")
    after = db.execute("SELECT kind, job, key, value, digest FROM records").fetchall()
    db.close()
    assert sorted(row[:4] for row in after) == before
    assert all(integrity.record_digest(*row[:4]) == row[4] for row in after)
    assert backup.check(tmp_path).damages == ()
    assert len((await start(tmp_path))[0]) == 9


async def test_damaged_state_of_the_schema_before_is_named_and_left(tmp_path: Path) -> None:
    shutil.copy(SCHEMA_1, tmp_path / "state.db")
    edit(tmp_path, "UPDATE records SET value = x'FF' WHERE key = 'c-10'")
    with pytest.raises(StorageError, match="checkpoint training/c-10"):
        SqliteStore(tmp_path)
    assert backup.check(tmp_path).found.schema == 1


async def test_mark_that_is_gone_or_damaged_is_written_anew(tmp_path: Path) -> None:
    await write(tmp_path)
    for content in (None, b"", b"\xff" * 512):
        mark = tmp_path / "state.mark"
        mark.unlink() if content is None else mark.write_bytes(content)
        assert len((await start(tmp_path))[0]) == 59
        assert integrity.HighWaterMark(tmp_path).read() is not None


async def test_commit_that_did_not_wait_for_the_disk_may_be_lost_with_the_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(tmp_path)
    mark = integrity.HighWaterMark(tmp_path)
    known = mark.read()
    assert known is not None
    mark.write(known.state_id, known.sequence, durable=True)
    mark.write(known.state_id, known.sequence + 3, durable=False)
    mark.close()
    with pytest.raises(StorageError, match="its last 3 commits are missing"):
        SqliteStore(tmp_path)
    rebooted = tmp_path / "boot_id"
    rebooted.write_text("another boot")
    monkeypatch.setattr(integrity, "BOOT_ID", rebooted)
    assert len((await start(tmp_path))[0]) == 59


# Backup and restore


async def test_backup_is_one_file_that_restores_the_same_state(tmp_path: Path) -> None:
    folder, copy, other = tmp_path / "state", tmp_path / "copy.db", tmp_path / "other"
    await write(folder)
    good = await start(folder)
    backup.back_up(folder, copy)
    assert sorted(os.listdir(tmp_path)) == ["copy.db", "state"]
    assert backup.check(copy).damages == ()
    with pytest.raises(StorageError, match=r"copy\.db exists"):
        backup.back_up(folder, copy)
    backup.back_up(folder, copy, replace=True)
    assert backup.restore(copy, other) is None
    assert await start(other) == good
    ids = [SqliteStore(f) for f in (folder, other)]
    assert ids[0].state_id != ids[1].state_id
    assert ids[1].ancestors == (ids[0].state_id,)
    for store in ids:
        await store.close()


async def test_damaged_state_is_not_backed_up(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    await write(folder)
    edit(folder, "DELETE FROM records WHERE key = 'c-9'")
    with pytest.raises(StorageError, match="records are missing"):
        backup.back_up(folder, tmp_path / "copy.db")
    assert os.listdir(tmp_path) == ["state"]


async def test_restore_over_a_newer_state_needs_force_and_keeps_it_aside(tmp_path: Path) -> None:
    folder, copy = tmp_path / "state", tmp_path / "copy.db"
    await write(folder, range(1, 10))
    old = await start(folder)
    backup.back_up(folder, copy)
    await write(folder, range(10, 20))
    new = await start(folder)
    with pytest.raises(StorageError, match=r"commits are missing.*--force"):
        backup.restore(copy, folder)
    assert await start(folder) == new
    aside = backup.restore(copy, folder, force=True)
    assert await start(folder) == old
    assert aside is not None
    assert await start(aside) == new
    assert not list(folder.glob(".*partial*"))


async def test_restore_under_a_live_coordinator_is_refused_even_with_force(tmp_path: Path) -> None:
    folder, copy = tmp_path / "state", tmp_path / "copy.db"
    await write(folder)
    backup.back_up(folder, copy)
    store = SqliteStore(folder)
    with pytest.raises(StorageError, match=f"in use by another coordinator .process {os.getpid()}"):
        backup.restore(copy, folder, force=True)
    await store.close()


async def test_damaged_copy_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder, copy = tmp_path / "state", tmp_path / "copy.db"
    await write(folder)
    good = await start(folder)
    backup.back_up(folder, copy)
    with sqlite3.connect(copy) as db:
        db.execute("UPDATE records SET key = 'x' WHERE key = 'c-9'")
    db.close()
    with pytest.raises(StorageError, match="checkpoint job/x"):
        backup.restore(copy, folder, force=True)
    assert await start(folder) == good


@pytest.mark.parametrize(
    ("statement", "left_out"),
    [
        ("UPDATE records SET value = x'FF' WHERE key = 'c-9'", 1),
        ("DELETE FROM records WHERE key = 'c-9'", 1),
        ("UPDATE summary SET digest = 0", 0),
    ],
)
async def test_salvage_goes_on_with_what_is_intact(
    tmp_path: Path, statement: str, left_out: int
) -> None:
    await write(tmp_path)
    good = await start(tmp_path)
    edit(tmp_path, statement)
    aside = backup.restore(tmp_path / "state.db", tmp_path, force=True, salvage=True)
    assert aside is not None
    assert backup.check(tmp_path).damages == ()
    found = await start(tmp_path)
    assert len(found[0]) == len(good[0]) - left_out
    assert set(found[0]) <= set(good[0])
    assert backup.check(aside).damages, "the damaged state is kept"


async def test_salvage_accepts_what_is_left_of_a_lost_write_ahead_log(tmp_path: Path) -> None:
    await write(tmp_path, range(1, 10))
    old = (tmp_path / "state.db").read_bytes()
    known = await start(tmp_path)
    await write(tmp_path, range(10, 20))
    (tmp_path / "state.db").write_bytes(old)
    backup.restore(tmp_path / "state.db", tmp_path, force=True, salvage=True)
    assert await start(tmp_path) == known
