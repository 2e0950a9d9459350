"""Tensors that share memory: stored once, and restored so that they share it again."""

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dtruntime.checkpoint.state_dict import buffers, flatten
from dtruntime.checkpoint.state_dict.buffers import MemoryLayout, share_an_element
from tests.support.state_dict_round_trip import round_trip, stored


def sizes(state):
    return [len(part) for part in stored(state)[1]]


def test_one_tensor_under_two_names_stays_one():
    weight = torch.nn.Parameter(torch.randn(3))
    back = round_trip({"embedding": weight, "head": weight})
    assert back["embedding"] is back["head"]


def test_tied_weights_of_a_state_dict_stay_tied():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    )
    model[1].weight = model[0].weight
    state = model.state_dict()
    assert sizes(state) == [36]
    back = round_trip(state)
    back["0.weight"].fill_(7)
    assert back["1.weight"].eq(7).all()


def test_overlapping_views_share_one_storage_again():
    base = torch.arange(100.0)
    state = {"a": base[10:30], "b": base[20:40].view(4, 5), "c": base[25:26].squeeze()}
    assert sizes(state) == [30 * 4]
    back = round_trip(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    back["c"].fill_(-1)
    assert back["a"][15] == back["b"][1, 0] == -1
    assert len({t.untyped_storage().data_ptr() for t in back.values()}) == 1


def test_views_of_other_element_types_share_one_storage_again():
    base = torch.arange(8, dtype=torch.int16)
    state = {"bytes": base.view(torch.uint8)[3:9], "wide": base[4:8].view(torch.int64)}
    back = round_trip(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    back["bytes"][5] = 99
    assert back["wide"].view(torch.uint8)[0] == 99


def test_small_view_of_a_large_storage_is_stored_alone():
    base = torch.zeros(1_000_000)
    assert sizes({"view": base[5:8]}) == [12]
    assert sizes({"front": base[:4], "back": base[-4:]}) == [16, 16]


def test_column_of_a_matrix_is_stored_alone():
    matrix = torch.arange(600.0).view(20, 30)
    state = {"one": matrix[:, 3], "other": matrix[:, 4]}
    assert sizes(state) == [80, 80]
    back = round_trip(state)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_same_column_twice_is_stored_once_and_shared():
    matrix = torch.arange(600.0).view(20, 30)
    state = {"one": matrix[:, 3], "again": matrix[:, 3]}
    assert sizes(state) == [80]
    back = round_trip(state)
    back["one"].fill_(5)
    assert back["again"].eq(5).all()


def test_columns_that_make_up_a_matrix_are_stored_as_one():
    matrix = torch.arange(12.0).view(3, 4)
    state = {"left": matrix[:, :2], "right": matrix[:, 2:]}
    assert sizes(state) == [48]
    assert torch.equal(round_trip(state)["right"], matrix[:, 2:])


def test_overlapping_columns_are_restored_as_views_and_others_stay_apart():
    matrix = torch.arange(600.0).view(20, 30)
    state = {"one": matrix[:, 3:5], "two": matrix[:, 4:6], "far": matrix[:, 20]}
    assert sizes(state) == [(19 * 30 + 3) * 4, 80]
    back = round_trip(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    back["one"][0, 1] = -5
    assert back["two"][0, 0] == -5


def test_too_many_interleaved_views_are_stored_with_what_lies_between(monkeypatch):
    monkeypatch.setattr(buffers, "MAX_COMPARED", 3)
    matrix = torch.arange(600.0).view(20, 30)
    assert sizes([matrix[:, i] for i in range(4)]) == [(19 * 30 + 4) * 4]
    assert sizes([matrix[:, i] for i in range(3)]) == [80, 80, 80]


def test_whole_storage_is_stored_when_a_leaf_needs_it():
    flat = torch.arange(50.0)
    parts = {f"part{i}": flat[i * 10 : i * 10 + 10] for i in range(5)}
    assert sizes({**parts, "flat": flat}) == [200]
    back = round_trip({**parts, "flat": flat})
    back["flat"].zero_()
    assert not back["part3"].any()


def test_memory_of_two_owners_is_not_taken_for_one_storage():
    array = torch.arange(10.0).numpy()
    state = {"all": torch.from_numpy(array), "part": torch.from_numpy(array[3:5])}
    assert sizes(state) == [40, 8]
    assert round_trip(state)["part"].tolist() == [3.0, 4.0]


def test_buffer_is_named_after_its_first_use_and_knows_its_tensors():
    base = torch.arange(4.0)
    head, body = base[2:], base[:3]
    (buffer,) = flatten({"head": head, "body": body}).buffers
    assert buffer.key == "head"
    assert buffer.sources == (head, body)


def test_order_of_buffers_follows_use_not_memory():
    base = torch.zeros(30)
    state = {f"k{i}": base[start : start + 2] for i, start in enumerate((20, 0, 10))}
    assert [b.key for b in flatten(state).buffers] == ["k0", "k1", "k2"]


@settings(deadline=None)
@given(st.data())
def test_any_views_of_one_storage_keep_their_values_and_what_they_share(data):
    base = torch.arange(60, dtype=torch.int32)
    views = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(1, 4), max_size=2))
        strides = data.draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
        offset = data.draw(st.integers(0, 10))
        views.append(base.as_strided(shape, strides, offset))
    back = round_trip(views)
    assert all(torch.equal(a, b) for a, b in zip(back, views, strict=True))
    changed = data.draw(st.integers(0, len(views) - 1))
    try:
        views[changed].bitwise_not_()
    except RuntimeError:
        reject()  # torch writes to no tensor that overlaps itself.
    back[changed].bitwise_not_()
    assert all(torch.equal(a, b) for a, b in zip(back, views, strict=True))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (MemoryLayout(96, (4,), (8,), 4), MemoryLayout(100, (4,), (8,), 4), False),
        (MemoryLayout(96, (4,), (8,), 4), MemoryLayout(100, (4,), (4,), 4), True),
        (MemoryLayout(96, (3, 3), (40, 4), 4), MemoryLayout(108, (3, 2), (40, 4), 4), False),
        (MemoryLayout(100, (4,), (-8,), 4), MemoryLayout(76, (1,), (4,), 4), True),
    ],
)
def test_arrays_share_an_element_only_if_they_do(one, other, expected):
    assert share_an_element(one, other) is expected
