"""Several datasets are read as one, in exact shares, and each of them whole."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.data.loader import Loader
from dtruntime.data.mixture import BLOCK, Mixture, quotas
from dtruntime.data.source import NumberSource
from dtruntime.errors import ShardError


def mixture(samples=None, **parts):
    sources = {name: (NumberSource(size, 50), weight) for name, (size, weight) in parts.items()}
    return Mixture(sources, samples)


def draw(mixed, epochs=1, **options):
    loader = Loader(mixed, ids=True, **options)
    batches = [batch for _ in range(epochs) for batch in loader]
    return tuple(np.concatenate([b[key] for b in batches]) for key in ("__dataset__", "sample"))


def test_shares_are_exact_in_every_thousand():
    origin, _ = draw(mixture(a=(9000, 0.7), b=(9000, 0.2), c=(9000, 0.1)), batch_size=64)
    whole = len(origin) // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        counts = np.bincount(origin[start : start + BLOCK])
        assert counts.tolist() == [700, 200, 100]


def test_epoch_ends_when_the_first_dataset_runs_out_and_repeats_nothing():
    mixed = mixture(a=(3000, 0.5), b=(20_000, 0.5))
    assert len(mixed) == 6000
    origin, sample = draw(mixed, batch_size=100)
    for part in (0, 1):
        assert len(np.unique(sample[origin == part])) == (origin == part).sum() == 3000


def test_datasets_go_on_over_epochs_until_each_was_read_whole():
    mixed = mixture(a=(1000, 0.5), b=(4000, 0.5))
    origin, sample = draw(mixed, epochs=4, batch_size=100)
    assert np.array_equal(np.sort(sample[origin == 1]), np.arange(4000))
    repeats = np.bincount(sample[origin == 0])
    assert repeats.tolist() == [4] * 1000


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_global_batches_of_a_mixture_survive_changes_of_the_world(data):
    sizes = data.draw(st.lists(st.integers(60, 700), min_size=1, max_size=3))
    parts = {f"d{i}": (size, i + 1) for i, size in enumerate(sizes)}

    def run(worlds):
        state, batches = None, []
        for world, steps in worlds:
            loaders = [
                Loader(
                    mixture(**parts),
                    global_batch_size=24,
                    rank=rank,
                    world_size=world,
                    streams=3,
                    ids=True,
                    window=2,
                )
                for rank in range(world)
            ]
            runs = []
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                runs.append([])
                for batch in loader:
                    runs[-1].append(batch["__id__"].tolist())
                    if len(runs[-1]) == steps:
                        break
            batches.extend(
                sorted(i for run in runs if step < len(run) for i in run[step])
                for step in range(max(map(len, runs)))
            )
            if loaders[0].epoch:
                return batches
            state = loaders[0].state_dict()
        return batches

    changes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=3))
    assert run([*changes, (2, 10**6)]) == run([(1, 10**6)])


def test_weights_become_whole_shares():
    assert quotas([1, 1, 1]).tolist() == [334, 333, 333]
    assert quotas([1e-9, 1]).tolist() == [1, 999]
    for bad in ([], [0, 1], [-1, 2], [float("nan")], [float("inf"), 1]):
        with pytest.raises(ValueError, match="weights"):
            quotas(bad)


def test_mixtures_that_cannot_be_are_named():
    with pytest.raises(ShardError, match="at least one dataset"):
        Mixture({})
    with pytest.raises(ShardError, match="fewer than the 8 streams"):
        Loader(mixture(a=(5, 1), b=(500, 1)), 4, world_size=8)
    with pytest.raises(ValueError, match="global order"):
        Loader(mixture(a=(50, 1)), 4, order="affinity")
    with pytest.raises(ValueError, match="at least one sample"):
        mixture(samples=0, a=(50, 1))
