"""Strata's batches in JAX, as Grain's own harness checks them."""

import json
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grain._src.python.testing.experimental import assert_equal_output_after_checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtruntime.data import build_index
from dtruntime.data.jax import JaxIterator
from dtruntime.data.loader import Loader
from dtruntime.data.mixture import Mixture
from dtruntime.data.source import FileSource, NumberSource


class Fresh:
    """Makes a new iterator each time, as Grain's datasets do."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return self._make()


@pytest.mark.parametrize("order", ["global", "affinity"])
@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_grain_finds_the_same_output_after_every_checkpoint(order, last):
    def make():
        loader = Loader(NumberSource(230, 20), 32, order=order, last=last, window=3)
        return JaxIterator(loader, num_epochs=2)

    assert_equal_output_after_checkpoint(Fresh(make))


def test_grain_finds_the_same_output_of_a_mixture():
    def make():
        parts = {"a": (NumberSource(300, 20), 2), "b": (NumberSource(90, 20), 1)}
        return JaxIterator(Loader(Mixture(parts), 25, ids=True), num_epochs=2)

    assert_equal_output_after_checkpoint(Fresh(make))


def test_batches_are_arrays_of_jax():
    loader = Loader(NumberSource(100, 10), 20, output="jax", shuffle=False)
    batch = next(JaxIterator(loader))
    assert isinstance(batch["sample"], jax.Array)
    assert jnp.array_equal(batch["sample"], jnp.arange(20))


def test_lists_are_stacked_padded_or_given_one_by_one(tmp_path):
    rows = [list(range(n % 3)) for n in range(12)]
    pq.write_table(pa.table({"x": [[n, n + 0.5] for n in range(12)], "y": rows}), tmp_path / "p")
    source = FileSource(build_index(tmp_path / "p", "parquet", use_cache=False))
    options: dict[str, Any] = {"output": "jax", "shuffle": False}
    batch = next(JaxIterator(Loader(source, 12, ragged={"y": "pad"}, **options)))
    assert isinstance(batch["x"], jax.Array)
    assert batch["x"].tolist() == [[n, n + 0.5] for n in range(12)]
    assert [y[m].tolist() for y, m in zip(batch["y"], batch["y__mask"], strict=True)] == rows
    batch = next(JaxIterator(Loader(source, 12, ragged={"y": "list"}, **options)))
    assert all(isinstance(row, jax.Array) for row in batch["y"])
    assert [row.tolist() for row in batch["y"]] == rows


def test_batches_become_parts_of_global_arrays():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))
    loader = Loader(NumberSource(100, 10), 20, shuffle=False)
    batch = next(JaxIterator(loader, sharding=sharding))
    assert batch["sample"].sharding == sharding
    assert batch["sample"].shape == (20,)


def test_state_is_the_loaders_own():
    """What one face saved, the other loads."""
    first = JaxIterator(Loader(NumberSource(100, 10), 10))
    taken = [next(first)["sample"].tolist() for _ in range(4)]
    state = json.loads(json.dumps(first.get_state()))
    plain = Loader(NumberSource(100, 10), 10)
    plain.load_state_dict(state)
    rest = [batch["sample"].tolist() for batch in plain]
    assert sorted(i for batch in taken + rest for i in batch) == list(range(100))


def test_iterator_goes_through_epochs_and_stops():
    iterator = JaxIterator(Loader(NumberSource(30, 10), 10), num_epochs=3)
    batches = list(iterator)
    assert len(batches) == 9
    assert iterator.epoch == 3
    assert next(iterator, None) is None
