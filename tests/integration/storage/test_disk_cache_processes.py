"""Processes that share a disk cache, some of which are killed."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.storage import DiskCache, FileStat
from dtruntime.storage.disk_cache import LAYOUT, key_of
from tests.support.programs.cache_reader import LONGEST, all_ranges
from tests.support.servers.object_store import Bucket

ROOT = Path(__file__).parents[3]
LIMIT = 1_000_000
CONTENT = random.Random(3).randbytes(3_000_000)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with Bucket(tmp_path / "bucket").reachable() as bucket:
        yield bucket


@pytest.fixture
def file(bucket: Bucket) -> FileStat:
    return bucket.put("train.bin", CONTENT)


def reader(tmp_path: Path, seed: int, fate: str) -> subprocess.Popen[str]:
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]
    places = [str(tmp_path / "bucket"), str(tmp_path / "cache")]
    return subprocess.Popen(
        [
            *python,
            "-m",
            "tests.support.programs.cache_reader",
            *places,
            str(LIMIT),
            str(seed),
            fate,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found_whole(cache: DiskCache, file: FileStat) -> int:
    """How many of the ranges that readers ask for are kept, each of them with the right bytes."""
    found = 0
    for start, length in all_ranges(len(CONTENT)):
        data = cache._kept.load(key_of(file, start, length), length)
        assert data is None or data == CONTENT[start : start + length]
        found += data is not None
    return found


def test_killed_processes_harm_neither_data_nor_limit_nor_the_others(
    tmp_path: Path, file: FileStat
) -> None:
    fates = ["survive"] * 4 + ["die-writing", "die-evicting"] * 2
    processes = [(fate, reader(tmp_path, seed, fate)) for seed, fate in enumerate(fates)]
    ends = [(fate, *process.communicate(), process.returncode) for fate, process in processes]
    for fate, output, errors, code in ends:
        assert errors == "", errors
        assert code == (0 if fate == "survive" else -signal.SIGKILL)
        print(f"{fate}: {output.strip() or 'no'} hits")
    kept_by_all = found_whole(DiskCache(tmp_path / "cache", LIMIT), file)
    assert kept_by_all > 0
    assert kept_by_all == DiskCache(tmp_path / "cache", LIMIT).usage().entries
    late = reader(tmp_path, 0, "spawn")  # what it keeps, its child finds
    assert late.communicate() == ("", "")
    assert late.returncode == 0

    kept = tmp_path / "cache" / LAYOUT
    partials = list(kept.glob("??/*.partial"))
    assert len(partials) == fates.count("die-writing")
    with (kept / "tally").open("rb") as tally:
        fcntl.flock(tally, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for partial in partials:
        os.utime(partial, (1, 1))
    cache = DiskCache(tmp_path / "cache", LIMIT)
    for start in range(0, len(CONTENT), LONGEST):
        assert cache.read_range(file, start, LONGEST) == CONTENT[start : start + LONGEST]
    assert cache.usage().bytes <= LIMIT
    assert not list(kept.glob("??/*.partial"))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.usefixtures("file")
def test_child_reads_what_its_parent_kept(tmp_path: Path, method: str) -> None:
    parent = reader(tmp_path, 0, method)
    output, errors = parent.communicate()
    assert (parent.returncode, output, errors) == (0, "", "")
