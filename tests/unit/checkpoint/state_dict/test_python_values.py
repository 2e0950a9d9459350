"""Python values in a state: restored exactly, or refused by name."""

import enum
import gc
import io
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.checkpoint.state_dict import flatten
from tests.support.state_dict_round_trip import restored, round_trip, same, stored

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec=None))
    | st.binary(max_size=2000)
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def containers(inner):
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.binary(max_size=2000).map(bytearray)
    )


@given(st.recursive(scalars, containers, max_leaves=20))
def test_nested_values_are_restored_with_types_and_bits(state):
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000000, 0x7FF8000000000123, 0xFFF8000000000000, 1 << 63, 0x7FF << 52, 1]
)
def test_floats_are_restored_bit_by_bit(bits):
    value = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    back = round_trip({"x": value, "z": complex(value, value)})
    assert struct.pack(">d", back["x"]).hex() == f"{bits:016x}"
    assert struct.pack(">d", back["z"].imag).hex() == f"{bits:016x}"


def test_integers_of_many_digits_are_restored():
    value = -(7**20_000)
    assert round_trip([value, 2**63, 2**63 - 1, -(2**63)]) == [value, 2**63, 2**63 - 1, -(2**63)]


def test_types_and_order_of_keys_are_kept():
    state = {1: "int", "1": "str", 2.0: "float", None: 0, (1, "a", (b"x", None)): 1, False: 2}
    back = round_trip(state)
    assert list(map(repr, back.items())) == list(map(repr, state.items()))


def test_defaultdict_and_named_tuple_come_back_as_dict_and_tuple():
    Point = namedtuple("Point", "x y")
    back = round_trip({"d": defaultdict(list, a=[1]), "p": Point(1, [2])})
    assert type(back["d"]) is dict
    assert type(back["p"]) is tuple
    assert back == {"d": {"a": [1]}, "p": (1, [2])}


def test_long_bytes_are_buffers_and_short_ones_are_not():
    state = {"short": b"s" * 1024, "long": b"l" * 1025, "array": bytearray(b"a" * 5000)}
    tree = flatten(state)
    assert [(b.key, b.nbytes) for b in tree.buffers] == [("long", 1025), ("array", 5000)]
    assert same(round_trip(state), state)


def test_long_bytes_used_twice_are_stored_once():
    data = bytes(5000)
    tree = flatten([data, {"again": data}])
    assert [b.key for b in tree.buffers] == ["0"]


def test_restored_bytearray_belongs_to_the_state_alone():
    skeleton, parts = stored(bytearray(5000))
    back = restored(skeleton, parts)
    back.append(1)
    assert len(back) == 5001


def test_five_thousand_levels_are_restored():
    state: list[Any] = []
    bottom: Any = state
    for level in range(5000):
        inner: Any = {"deeper": [level]} if level % 2 else [level]
        (bottom if isinstance(bottom, list) else bottom["deeper"]).append(inner)
        bottom = inner
    back, depth = round_trip(state), 0
    while True:
        found = back["deeper"] if isinstance(back, dict) else back
        inner = [item for item in found if not isinstance(item, int)]
        if not inner:
            break
        back, depth = inner[0], depth + 1
    assert depth == 5000


def test_cycle_is_refused_where_it_closes():
    state: dict[str, Any] = {"a": [1, {"b": None}]}
    state["a"][1]["b"] = state["a"]
    with pytest.raises(ValueError, match=r"^state\['a'\]\[1\]\['b'\] contains itself"):
        flatten(state)


def test_container_used_twice_is_no_cycle():
    shared = [1, 2]
    back = round_trip({"a": shared, "b": (shared, shared)})
    assert back == {"a": [1, 2], "b": ([1, 2], [1, 2])}


def test_state_that_doubles_at_every_level_is_refused_before_memory_runs_out(monkeypatch):
    monkeypatch.setattr("dtruntime.checkpoint.state_dict.flattening.MAX_NODES", 10_000)
    state = []
    for _ in range(60):
        state = [state, state]
    with pytest.raises(ValueError, match="has more than 10,000 values"):
        flatten(state)


class Color(enum.IntEnum):
    RED = 1


@dataclass
class Settings:
    rate: float = 0.1


class Model:
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (print, "is a function"),
        (lambda: 0, "is a function"),
        (Model, "is a class"),
        (pytest, "is a module"),
        (Color.RED, r"member of an enumeration .*\.value"),
        (Settings(), "dataclass .*asdict"),
        (Model(), r"save its \.state_dict"),
        (Path("x"), "is a path"),
        (io.BytesIO(), "is a file"),
        (memoryview(b"x"), "is a memoryview"),
        (Counter("ab"), "is a subclass of dict"),
        (object(), "never pickled"),
        (range(3), "is a builtins.range"),
        ({object(): 1}, "has the key object"),
        ({1, frozenset()}, "has the key frozenset"),
        ({Color.RED: 1}, "has the key Color"),
    ],
)
def test_unsupported_value_is_refused_with_its_place_and_a_remedy(value, reason):
    state = {"optimizer": {"x": [0, 0, 0, value]}}
    with pytest.raises(TypeError, match=rf"^state\['optimizer'\]\['x'\]\[3\] .*{reason}"):
        flatten(state)


def test_unsupported_state_itself_is_named_so():
    with pytest.raises(TypeError, match=r"^state is a builtins\.object"):
        flatten(object())


def test_key_nested_too_deep_is_refused():
    key: tuple[Any, ...] = ()
    for _ in range(20):
        key = (key,)
    with pytest.raises(TypeError, match="tuple of more than 16 levels"):
        flatten({key: 1})


def test_sets_are_described_alike_whatever_their_order():
    names = [f"name{i}" for i in range(50)]
    backwards = names[::-1]
    one, other = set(names), set(backwards)
    assert flatten(one).skeleton == flatten(other).skeleton
    assert flatten(one).skeleton["nodes"][0][1] == sorted(names)


def test_buffers_have_names_of_their_own_even_where_keys_read_alike():
    tree = flatten({1: bytes(2000), "1": bytes(2001), "a": {"b": bytes(2002)}, "a/b": bytes(2003)})
    assert [b.key for b in tree.buffers] == ["1", "1#2", "a/b", "a/b#2"]


def test_lone_surrogates_do_not_keep_a_state_from_being_json():
    tree = flatten({"\ud800": bytes(2000), "x": "\udfff"})
    msgspec.json.encode(tree.skeleton)
    assert list(round_trip({"\ud800": 1})) == ["\ud800"]


@pytest.mark.parametrize("running", [True, False])
def test_garbage_collection_is_left_as_it_was(running):
    was = gc.isenabled()
    try:
        (gc.enable if running else gc.disable)()
        flatten([1])
        with pytest.raises(TypeError):
            flatten([object()])
        assert gc.isenabled() is running
    finally:
        (gc.enable if was else gc.disable)()


def test_copying_into_memory_of_another_size_is_refused():
    buffer = flatten(bytes(2000)).buffers[0]
    with pytest.raises(ValueError, match="state has 2000 bytes"):
        buffer.copy_into(memoryview(bytearray(1999)))
    with pytest.raises(ValueError, match="read-only"):
        buffer.copy_into(memoryview(bytes(2000)))
