"""How much a run measures."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, int]
"""Workers and shards."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Rounds and sizes of one run of the benchmark."""

    rounds: int
    """How often each contender is measured in turn."""
    seconds: float
    """A pass over the data is cut off so long after its first batch."""
    shapes: tuple[Shape, ...]
    parquet_rows: int
    csv_rows: int
    tfrecord_rows: int
    converted_rows: int
    """How many of the rows are converted for libraries that write one sample at a time."""
    batch_sizes: tuple[int, ...]
    resume_samples: tuple[int, ...]


FULL = Profile(
    rounds=5,
    seconds=2.5,
    shapes=((10, 1_000), (100, 10_000), (1_000, 100_000), (10_000, 1_000_000)),
    parquet_rows=4_000_000,
    csv_rows=400_000,
    tfrecord_rows=200_000,
    converted_rows=250_000,
    batch_sizes=(4096, 256),
    resume_samples=(10**7, 10**9),
)
QUICK = Profile(
    rounds=2,
    seconds=1.0,
    shapes=((10, 1_000), (100, 10_000), (1_000, 100_000)),
    parquet_rows=800_000,
    csv_rows=80_000,
    tfrecord_rows=40_000,
    converted_rows=50_000,
    batch_sizes=(4096, 256),
    resume_samples=(10**7, 10**9),
)
