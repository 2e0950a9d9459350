"""Only the newest iteration of a loader goes on, and nobody waits for one that has ended."""

import itertools

import pytest

from dtruntime._background import Ahead
from dtruntime.data.loader import Loader
from dtruntime.data.source import NumberSource

OPTIONS = [{}, {"transform": lambda batch: batch}, {"order": "affinity"}]


def loader(**options):
    return Loader(NumberSource(100, 10), 10, seed=1, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_older_iteration_ends_when_another_begins(options):
    reading = loader(**options)
    older = iter(reading)
    got = next(older)["sample"].tolist()
    newer = iter(reading)
    got += next(newer)["sample"].tolist()
    with pytest.raises(RuntimeError, match=r"this iteration has ended.*iter\(loader\)"):
        next(older)
    assert reading.position == 20
    for batch in newer:
        got += batch["sample"].tolist()
    assert sorted(got) == list(range(100))
    assert (reading.epoch, reading.position) == (1, 0)


@pytest.mark.parametrize("options", OPTIONS[:2])
@pytest.mark.parametrize(
    "change",
    [
        lambda reading: reading.close(),
        lambda reading: reading.restart(),
        lambda reading: reading.set_epoch(3),
        lambda reading: reading.load_state_dict(loader().state_dict()),
    ],
    ids=["close", "restart", "set_epoch", "load_state_dict"],
)
def test_iteration_ends_when_the_loader_goes_elsewhere(options, change):
    reading = loader(**options)
    steps = iter(reading)
    next(steps)
    change(reading)
    place = reading.epoch, reading.position
    with pytest.raises(RuntimeError, match="this iteration has ended"):
        next(steps)
    assert (reading.epoch, reading.position) == place
    rest = sum(len(batch["sample"]) for batch in reading)
    assert rest == 100 - place[1]


def test_iteration_that_was_forgotten_does_not_disturb_the_newer_one():
    reading = loader(transform=lambda batch: batch)
    older = iter(reading)
    next(older)
    newer = iter(reading)
    next(newer)
    del older
    assert sum(len(batch["sample"]) for batch in newer) == 80


@pytest.mark.parametrize("depth", [1, 3])
def test_items_made_ahead_are_at_their_end_once_closed(depth):
    ahead = Ahead(itertools.count(), depth, "strata-test")
    items = iter(ahead)
    assert next(items) == 0
    ahead.close()
    ahead.close()
    assert list(items) == []
