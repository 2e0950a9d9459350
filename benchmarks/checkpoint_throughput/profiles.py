"""How much a run measures."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Profile:
    """Rounds and sizes of one run of the benchmark."""

    rounds: int
    """How often each contender is measured in turn."""
    repeats: int
    """How often it saves, or loads, when it is its turn, after a first time."""
    save_sizes: tuple[int, ...]
    load_sizes: tuple[int, ...]
    s3_sizes: tuple[int, ...]
    s3_servers: int
    """How many servers are saved to, one after the other."""
    s3_saves: int
    """How often each contender saves to each of them."""
    s3_loads: int
    writers: tuple[int, ...]
    writer_bytes: int
    memory_bytes: int
    width: int
    """Of the model that is trained."""
    steps: int
    """Saves per kind of training, after the first."""


FULL = Profile(
    rounds=3,
    repeats=3,
    save_sizes=(MIB, 10 * MIB, 100 * MIB, GIB, 4 * GIB),
    load_sizes=(100 * MIB, GIB, 4 * GIB),
    s3_sizes=(100 * MIB, GIB),
    s3_servers=4,
    s3_saves=4,
    s3_loads=32,
    writers=(1, 4, 8),
    writer_bytes=256 * MIB,
    memory_bytes=GIB,
    width=512,
    steps=6,
)
QUICK = Profile(
    rounds=2,
    repeats=2,
    save_sizes=(10 * MIB, GIB),
    load_sizes=(100 * MIB, GIB),
    s3_sizes=(100 * MIB,),
    s3_servers=2,
    s3_saves=4,
    s3_loads=8,
    writers=(1, 4),
    writer_bytes=128 * MIB,
    memory_bytes=GIB,
    width=512,
    steps=3,
)
