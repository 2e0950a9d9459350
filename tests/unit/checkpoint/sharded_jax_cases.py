"""Pytrees of sharded arrays, on eight devices that are all the CPU."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dtruntime.checkpoint import CheckpointManager
from dtruntime.checkpoint.jax import load_sharded, save_sharded
from dtruntime.checkpoint.load.array_slices import SliceReader
from dtruntime.errors import CheckpointNotFoundError, StorageError


@pytest.fixture
def manager(tmp_path: Path):
    with CheckpointManager(tmp_path / "ckpt") as made:
        yield made


def sharding(devices: int, *spec, shape: tuple[int, ...] | None = None) -> NamedSharding:
    """Over the first devices, as a row or as a grid with the axes a and b."""
    grid = np.array(jax.devices()[:devices]).reshape(shape or (devices,))
    return NamedSharding(Mesh(grid, ("a", "b")[: grid.ndim]), PartitionSpec(*spec))


def weights(rows: int = 24, columns: int = 16) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def same(array: jax.Array, expected: np.ndarray, where: jax.sharding.Sharding) -> bool:
    return (
        isinstance(array, jax.Array)
        and array.sharding == where
        and array.dtype == expected.dtype
        and np.array_equal(np.asarray(array), expected)
    )


PLACES = {
    "rows of 8": sharding(8, "a"),
    "columns of 4": sharding(4, None, "a"),
    "grid of 8": sharding(8, "a", "b", shape=(4, 2)),
    "rows of 2, copied": sharding(4, "a", shape=(2, 2)),
    "copies": sharding(8),
    "one": SingleDeviceSharding(jax.devices()[3]),
}


@pytest.mark.parametrize("saved", PLACES)
@pytest.mark.parametrize("loaded", PLACES)
def test_arrays_are_resharded(manager, saved, loaded):
    array = jax.device_put(weights(), PLACES[saved])
    save_sharded(manager, {"w": array}, 1)
    back = load_sharded(manager, {"w": PLACES[loaded]})
    assert same(back["w"], weights(), PLACES[loaded])


def test_eight_become_four_become_two(manager):
    tree = {"w": jax.device_put(weights(), sharding(8, "a"))}
    for step, devices in enumerate((8, 4, 2), 1):
        save_sharded(manager, tree, step)
        where = sharding(devices, "a")
        tree = load_sharded(manager, {"w": where}, step)
        assert same(tree["w"], weights(), where)
        assert len(tree["w"].addressable_shards) == devices


def test_copies_are_saved_once(manager):
    array = jax.device_put(weights(512, 512), sharding(8))
    saved = save_sharded(manager, {"w": array}, 1).wait()
    assert saved.size_bytes < 1.1 * array.nbytes


class Moments(NamedTuple):
    mean: object
    count: object  # type: ignore[assignment]


def test_whole_training_state_comes_back(manager):
    where = sharding(8, "a")
    keys = jax.device_put(jax.random.split(jax.random.key(5), 8), where)
    state = {
        "params": {"w": jax.device_put(weights(), where), "b": jnp.arange(3, dtype=jnp.bfloat16)},
        "optimizer": [Moments(jax.device_put(weights() * 2, where), jnp.int32(7)), None],
        "scalar": jax.device_put(jnp.float32(2.5), sharding(8)),
        "empty": jax.device_put(jnp.zeros((0, 4)), sharding(2)),
        "keys": keys,
        "step": 12,
        "name": "run",
        "host": np.arange(2000.0),
    }
    save_sharded(manager, state, 3, epoch=2, metrics={"loss": 1.0}, metadata={"who": "me"})
    target = jax.tree.map(lambda leaf: leaf * 0 if isinstance(leaf, np.ndarray) else leaf, state)
    back = load_sharded(manager, target)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert same(back["params"]["w"], weights(), where)
    assert back["params"]["b"].dtype == jnp.bfloat16
    assert back["params"]["b"].tolist() == [0, 1, 2]
    assert same(back["optimizer"][0].mean, weights() * 2, where)
    assert back["optimizer"][0].count == 7
    assert back["scalar"].sharding == sharding(8)
    assert back["scalar"] == 2.5
    assert back["empty"].shape == (0, 4)
    assert back["keys"].sharding == keys.sharding
    assert jax.random.uniform(back["keys"][3]) == jax.random.uniform(keys[3])
    assert (back["step"], back["name"]) == (12, "run")
    assert np.array_equal(back["host"], state["host"])
    info = manager.checkpoints()[-1]
    assert (info.epoch, info.metadata["who"]) == (2, "me")


def test_targets_are_shardings_structs_arrays_or_of_numpy(manager):
    where = sharding(4, "a")
    save_sharded(manager, {"w": jax.device_put(weights(), sharding(8, "a"))}, 1)
    struct = jax.ShapeDtypeStruct((24, 16), jnp.float32, sharding=where)
    for target in (where, struct, jax.device_put(weights() * 0, where)):
        assert same(load_sharded(manager, {"w": target})["w"], weights(), where)
    bare = load_sharded(manager, {"w": jax.ShapeDtypeStruct((24, 16), jnp.float32)})["w"]
    assert bare.devices() == {jax.devices()[0]}
    whole = load_sharded(manager, {"w": np.zeros((24, 16), np.float64)})["w"]
    assert isinstance(whole, np.ndarray)
    assert whole.dtype == np.float64
    assert np.array_equal(whole, weights())


def test_elements_are_converted_to_what_is_wanted(manager):
    where = sharding(8, "a")
    save_sharded(manager, {"w": jax.device_put(weights(), where)}, 1)
    target = jax.ShapeDtypeStruct((24, 16), jnp.bfloat16, sharding=where)
    back = load_sharded(manager, {"w": target})["w"]
    assert back.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(back), weights().astype(jnp.bfloat16))


def test_arrays_of_64_bits_stay_so(manager):
    with jax.enable_x64(True):
        array = jax.device_put(np.array([1.1, 2.2]), sharding(2, "a"))
    save_sharded(manager, [array], 1)
    (back,) = load_sharded(manager, [sharding(2)])
    assert back.dtype == np.float64
    assert np.asarray(back).tolist() == [1.1, 2.2]


def test_only_what_is_needed_is_read(manager, monkeypatch):
    array = jax.device_put(np.ones((8, 2**20), np.float32), sharding(8, "a"))
    save_sharded(manager, {"w": array, "other": array}, 1).wait()
    read = []
    into = SliceReader.into

    def counted(self, rank, offset, target):
        read.append(target.nbytes)
        into(self, rank, offset, target)

    monkeypatch.setattr(SliceReader, "into", counted)
    load_sharded(manager, {"w": sharding(8, "a")})
    assert read == [2**22] * 8


def test_arrays_may_be_donated_as_soon_as_save_returns(manager):
    array = jax.device_put(weights(1024, 1024), sharding(8, "a"))
    handle = save_sharded(manager, {"w": array}, 1)
    array.delete()
    handle.wait()
    assert same(load_sharded(manager, {"w": sharding(2, "a")})["w"], weights(1024, 1024),
                sharding(2, "a"))  # fmt: skip
    with pytest.raises(ValueError, match=r"\['w'\] was deleted or donated"):
        save_sharded(manager, {"w": array}, 2)


def test_newest_sharded_checkpoint_is_loaded_and_others_are_named(manager):
    with pytest.raises(CheckpointNotFoundError):
        load_sharded(manager, {"w": sharding(2)})
    save_sharded(manager, {"w": jnp.arange(4)}, 1).wait()
    manager.save({"w": 1}, step=2).wait()
    assert load_sharded(manager, {"w": sharding(2)})["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match=r"step 2 was not saved by save_sharded"):
        load_sharded(manager, {"w": sharding(2)}, 2)


def test_leaves_that_do_not_fit_are_named(manager):
    save_sharded(manager, {"w": jnp.arange(4), "n": 1}, 1)
    with pytest.raises(KeyError, match=r"has no \['v'\].*\['w'\]"):
        load_sharded(manager, {"v": sharding(2)})
    with pytest.raises(ValueError, match=r"\['w'\] was saved with shape \(4,\)"):
        load_sharded(manager, {"w": jnp.arange(5)})
    with pytest.raises(ValueError, match=r"\['w'\] is an array, and its target a int"):
        load_sharded(manager, {"w": 3})
    with pytest.raises(TypeError, match=r"\['w'\] is inside a traced function"):
        jax.jit(lambda x: save_sharded(manager, {"w": x}, 2))(jnp.ones(2))


def test_damage_is_named_and_the_checkpoint_before_is_loaded(manager, tmp_path):
    for step in (1, 2):
        save_sharded(manager, {"w": jnp.full(5000, step, jnp.float32)}, step).wait()
    pack = sorted((tmp_path / "ckpt" / "packs").iterdir())[-1]
    raw = bytearray(pack.read_bytes())
    raw[9000] ^= 1
    pack.write_bytes(raw)
    assert load_sharded(manager, {"w": sharding(2)})["w"][0] == 1
    with pytest.raises(StorageError, match=rf"step 2 is damaged.*{pack.name}"):
        load_sharded(manager, {"w": sharding(2)}, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda index: index["entries"][0]["shards"].pop(), "0 of the 12 elements"),
        (lambda index: index["entries"][0]["shards"][0].__setitem__(2, 9), "lacks a shard"),
        (lambda index: index["entries"][0].update(dtype="<f8"), "bytes for"),
        (lambda index: index["entries"][0].update(dtype="|O"), "not a type"),
        (lambda index: index.update(processes=2), "1 of 2 processes"),
        (lambda index: index.pop("entries"), "entries"),
    ],
)
def test_index_that_lies_is_an_error(manager, change, named):
    where = sharding(2, "a")
    array = jax.device_put(np.ones((24,), np.float32), where)
    shards = [shard.data for shard in array.addressable_shards]
    index = {
        "entries": [
            {
                "type": "array",
                "name": "['w']",
                "shape": [24],
                "dtype": "<f4",
                "shards": [[[0], [12], 0], [[12], [12], 1]],
            }
        ],
        "process": 0,
        "processes": 1,
    }
    state = {"shards": shards, "values": []}
    notes = {"strata.arrays": "jax"}
    manager.save({**state, "index": msgspec.json.encode(index).decode()}, 1, metadata=notes)
    assert load_sharded(manager, {"w": where}, 1)["w"].sum() == 24
    change(index)
    manager.save({**state, "index": msgspec.json.encode(index).decode()}, 2, metadata=notes)
    with pytest.raises(StorageError, match=named):
        load_sharded(manager, {"w": where}, 2)
