"""A process that reads an object through a shared disk cache, and may be killed on the way.

``python -m tests.support.programs.cache_reader BUCKET CACHE LIMIT SEED FATE``: FATE is ``survive``,
``die-writing``, ``die-evicting``, or a start method for a child that reads the same.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from dtruntime.storage import DiskCache, FileStat, disk_cache, expand
from tests.support.servers.object_store import Bucket

ROUNDS = 400
LONGEST = 40_000
LENGTHS = (100, 10_000, LONGEST)
STRIDE = 10_000


def all_ranges(size: int) -> Iterator[tuple[int, int]]:
    """Every range of an object that a reader may ask for."""
    return product(range(0, size - LONGEST, STRIDE), LENGTHS)


def killed_at(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The same function, whose caller does not live to see its ``number``-th call."""
    calls = iter(range(1, number))

    def fatal(*args: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args)

    return fatal


def read_at_random(cache: DiskCache, file: FileStat, content: bytes, chance: random.Random) -> None:
    for _ in range(ROUNDS):
        starts = [chance.randrange(0, len(content) - LONGEST, STRIDE) for _ in range(3)]
        ranges = [(start, chance.choice(LENGTHS)) for start in starts]
        expected = [content[start : start + length] for start, length in ranges]
        assert cache.read_ranges(file, ranges) == expected


def read_what_is_kept(cache: DiskCache, file: FileStat, content: bytes) -> None:
    before = cache.usage().misses
    assert cache.read_range(file, 0, LONGEST) == content[:LONGEST]
    assert cache.usage().misses == before


def main(bucket: str, folder: str, limit: str, seed: str, fate: str) -> None:
    with Bucket(Path(bucket)).reachable():
        (file,) = expand("s3://bucket/train.bin")
        content = Path(bucket, "train.bin").read_bytes()
        cache = DiskCache(folder, int(limit))
        if fate in multiprocessing.get_all_start_methods():
            cache.read_range(file, 0, LONGEST)
            context: Any = multiprocessing.get_context(fate)
            child = context.Process(target=read_what_is_kept, args=(cache, file, content))
            child.start()
            child.join()
            sys.exit(child.exitcode)
        if fate == "die-writing":
            os.replace = killed_at(os.replace, 20)
        elif fate == "die-evicting":
            disk_cache.delete_entry = killed_at(disk_cache.delete_entry, 20)
        chance = random.Random(seed)
        read_at_random(cache, file, content, chance)
        while fate.startswith("die-"):  # others may have done the work at which it is to die
            read_at_random(cache, file, content, chance)
        print(cache.usage().hits)


if __name__ == "__main__":
    main(*sys.argv[1:])
