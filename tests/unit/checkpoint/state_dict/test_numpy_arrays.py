"""Arrays and scalars of numpy in a state."""

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from dtruntime.checkpoint.state_dict import flatten
from tests.support.state_dict_round_trip import round_trip, same, stored

ML_DTYPES = [
    np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4")
]
plain_dtypes = (
    st_np.scalar_dtypes()
    | st_np.byte_string_dtypes(min_len=1, max_len=9)
    | st_np.unicode_string_dtypes(min_len=1, max_len=9)
    | st_np.datetime64_dtypes()
    | st_np.timedelta64_dtypes()
)
dtypes = plain_dtypes | st_np.nested_dtypes(plain_dtypes, max_leaves=4)


@st.composite
def arrays(draw):
    """Arrays of any bits, in C or Fortran order, transposed, with gaps or backwards."""
    dtype = draw(dtypes | st.sampled_from(ML_DTYPES))
    shape = draw(st_np.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 128, count, np.uint8)
    array = np.ndarray(shape, dtype, raw.tobytes() or b"\0" * 64)
    change = draw(st.sampled_from(["none", "fortran", "transposed", "gaps", "backwards"]))
    if change == "fortran":
        return np.asfortranarray(array)
    if change == "transposed":
        return array.T
    step = {"gaps": 2, "backwards": -1}.get(change, 1)
    every: Any = (*[slice(None, None, step)] * array.ndim, ...)
    return array[every]


@settings(deadline=None)
@given(arrays())
def test_arrays_are_restored_with_type_shape_and_bits(array):
    assert same(round_trip(array), array)


@given(st.lists(arrays(), max_size=4))
def test_arrays_in_a_state_are_restored_in_their_places(found):
    state = {i: {"array": array, "shape": array.shape} for i, array in enumerate(found)}
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    "value",
    [
        *(np.dtype(code).type(1) for code in "?bBhHiIlLefdFD"),
        np.longdouble("1.25"),
        np.float32("nan"),
        np.datetime64("2026-01-02", "ns"),
        np.datetime64("NaT"),
        np.timedelta64(5, "s"),
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        np.array((1, 2.5), "i4,f8")[()],
        ml_dtypes.bfloat16(1.5),
        ml_dtypes.float8_e4m3fn(2),
        np.dtype("f4"),
        np.dtype([("a", "<i4"), ("b", ">f8", (2, 3))]),
        np.dtype({"names": ["a"], "formats": ["i2"], "offsets": [4], "itemsize": 12}),
        np.dtype("i1,i8", align=True),
        np.dtype(ml_dtypes.bfloat16),
    ],
    ids=repr,
)
def test_scalars_and_types_are_restored_with_their_type(value):
    back = round_trip([value])[0]
    assert type(back) is type(value)
    assert same(back, value)
    if isinstance(value, np.str_ | np.bytes_):
        assert len(back) == 2


@pytest.mark.parametrize("dtype", ["S0", "V0", np.dtype([])], ids=repr)
def test_elements_without_bytes_keep_their_type(dtype):
    array = np.ndarray((3,), dtype)
    back = round_trip(array)
    assert (back.dtype, back.shape) == (array.dtype, (3,))


def test_alignment_of_a_structured_type_is_kept():
    dtype = np.dtype("i1,i8", align=True)
    assert round_trip(np.zeros(2, dtype)).dtype.isalignedstruct


def test_fortran_order_is_kept_and_needs_no_copy():
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    memory = flatten(array).buffers[0].memory()
    assert memory is not None
    assert np.frombuffer(memory).tolist() == array.ravel("K").tolist()
    assert round_trip(array).flags.f_contiguous


def test_memory_is_the_arrays_own():
    array = np.arange(6, dtype="i4")
    view = flatten({"a": array}).buffers[0].memory()
    array[0] = 77
    assert view is not None
    assert np.frombuffer(view, "i4")[0] == 77


def test_view_with_gaps_is_copied_together():
    array = np.arange(1000.0)[::100]
    buffer = flatten({"a": array}).buffers[0]
    assert buffer.memory() is None
    assert buffer.nbytes == 80


def test_broadcast_array_is_stored_unexpanded():
    array = np.broadcast_to(np.arange(3.0), (1000, 3))
    _, parts = stored({"a": array})
    assert [len(part) for part in parts] == [24]
    assert same_values(round_trip({"a": array})["a"], array)


def same_values(one, other):
    return one.shape == other.shape and bool((one == other).all())


def test_same_array_twice_is_restored_as_one():
    array = np.arange(3)
    back = round_trip({"a": array, "b": [array]})
    assert back["a"] is back["b"][0]


def test_overlapping_views_are_stored_once_and_restored_as_views():
    base = np.arange(20, dtype="i4")
    state = {
        "back": base[10:0:-1],
        "front": base[5:15].reshape(2, 5),
        "bytes": base[3:4].view("u1"),
    }
    _, parts = stored(state)
    assert [len(part) for part in parts] == [14 * 4]
    back = round_trip(state)
    assert same(back, state)
    back["front"][0, 0] = 99
    assert back["back"][5] == 99


def test_bytes_between_fields_are_stored_as_they_are():
    dtype = np.dtype({"names": ["a"], "formats": ["i2"], "offsets": [2], "itemsize": 6})
    array = np.frombuffer(bytes(range(60)), dtype)[::2]
    assert stored(array)[1] == [b"".join(bytes(range(s, s + 6)) for s in range(0, 60, 12))]


def test_field_of_a_structured_array_is_restored():
    array = np.zeros(5, "i4,f8")
    array["f1"] = np.arange(5)
    assert same(round_trip(array["f1"]), np.arange(5.0))


def test_restored_arrays_are_aligned_and_writable():
    for array in round_trip([np.zeros(n, "i1") for n in (1, 3, 100)]):
        assert array.flags.writeable
        assert array.__array_interface__["data"][0] % 64 == 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.array([object()]), "has elements of type object"),
        (np.zeros(2, [("a", "O")]), "has elements of type"),
        (np.array(["a"], np.dtypes.StringDType()), "has elements of type StringDType"),
        (np.ma.array([1], mask=[True]), "is a MaskedArray"),
        (np.zeros(2, [((5.5, "a"), "i4")]), "titles of fields must be strings"),
        (np.random.default_rng(), "bit_generator"),
        (np.random.RandomState(), "get_state"),
        (np.float32, "is a class"),
    ],
)
def test_values_without_a_fixed_form_are_refused(value, reason):
    with pytest.raises(TypeError, match=rf"^state\['x'\]\[1\] .*{reason}"):
        flatten({"x": [0, value]})


def test_memory_map_is_restored_as_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "m", "i4", "w+", shape=(5,))
    mapped[:] = range(5)
    back = round_trip(mapped)
    assert type(back) is np.ndarray
    assert back.tolist() == [0, 1, 2, 3, 4]


def test_random_states_are_restored():
    generator = np.random.default_rng(7)
    legacy = np.random.RandomState(7)
    back = round_trip({"new": generator.bit_generator.state, "old": legacy.get_state()})
    other = np.random.default_rng()
    other.bit_generator.state = back["new"]
    assert other.random() == generator.random()
    second = np.random.RandomState()
    second.set_state(back["old"])
    assert second.rand() == legacy.rand()


WITHOUT_LIBRARIES = """
import sys
sys.modules["torch"] = sys.modules["jax"] = sys.modules["ml_dtypes"] = None
import numpy as np
from dtruntime.checkpoint.state_dict import Rebuild, describe, flatten, rebuild
tree = flatten({"a": np.arange(3), "b": [1, {2}]})
back = rebuild(tree.skeleton, lambda i, memory: tree.buffers[i].copy_into(memory))
assert back["a"].tolist() == [0, 1, 2] and back["b"] == [1, {2}]
entry = {"kind": "torch", "dtype": "float32", "shape": [1], "buffer": 0}
buffers = [{"key": "a", "nbytes": 4, "dtype": "float32"}]
skeleton = {"format": 1, "nodes": [["array", 0]], "arrays": [entry], "buffers": buffers}
assert describe(skeleton)[0].dtype == "float32"
for kind, dtype in ("torch", "float32"), ("jax", "<f4"), ("numpy", "bfloat16"):
    try:
        Rebuild(skeleton | {"arrays": [entry | {"kind": kind, "dtype": dtype}]})
    except ModuleNotFoundError as exc:
        assert "install" in str(exc), exc
    else:
        raise AssertionError(kind)
"""


def test_works_without_torch_and_jax_and_says_when_they_are_needed():
    subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES], check=True)


def test_neither_torch_nor_jax_is_imported_for_other_values():
    code = (
        "import sys, numpy\nfrom dtruntime.checkpoint.state_dict import flatten\n"
        "flatten({'a': numpy.ones(3)})\n"
        "assert not {'torch', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
