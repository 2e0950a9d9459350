"""States that no loader can have given are refused, and one rank's state stands for all ranks."""

import json

import pytest

from dtruntime.data.loader import Loader
from dtruntime.data.loader_state import merge_states
from dtruntime.data.mixture import Mixture
from dtruntime.data.source import NumberSource
from dtruntime.errors import ShardError

ORDERS = ("global", "affinity")


def loader(order="global", **options):
    return Loader(NumberSource(40, 10), 10, order=order, **options)


def begun(order):
    reading = loader(order)
    next(iter(reading))
    return reading


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "change",
    [
        dict(position=-10),
        dict(position=10.0),
        dict(epoch=-1),
        dict(epoch=2**63),
        dict(world=0),
        dict(rank=1),
        dict(rank=-2),
        dict(base="zzz"),
        dict(seen="!"),
        dict(seen="\n"),
        dict(positions=[1, 2, 3]),
        dict(positions=[-5]),
        dict(past=[[0, [1]]]),
        dict(past=[[2, [5, 5, 5]]]),
        dict(past=[[2, [-1]]]),
    ],
    ids=lambda change: json.dumps(change),
)
def test_state_that_no_loader_gave_is_refused_and_changes_nothing(order, change):
    state = begun(order).state_dict()
    reading = begun(order)
    with pytest.raises(ValueError, match="not a loader's state"):
        reading.load_state_dict({**state, **change})
    assert reading.state_dict() == state


@pytest.mark.parametrize("change", [dict(past=[[2, [5]]]), dict(positions=[10])])
def test_global_state_with_positions_of_ranks_is_refused(change):
    state = loader().state_dict()
    with pytest.raises(ValueError, match="no positions of their own"):
        loader().load_state_dict({**state, **change})


@pytest.mark.parametrize("streams", [0, -1])
@pytest.mark.parametrize("order", ORDERS)
def test_state_without_streams_is_refused(order, streams):
    state = loader(order).state_dict()
    state["plan"]["streams"] = streams
    with pytest.raises(ValueError, match="not a loader's state"):
        loader(order).load_state_dict(state)


@pytest.mark.parametrize("position", [41, 1000, 2**62])
def test_position_beyond_the_epoch_is_refused(position):
    reading = begun("global")
    state = reading.state_dict()
    with pytest.raises(ShardError, match=f"at sample {position} of an epoch that has 40"):
        reading.load_state_dict({**state, "position": position})
    assert reading.state_dict() == state


def test_position_beyond_the_epoch_of_a_mixture_is_refused():
    mixture = Mixture({"a": (NumberSource(50, 10), 1), "b": (NumberSource(50, 10), 1)}, samples=60)
    reading = Loader(mixture, 10)
    state = reading.state_dict()
    reading.load_state_dict({**state, "position": 60})
    with pytest.raises(ShardError, match="at sample 61 of an epoch that has 60"):
        reading.load_state_dict({**state, "position": 61})


def padded(rank, world):
    source = NumberSource(60, 20)
    return Loader(
        source, 6, rank=rank, world_size=world, order="affinity", last="pad", ids=True, seed=3
    )


def take(loaders, steps):
    """Samples of some steps of all ranks."""
    got = []
    for reading in loaders:
        for _, batch in zip(range(steps), reading, strict=False):
            got += batch["__id__"][batch["__valid__"]].tolist()
    return got


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("whose", [0, 1, None])
def test_state_of_a_rank_with_a_short_lane_stands_for_all(first, whose):
    """Resumed in the padding of its lane, a rank counts on with the others."""
    before = [padded(rank, 2) for rank in range(2)]
    got = take(before, first)
    resumed = [padded(rank, 2) for rank in range(2)]
    for old, new in zip(before, resumed, strict=True):
        new.load_state_dict(old.state_dict())
    got += take(resumed, 1)
    states = [reading.state_dict() for reading in resumed]
    assert states[0]["position"] == states[1]["position"]
    state = merge_states(states) if whose is None else states[whose]
    others = [padded(rank, 3) for rank in range(3)]
    for reading in others:
        reading.load_state_dict(state)
    got += take(others, 1000)
    assert sorted(got) == list(range(60))
