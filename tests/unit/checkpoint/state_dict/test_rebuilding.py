"""Restoring a state: in parts, onto devices, and from descriptions that nobody wrote so."""

import copy
import resource
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtruntime.checkpoint.state_dict import Rebuild, describe, flatten
from tests.support.state_dict_round_trip import restored, round_trip, stored


def example() -> dict[str, Any]:
    """A bit of everything, small enough to be damaged everywhere."""
    base = torch.arange(12, dtype=torch.float32)
    return {
        "model": {"w": base[:8].view(2, 4), "tied": base[4:], "p": torch.nn.Parameter(base * 2)},
        "optimizer": {0: {"step": torch.tensor(3.0), "m": torch.zeros(3, 2).t()}, None: (1.5, "x")},
        "numpy": np.arange(6, dtype="<i2").reshape(2, 3)[:, ::-1],
        "fields": np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
        "scalar": np.float32(2.5),
        "blob": bytes(range(256)) * 8,
        "odd": [float("inf"), 2**70, 1 + 2j, {1, "a"}, b"x", bytearray(b"y"), torch.Size([2])],
        "empty": torch.zeros(0, 3),
    }


def test_destinations_are_the_memory_that_is_restored():
    skeleton, parts = stored({"t": torch.arange(4), "n": np.arange(5), "b": b"z" * 3000})
    plan = Rebuild(skeleton)
    assert plan.sizes == {0: 32, 1: 40, 2: 3000}
    for index, memory in plan.destinations():
        assert not memory.readonly
        memory[:] = parts[index]
    back = plan.finish()
    assert back["t"].tolist() == [0, 1, 2, 3]
    assert back["n"].tolist() == [0, 1, 2, 3, 4]
    assert back["b"] == b"z" * 3000


def test_buffers_may_be_read_in_any_order():
    skeleton, parts = stored([torch.full((3,), i) for i in range(4)])
    plan = Rebuild(skeleton)
    for index in (2, 0, 3, 1):
        plan.destination(index)[:] = parts[index]
        plan.loaded(index)
    assert [t.tolist() for t in plan.finish()] == [[i] * 3 for i in range(4)]


def test_state_of_which_something_was_not_read_is_not_given():
    plan = Rebuild(stored([torch.ones(2), torch.ones(2)])[0])
    plan.destination(1)
    with pytest.raises(RuntimeError, match=r"buffers \[0\] were never read"):
        plan.finish()


def test_parts_are_restored_by_their_names_and_nothing_else_is_read():
    skeleton, parts = stored(example())
    plan = Rebuild(skeleton, keys=["optimizer/0", "numpy", "model/tied", "odd/1"])
    keys = [skeleton["buffers"][index]["key"] for index in plan.sizes]
    assert keys == ["model/w", "optimizer/0/step", "optimizer/0/m", "numpy"]
    for index, memory in plan.destinations():
        memory[:] = parts[index]
    back = plan.finish()
    assert list(back) == ["optimizer/0", "numpy", "model/tied", "odd/1"]
    assert back["optimizer/0"]["step"] == 3
    assert back["model/tied"].tolist() == list(range(4, 12))
    assert back["odd/1"] == 2**70


def test_name_that_is_not_there_is_an_error_that_shows_what_is():
    with pytest.raises(KeyError, match=r"no 'modle': it has model, optimizer, numpy"):
        Rebuild(stored(example())[0], keys=["modle"])


def test_name_of_two_values_is_an_error():
    with pytest.raises(ValueError, match="'1' names several values"):
        Rebuild(stored({1: 5, "1": 6, "2": 7})[0], keys=["1"])


def test_metadata_of_a_state_dict_comes_with_it():
    model = torch.nn.BatchNorm1d(2)
    back = round_trip({"m": model.state_dict()}, keys=["m"])["m"]
    assert back._metadata == model.state_dict()._metadata


def test_arrays_are_described_with_every_use():
    rows = describe(stored(example())[0])
    assert [tuple(row) for row in rows] == [
        ("model/w", "torch", "float32", (2, 4), 48, 0),
        ("model/tied", "torch", "float32", (8,), 48, 0),
        ("model/p", "parameter", "float32", (12,), 48, 1),
        ("optimizer/0/step", "torch", "float32", (), 4, 2),
        ("optimizer/0/m", "torch", "float32", (2, 3), 24, 3),
        ("numpy", "numpy", "int16", (2, 3), 12, 4),
        ("fields", "numpy", "void160", (2,), 40, 5),
        ("blob", "bytes", "uint8", (2048,), 2048, 6),
        ("empty", "torch", "float32", (0, 3), 0, None),
    ]


def test_tensor_of_a_missing_device_goes_to_the_cpu_with_one_warning(caplog):
    skeleton, parts = stored([torch.ones(2), torch.ones(3), torch.zeros(0)])
    for entry in skeleton["arrays"]:
        entry["device"] = "cuda:77"
    back = restored(skeleton, parts)
    assert [t.device.type for t in back] == ["cpu"] * 3
    assert caplog.text.count("checkpoint.device_missing") == 1
    assert caplog.records[0].fields["device"] == "cuda:77"


@pytest.mark.parametrize("where", ["cpu", torch.device("cpu"), {"cuda:77": "cpu"}])
def test_tensor_goes_where_it_is_mapped_without_a_warning(where, caplog):
    skeleton, parts = stored([torch.ones(2)])
    skeleton["arrays"][0]["device"] = "cuda:77"
    assert restored(skeleton, parts, map_location=where)[0].tolist() == [1, 1]
    assert not caplog.records


def test_mapping_to_a_missing_device_is_an_error_before_anything_is_read():
    skeleton, _ = stored([torch.ones(2)])
    for where in ("cuda:77", "meta", {"cpu": "nonsense"}):
        with pytest.raises(ValueError, match="which torch does not have here"):
            Rebuild(skeleton, map_location=where)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_are_stored_and_go_back_to_it():
    base = torch.arange(12.0, device="cuda:0")
    state = {"a": base[:8].view(2, 4), "b": base[4:], "gaps": torch.ones(4, 4, device="cuda")[:, 1]}
    back = round_trip(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert all(tensor.device == base.device for tensor in back.values())
    assert back["a"].untyped_storage().data_ptr() == back["b"].untyped_storage().data_ptr()
    assert all(t.device.type == "cpu" for t in round_trip(state, map_location="cpu").values())
    buffers: Any = flatten(state).buffers
    assert [(b.device, b.memory()) for b in buffers] == [("cuda:0", None)] * 2
    assert all(b.bytes().device == base.device for b in buffers)


ARRAY = {"kind": "numpy", "dtype": "<f4", "shape": [2], "buffer": 0}
BUFFER = {"key": "a", "nbytes": 8, "dtype": "float32"}


def skeleton_of(nodes=None, array=None, buffer=None):
    return {
        "format": 1,
        "nodes": [["array", 0]] if nodes is None else nodes,
        "arrays": [{**ARRAY, **(array or {})}],
        "buffers": [{**BUFFER, **(buffer or {})}],
    }


def test_the_skeleton_that_the_following_tests_damage_is_whole():
    assert restored(skeleton_of(), [bytes(8)]).tolist() == [0, 0]


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [["array", 1]],
        [["array", -1]],
        [["array", True]],
        [["array"]],
        [["array", 0], 1],
        [["list", 2], 1],
        [["list", -1]],
        [["list", 10**15], 1],
        [["list", "2"], 1, 2],
        [["dict", ["a", "a"]], 1, 2],
        [["dict", [["list", 0]]], 1],
        [["dict", [{}]], 1],
        [["state dict", ["a"]], 1],
        [["set", [["set", []]]]],
        [{"a": 1}],
        [["pickle", "gASVKAAAAAAAAACMBXBvc2l4"]],
        [["int", "zz"]],
        [["float", "00"]],
        [["complex", 1, "x"]],
        [["bytes", "***"]],
        [["str", "ff"]],
        [["numpy", "|O8", "AAAAAAAAAAA="]],
        [["numpy", "<f8", "AAAA"]],
        [["numpy dtype", "os.system"]],
        [["numpy str", 5]],
        [["torch dtype", "load"]],
        [["torch dtype", "__class__"]],
        [["torch device", "cpu:9999999"]],
        [["torch size", ["a"]]],
        [["torch size", [2**70]]],
        [["torch", "x"]],
    ],
    ids=repr,
)
def test_damaged_nodes_are_refused(nodes):
    with pytest.raises(ValueError, match=r"."):
        Rebuild(skeleton_of(nodes=nodes))


@pytest.mark.parametrize(
    "array",
    [
        {"shape": [3]},
        {"shape": [1]},
        {"shape": [2**43]},
        {"shape": [2**40, 2**40]},
        {"shape": [-2]},
        {"shape": [2, 0]},
        {"shape": [1] * 65},
        {"dtype": "<f8"},
        {"dtype": "|O8"},
        {"dtype": "object"},
        {"dtype": "f4"},
        {"dtype": {"fields": [["a", "<i4", 4]], "itemsize": 4}},
        {"dtype": {"fields": [["a", "<i4", 0], ["a", "<i4", 0]], "itemsize": 4}},
        {"dtype": {"base": "<i1", "shape": [2**31]}},
        {"dtype": {"base": "<i4", "shape": [-1]}},
        {"dtype": "<U999999999"},
        {"offset": 4},
        {"offset": -4},
        {"offset": 2**60},
        {"strides": [8]},
        {"strides": [-4]},
        {"strides": [4, 4]},
        {"strides": [2**60]},
        {"buffer": 1},
        {"buffer": -1},
        {"buffer": None},
        {"kind": "pickle"},
        {"kind": "bytes", "shape": [2, 4]},
        {"kind": "torch", "dtype": "<f4"},
        {"kind": "torch", "dtype": "save"},
        {"kind": "torch", "dtype": "float32", "strides": [-4], "offset": 4},
        {"kind": "torch", "dtype": "int32", "requires_grad": True},
        {"kind": "torch", "dtype": "int16", "strides": [6], "conj": True},
        {"extra": 1},
    ],
    ids=repr,
)
def test_damaged_arrays_are_refused(array):
    with pytest.raises(ValueError, match=r"."):
        restored(skeleton_of(array=array), [bytes(8)])


@pytest.mark.parametrize("nbytes", [0, -8, 7, 9, 2**43, 2**63, 2**70, 8.0, "8"])
def test_buffer_of_another_size_than_its_arrays_is_refused(nbytes):
    with pytest.raises(ValueError, match="damaged"):
        Rebuild(skeleton_of(buffer={"nbytes": nbytes}))


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [
        ({"strides": [-8], "offset": 4}, 8),
        ({"offset": 16}, 24),
        ({"shape": [2**40, 2**40], "strides": [0, 0]}, 4),
        ({"shape": [0, 2**40, 2**40], "buffer": None}, 8),
    ],
    ids=repr,
)
def test_arrays_that_leave_their_buffer_are_refused_before_memory_is_asked_for(array, nbytes):
    with pytest.raises(ValueError, match="damaged"):
        Rebuild(skeleton_of(array=array, buffer={"nbytes": nbytes}))


def test_tensor_between_its_elements_is_refused():
    array = {"kind": "torch", "dtype": "float32", "strides": [6]}
    with pytest.raises(ValueError, match="damaged"):
        restored(skeleton_of(array=array, buffer={"nbytes": 10}), [bytes(10)])


def test_arrays_of_two_libraries_in_one_buffer_are_refused():
    skeleton = skeleton_of(nodes=[["list", 2], ["array", 0], ["array", 1]])
    skeleton["arrays"].append({**ARRAY, "kind": "torch", "dtype": "float32"})
    with pytest.raises(ValueError, match="two libraries"):
        Rebuild(skeleton)


def test_format_of_a_later_version_is_named():
    with pytest.raises(ValueError, match="reads format 1 of state dicts, not 2: update"):
        Rebuild({**skeleton_of(), "format": 2})
    nothings: tuple[Any, ...] = (None, [], "x", {})
    for nothing in nothings:
        with pytest.raises(ValueError, match=r"."):
            Rebuild(nothing)


EXAMPLE, PARTS = stored(example())
ODD = [None, True, -1, 0, 1, 3, 2**31, 2**44, 2**63, 2**80, 1.5, "", "x", "torch", "numpy", [], {}]
values = st.sampled_from(ODD) | st.recursive(
    st.sampled_from([*ODD, "array", "list", "dict", "tuple", "<f4", "float32", "cuda:0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


PLACES = [path for path in places(EXAMPLE) if path]


@st.composite
def damaged(draw):
    """The example with one to three places replaced, removed or repeated."""
    skeleton = copy.deepcopy(EXAMPLE)
    for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        parent: Any = skeleton
        try:
            for key in path[:-1]:
                parent = parent[key]
            change = draw(st.sampled_from(["replace", "remove", "repeat"]))
            if change == "replace":
                parent[path[-1]] = draw(values)
            elif change == "remove":
                del parent[path[-1]]
            else:
                parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    return skeleton


def restore_any(skeleton):
    """Restore with whatever bytes there are."""
    describe(skeleton)
    plan = Rebuild(skeleton)
    assert sum(plan.sizes.values()) < 2**20, "memory is allocated that no shape asks for"
    for index, memory in plan.destinations():
        part = PARTS[index] if index < len(PARTS) else b""
        memory[: len(part)] = part[: len(memory)].ljust(len(memory[: len(part)]), b"\0")
    plan.finish()


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_damaged_skeletons_are_refused_or_restored_but_never_worse(skeleton):
    with suppress(ValueError):
        restore_any(skeleton)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_skeletons_with_damaged_bytes_are_refused_or_restored(data):
    text = bytearray(msgspec.json.encode(EXAMPLE))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'0159-"[]{},x'))
    with suppress(ValueError):
        restore_any(msgspec.json.decode(bytes(text)))


def test_absurd_sizes_allocate_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    huge = {"shape": [2**42 // 4]}
    plan = Rebuild(skeleton_of(array=huge, buffer={"nbytes": 2**42}))
    assert plan.sizes == {0: 2**42}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16
