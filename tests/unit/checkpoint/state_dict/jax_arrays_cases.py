"""Arrays of JAX in a state, on four devices that are all the CPU."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtruntime.checkpoint.state_dict import describe, flatten, rebuild
from tests.support.state_dict_round_trip import round_trip, same_array, stored

DTYPES = "bool int8 uint16 int32 float16 float32 bfloat16 float8_e4m3fn float8_e5m2 int4 complex64"


def alike(one, other):
    return one.dtype == other.dtype and same_array(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", DTYPES.split())
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_arrays_are_restored_with_type_shape_and_values(name, shape):
    array = jnp.arange(6).astype(name)[: int(np.prod(shape))].reshape(shape)
    back = round_trip({"x": array})["x"]
    assert isinstance(back, jax.Array)
    assert alike(back, array)


def test_arrays_of_64_bits_are_restored_whatever_the_setting():
    with jax.enable_x64(True):
        array = jnp.array([1.1, 2.2], "float64")
    back = round_trip(array)
    assert alike(back, array)
    assert jnp.ones(1, float).dtype == "float32"


def test_memory_is_the_arrays_own():
    array = jnp.arange(5.0)
    view = flatten({"x": array}).buffers[0].memory()
    assert view is not None
    assert np.shares_memory(np.frombuffer(view, np.uint8), np.asarray(array))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_continue_from_their_state(impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    back = round_trip({"keys": keys, "old": jax.random.PRNGKey(3)})
    assert back["keys"].dtype == keys.dtype
    assert back["keys"].shape == keys.shape
    assert alike(jax.random.normal(back["keys"][1]), jax.random.normal(keys[1]))
    assert alike(back["old"], jax.random.PRNGKey(3))


def test_same_array_twice_is_restored_as_one():
    array = jnp.ones(3)
    back = round_trip([array, {"again": array}])
    assert back[0] is back[1]["again"]


def test_array_sharded_over_local_devices_is_stored_whole_and_once():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    array = jax.device_put(
        jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, PartitionSpec("x", None))
    )
    (buffer,) = flatten({"x": array}).buffers
    assert buffer.memory() is None
    assert stored({"x": array})[1] == [np.arange(32, dtype="f4").tobytes()]
    assert alike(round_trip(array), array)


def test_committed_arrays_go_back_to_their_device_and_others_stay_free():
    there = jax.devices()[2]
    here = jax.device_put(jnp.ones(2), jax.devices()[0])
    state = {"there": jax.device_put(jnp.ones(2), there), "here": here, "free": jnp.ones(2)}
    back = round_trip(state)
    assert back["here"].committed
    assert back["there"].devices() == {there}
    assert back["there"].committed
    assert not back["free"].committed


def test_arrays_go_where_they_are_mapped():
    array = jax.device_put(jnp.ones(2), jax.devices()[2])
    assert round_trip(array, map_location="cpu:1").devices() == {jax.devices()[1]}
    assert round_trip(array, map_location={"cpu:2": "cpu:3"}).devices() == {jax.devices()[3]}
    with pytest.raises(ValueError, match="tpu:0, which jax does not have"):
        round_trip(array, map_location="tpu:0")


def test_array_of_a_missing_device_goes_to_the_cpu_with_a_warning(caplog):
    tree = flatten(jnp.ones(2))
    tree.skeleton["arrays"][0]["device"] = "tpu:0"
    back = rebuild(tree.skeleton, lambda i, memory: tree.buffers[i].copy_into(memory))
    assert alike(back, jnp.ones(2))
    assert "checkpoint.device_missing" in caplog.text


def test_traced_and_deleted_arrays_are_refused():
    gone = jnp.ones(2) + 1
    gone.delete()
    with pytest.raises(ValueError, match=r"^state\['x'\] .*deleted or donated"):
        flatten({"x": gone})
    with pytest.raises(TypeError, match=r"^state\['x'\] .*outside of jit"):
        jax.jit(lambda x: flatten({"x": x}) and x)(jnp.ones(2))


def test_array_of_other_processes_is_refused_with_the_call_that_gathers_it(monkeypatch):
    array = jnp.ones(2)
    monkeypatch.setattr(type(array), "is_fully_addressable", property(lambda self: False))
    with pytest.raises(ValueError, match="process_allgather"):
        flatten({"x": array})


@pytest.mark.parametrize(
    "change",
    [{"impl": "evil"}, {"impl": None}, {"offset": 4}, {"strides": [4]}, {"dtype": "<f4"}],
    ids=repr,
)
def test_damaged_descriptions_are_refused(change):
    tree = flatten(jax.random.key(0))
    tree.skeleton["arrays"][0].update(change)
    with pytest.raises(ValueError, match=r"."):
        rebuild(tree.skeleton, lambda i, memory: tree.buffers[i].copy_into(memory))


def test_arrays_are_described():
    rows = describe(flatten({"x": jnp.ones((2, 3), "bfloat16"), "key": jax.random.key(0)}).skeleton)
    assert [(r.key, r.kind, r.dtype, r.shape, r.nbytes) for r in rows] == [
        ("x", "jax", "bfloat16", (2, 3), 12),
        ("key", "jax key", "uint32", (2,), 8),
    ]
