"""The disk cache: what it keeps, what goes, and what it never touches."""

from __future__ import annotations

import fcntl
import itertools
import os
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.config import Config
from dtruntime.errors import ShardError
from dtruntime.storage import DiskCache, FileStat, expand, read_ranges
from dtruntime.storage.disk_cache import (
    HEADER_BYTES,
    LAYOUT,
    MAGIC,
    PARTIAL_SECONDS,
    UNIT,
    CacheFile,
    CacheFolder,
)
from tests.support.servers.object_store import Bucket

CONTENT = random.Random(7).randbytes(200_000)
BODY = UNIT - HEADER_BYTES
"""A range of this length takes one unit of the disk."""


def part(number: int) -> tuple[int, int]:
    return number * BODY, BODY


def entries(folder: Path) -> list[Path]:
    return sorted((folder / LAYOUT).glob("??/*.range"))


def taken(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / LAYOUT).glob("??/*"))


@pytest.fixture
def file(bucket: Bucket) -> FileStat:
    return bucket.put("train.bin", CONTENT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_ranges_are_fetched_once_and_then_come_from_disk(
    bucket: Bucket, file: FileStat, folder: Path
) -> None:
    ranges = [(10, 1000), (0, 0), (150_000, 50_000), (10, 1000), (10, 999)]
    expected = [CONTENT[offset : offset + length] for offset, length in ranges]
    first = DiskCache(folder)
    assert first.read_ranges(file, ranges) == expected
    assert sorted(bucket.fetched) == [(10, 999), (10, 1000), (150_000, 50_000)]
    bucket.fetched.clear()
    second = DiskCache(folder)
    assert second.read_ranges(file, ranges) == expected
    assert second.read_range(file, 10, 1000) == CONTENT[10:1010]
    assert bucket.fetched == []
    usage = second.usage()
    assert (usage.hits, usage.misses, usage.entries) == (4, 0, 3)
    assert (usage.hit_bytes, usage.missed_bytes) == (52_999, 0)
    assert taken(folder) <= usage.bytes <= taken(folder) + 3 * UNIT
    assert (first.usage().hits, first.usage().misses) == (0, 3)


def test_stream_is_kept_in_chunks(bucket: Bucket, file: FileStat, folder: Path) -> None:
    assert b"".join(DiskCache(folder).stream(file, 30_000)) == CONTENT
    assert len(bucket.fetched) == 7
    bucket.fetched.clear()
    chunks = list(DiskCache(folder).stream(file, 30_000))
    assert [len(chunk) for chunk in chunks] == [30_000] * 6 + [20_000]
    assert b"".join(chunks) == CONTENT
    assert bucket.fetched == []


def test_range_behind_the_end_is_refused_as_without_a_cache(file: FileStat, folder: Path) -> None:
    with pytest.raises(ShardError, match="200000 bytes, and 10 at 199995 were asked for"):
        DiskCache(folder).read_range(file, 199_995, 10)
    assert DiskCache(folder).read_range(file, 200_000, 0) == b""


def test_changed_object_is_never_mistaken_for_what_it_was(
    bucket: Bucket, file: FileStat, folder: Path
) -> None:
    cache = DiskCache(folder)
    assert cache.read_range(file, 0, 100) == CONTENT[:100]
    changed = bucket.put("train.bin", CONTENT[::-1])
    assert cache.read_range(changed, 0, 100) == CONTENT[:-101:-1]
    assert cache.read_range(file, 0, 100) == CONTENT[:100], "the version that was indexed"
    with pytest.raises(ShardError, match="has changed since it was indexed"):
        cache.read_range(file, 0, 101)


def flipped(position: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        at = position % len(data)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return flip


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flipped(-1), id="last byte"),
        pytest.param(flipped(HEADER_BYTES), id="first byte"),
        pytest.param(flipped(10), id="key"),
        pytest.param(flipped(41), id="length"),
        pytest.param(flipped(50), id="checksum"),
        pytest.param(lambda data: data[:-1], id="cut off"),
        pytest.param(lambda data: data[:HEADER_BYTES], id="header only"),
        pytest.param(lambda data: data[:5], id="header cut off"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: bytes(len(data)), id="zeros"),
    ],
)
def test_damaged_entry_is_dropped_and_fetched_again(
    bucket: Bucket, file: FileStat, folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    cache = DiskCache(folder)
    cache.read_range(file, 5, 10_000)
    (entry,) = entries(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    bucket.fetched.clear()
    for _ in range(2):
        assert cache.read_range(file, 5, 10_000) == CONTENT[5:10_005]
    assert bucket.fetched == [(5, 10_000)]


def test_entry_of_another_range_under_this_name_is_not_taken(file: FileStat, folder: Path) -> None:
    cache = DiskCache(folder)
    cache.read_ranges(file, [(0, 1000), (1000, 1000)])
    one, other = entries(folder)
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    assert cache.read_ranges(file, [(0, 1000), (1000, 1000)]) == [
        CONTENT[:1000],
        CONTENT[1000:2000],
    ]


def test_least_recently_used_entries_go_first(bucket: Bucket, file: FileStat, folder: Path) -> None:
    cache = DiskCache(folder, 4 * UNIT)
    clock = itertools.count(1)
    for number in range(4):
        before = set(entries(folder))
        cache.read_range(file, *part(number))
        (new,) = set(entries(folder)) - before
        os.utime(new, (next(clock),) * 2)
    cache.read_range(file, *part(0))
    cache.read_range(file, *part(4))
    bucket.fetched.clear()
    cache.read_ranges(file, [part(0), part(2), part(3), part(4)])
    assert bucket.fetched == []
    cache.read_range(file, *part(1))
    assert bucket.fetched == [part(1)]


def test_limit_holds_for_processes_that_write_a_little_each(file: FileStat, folder: Path) -> None:
    for number in range(48):
        DiskCache(folder, 20 * UNIT).read_range(file, *part(number))
        assert taken(folder) <= 20 * UNIT
    assert len(entries(folder)) >= 17


def test_folder_is_not_listed_for_every_read(
    file: FileStat, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    scan = CacheFolder.scan

    def spy(self: CacheFolder) -> Iterator[CacheFile]:
        listed.append("once")
        return scan(self)

    monkeypatch.setattr(CacheFolder, "scan", spy)
    cache = DiskCache(folder, 1000 * UNIT)
    for _, number in itertools.product(range(2), range(48)):
        cache.read_range(file, *part(number))
    assert listed == ["once"]


def test_folder_is_counted_when_nobody_knows_how_much_it_has(file: FileStat, folder: Path) -> None:
    DiskCache(folder).read_ranges(file, [part(number) for number in range(30)])
    (folder / LAYOUT / "tally").unlink()
    DiskCache(folder, 20 * UNIT).read_range(file, *part(30))
    assert taken(folder) <= 20 * UNIT


def test_tally_that_lost_counts_is_corrected_by_whoever_writes_much(
    file: FileStat, folder: Path
) -> None:
    DiskCache(folder).read_ranges(file, [part(number) for number in range(30)])
    tally = folder / LAYOUT / "tally"
    os.truncate(tally, tally.stat().st_size - 25)
    DiskCache(folder, 20 * UNIT).read_ranges(file, [part(30), part(31)])
    assert taken(folder) <= 20 * UNIT


def test_range_larger_than_the_limit_is_passed_on(
    bucket: Bucket, file: FileStat, folder: Path
) -> None:
    cache = DiskCache(folder, 2 * UNIT)
    cache.read_range(file, 0, 100)
    for _ in range(2):
        assert cache.read_range(file, 0, 100_000) == CONTENT[:100_000]
        assert cache.read_range(file, 0, 100) == CONTENT[:100]
    assert bucket.fetched == [(0, 100), (0, 100_000), (0, 100_000)]
    assert cache.usage().entries == 1


def test_limit_of_zero_means_off(bucket: Bucket, file: FileStat, folder: Path) -> None:
    cache = DiskCache(folder, 0)
    for _ in range(2):
        assert cache.read_range(file, 0, 100) == CONTENT[:100]
        assert b"".join(cache.stream(file)) == CONTENT
    assert len(bucket.fetched) == 4
    assert not folder.exists()


def test_local_files_are_not_kept(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "local.bin").write_bytes(CONTENT)
    (local,) = expand(tmp_path / "local.bin")
    cache = DiskCache(folder)
    assert cache.read_range(local, 5, 100) == CONTENT[5:105]
    assert cache.read_ranges(local, [(5, 100)]) == [CONTENT[5:105]]
    assert b"".join(cache.stream(local)) == CONTENT
    assert not folder.exists()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_foreign_files_survive_eviction_and_clearing(file: FileStat, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "my-data", tmp_path / "elsewhere"
    DiskCache(elsewhere).read_ranges(file, [part(0), part(1)])
    mine, linked = entries(elsewhere)
    name = f"{LAYOUT}/{mine.parent.name}/{mine.name}"
    foreign = {
        "train.parquet": b"PAR1" * 9999,
        "ab/cd.range": b"x",
        "empty.csv": b"",
        f"{LAYOUT}/notes.txt": b"x",
        f"{LAYOUT}/ab/notes.txt": b"x",
        f"{LAYOUT}/ab/{'0' * 64}.range": b"a file that has the name of an entry",
        f"{LAYOUT}/ab/{'0' * 64}.range.{'0' * 16}.partial": b"and one with that of a partial one",
        f"{LAYOUT}/abc/{'0' * 64}.range": mine.read_bytes(),
        name: b"where an entry would be written",
    }
    for path, content in foreign.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        os.utime(folder / path, (1, 1))
    link = folder / LAYOUT / linked.parent.name / linked.name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(folder / "empty.csv")
    before = snapshot(folder)

    cache = DiskCache(folder, 20 * UNIT)
    for _, number in itertools.product(range(2), range(2, 45)):
        assert cache.read_range(file, *part(number)) == CONTENT[number * BODY :][:BODY]
    assert DiskCache(folder, 20 * UNIT).read_ranges(file, [part(0)]) == [CONTENT[:BODY]]
    assert DiskCache(folder, 20 * UNIT).read_ranges(file, [part(1)]) == [CONTENT[BODY : 2 * BODY]]
    usage = cache.usage()
    assert 10 <= usage.entries <= 20
    assert usage.bytes == usage.entries * UNIT, "foreign files do not count"
    cache.clear()
    after = snapshot(folder)
    assert cache.usage().entries == 0
    assert set(after) - set(before) == {str(folder / LAYOUT / "tally")}
    assert {path: after[path] for path in before} == before
    assert link.is_symlink()


def test_file_of_somebody_else_named_like_the_tally_survives(file: FileStat, folder: Path) -> None:
    (folder / LAYOUT).mkdir(parents=True)
    (folder / LAYOUT / "tally").write_bytes(b"my own tally")
    cache = DiskCache(folder)
    assert cache.read_range(file, 0, 100) == CONTENT[:100]
    assert (folder / LAYOUT / "tally").read_bytes() == b"my own tally"


def test_remains_of_dead_writers_are_swept_when_they_are_old(file: FileStat, folder: Path) -> None:
    cache = DiskCache(folder, 10 * UNIT)
    cache.read_range(file, *part(0))
    (entry,) = entries(folder)
    young, old, empty = (Path(f"{entry}.{number:016}.partial") for number in range(3))
    for partial in (young, old):
        partial.write_bytes(entry.read_bytes()[:3000])
    empty.touch()
    past = time.time() - PARTIAL_SECONDS - 60
    for partial in (old, empty):
        os.utime(partial, (past, past))
    for number in range(1, 12):
        cache.read_range(file, *part(number))
    assert (young.exists(), old.exists(), empty.exists()) == (True, False, False)
    assert taken(folder) <= 10 * UNIT


def test_who_does_not_get_the_lock_reads_on_without_evicting(file: FileStat, folder: Path) -> None:
    cache = DiskCache(folder, 5 * UNIT)
    cache.read_ranges(file, [part(number) for number in range(5)])
    before = entries(folder)
    with (folder / LAYOUT / "tally").open("rb") as tally:
        fcntl.flock(tally, fcntl.LOCK_EX)
        for number in range(5, 9):
            assert cache.read_range(file, *part(number)) == CONTENT[number * BODY :][:BODY]
        assert entries(folder) == before
    cache.read_range(file, *part(9))
    assert entries(folder) != before
    assert taken(folder) <= 5 * UNIT


def test_pickled_cache_uses_the_same_folder(bucket: Bucket, file: FileStat, folder: Path) -> None:
    cache = DiskCache(folder, 123_456)
    cache.read_range(file, 0, 100)
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.folder, copy.limit_bytes) == (str(folder), 123_456)
    assert copy.read_range(file, 0, 100) == CONTENT[:100]
    assert len(bucket.fetched) == 1
    assert (copy.usage().hits, copy.usage().misses) == (1, 0), "it counts for itself"


def test_folder_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DiskCache().folder == f"{tmp_path}/.cache/strata/shards"
    assert DiskCache("~/mine").folder == f"{tmp_path}/mine"
    monkeypatch.setenv("STRATA_CACHE_DIR", "~/all")
    assert DiskCache().folder == f"{tmp_path}/all/shards"
    with pytest.raises(ValueError, match="on a local disk, not at s3://bucket/cache"):
        DiskCache("s3://bucket/cache")
    with pytest.raises(ValueError, match="at least 0, which means off, not -1"):
        DiskCache(limit_bytes=-1)


def test_configuration_asks_for_a_cache_by_its_limit(tmp_path: Path) -> None:
    assert DiskCache.configured(Config().dataset) is None
    chosen = Config.load(environment={"STRATA_CACHE_LIMIT_BYTES": "5000"}).override(
        "dataset", "test", cache_dir=str(tmp_path)
    )
    cache = DiskCache.configured(chosen.dataset)
    assert cache is not None
    assert (cache.folder, cache.limit_bytes) == (str(tmp_path), 5000)


SPANS = st.tuples(st.integers(0, 60_000), st.integers(0, 30_000))
ACTIONS = st.one_of(
    st.tuples(st.integers(0, 2), st.lists(SPANS, max_size=4)),
    st.sampled_from(["clear", "damage", "remove", "forget"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=25), st.integers(0, 120_000), st.randoms())
def test_whatever_happens_to_the_folder_bytes_are_exact_and_the_limit_holds(
    actions: list[tuple[int, list[tuple[int, int]]] | str], limit: int, chance: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as place, Bucket(Path(place) / "b").reachable() as bucket:
        file = bucket.put("train.bin", CONTENT)
        folder = Path(place) / "cache"
        caches = [DiskCache(folder, limit) for _ in range(3)]
        for action in actions:
            if isinstance(action, str):
                disturb(action, folder, caches[0], chance)
                continue
            number, ranges = action
            found = caches[number].read_ranges(file, ranges)
            assert found == [CONTENT[offset : offset + length] for offset, length in ranges]
            assert found == read_ranges(file, ranges)
            assert taken(folder) <= limit


def disturb(action: str, folder: Path, cache: DiskCache, chance: random.Random) -> None:
    kept = entries(folder)
    if action == "clear":
        cache.clear()
        assert not entries(folder)
    elif action == "forget":
        (folder / LAYOUT / "tally").unlink(missing_ok=True)
    elif kept and action == "remove":
        chance.choice(kept).unlink()
    elif kept:
        entry = chance.choice(kept)
        data = bytearray(entry.read_bytes()[: chance.randint(HEADER_BYTES, 40_000)])
        data[chance.randrange(len(MAGIC), len(data))] ^= 1 << chance.randrange(8)
        entry.write_bytes(data)
