"""A dataset as the source of batches: what it opens and closes, and what a crew reads."""

from functools import partial
from typing import Any

import pytest

from dtruntime.data import NumberSource
from dtruntime.data.loader import Loader
from dtruntime.run.crew import Crew
from dtruntime.run.dataset_stream import DatasetStream, dataset_stream
from dtruntime.run.streams import DataOptions

CREW = Crew((0,), 0, 0)


def test_connection_is_closed_with_the_stream_and_kept_when_the_crew_changes() -> None:
    closed: list[str] = []
    stream = DatasetStream(
        partial(Loader, NumberSource(8, 4), batch_size=4),
        lambda: closed.append("connection"),
    )
    stream.open(CREW)
    stream.open(CREW)
    assert len(list(stream.batches())) == 2
    assert closed == []
    stream.close()
    assert closed == ["connection"]


def test_stream_that_was_closed_can_be_opened_for_another_crew() -> None:
    stream = DatasetStream(partial(Loader, NumberSource(8, 4), batch_size=4))
    for _ in range(2):
        stream.open(CREW)
        assert sum(size for _, size in stream.batches()) == 8
        stream.close()


SAMPLES, BATCH = 500, 24


def crew_streams(workers: int, **reading: Any) -> list[Any]:
    """What each worker of a crew reads, from the start."""
    options = {"global_batch_size": BATCH, "shard_size": 20, "window": 2, "seed": 5, **reading}
    found = []
    for rank in range(workers):
        stream = dataset_stream(DataOptions(SAMPLES, None, "train", options), None)
        stream.open(Crew(tuple(range(workers)), rank, 0))
        found.append(stream)
    return found


def global_batches(streams: list[Any], epochs: int = 1, steps: int | None = None) -> list[set[int]]:
    """The samples of each step of all workers together."""
    found: list[set[int]] = []
    for _ in range(epochs):
        readers = [stream.batches() for stream in streams]
        for parts in zip(*readers, strict=True):
            for stream in streams:
                stream.used()
            found.append({int(n) for batch, _ in parts for n in batch["sample"]})
            assert sum(size for _, size in parts) == len(found[-1])
            if len(found) == steps:
                return found
    return found


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("streams", [1, 4, 6])
def test_fresh_starts_of_any_number_of_workers_with_streams_given_have_the_same_batches(
    streams, shuffle
):
    alone, two, three = (
        global_batches(crew_streams(workers, streams=streams, shuffle=shuffle), epochs=2)
        for workers in (1, 2, 3)
    )
    assert len(alone) == 2 * -(-SAMPLES // BATCH)
    assert set().union(*alone) == set(range(SAMPLES))
    assert alone == two == three


def test_run_that_goes_on_with_another_number_of_workers_has_the_batches_it_began_with():
    whole = global_batches(crew_streams(2))
    first = crew_streams(2)
    begun = global_batches(first, steps=9)
    states = [stream.state() for stream in first]
    for workers in (1, 3):
        others = crew_streams(workers)
        for rank, stream in enumerate(others):
            stream.restore(states, rank)
        assert begun + global_batches(others) == whole
