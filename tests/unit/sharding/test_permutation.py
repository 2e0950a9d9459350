from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.sharding import Permutation, shuffled

HUGE = 10**12
keys = st.lists(st.integers(), max_size=3)


@given(st.integers(0, 3000), keys)
def test_every_value_comes_once(n, key):
    order = Permutation(n, *key).slice(0, n)
    assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", range(70))
def test_every_small_length_is_a_bijection(n):
    assert sorted(Permutation(n, 5)) == list(range(n))


@given(st.integers(1, HUGE), keys, st.data())
def test_the_inverse_finds_each_position(n, key, data):
    order = Permutation(n, *key)
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    values = order.take(positions)
    assert ((values >= 0) & (values < n)).all()
    assert order.indices(values).tolist() == positions
    assert order.take(order.indices(positions)).tolist() == positions


@given(st.integers(1, HUGE), keys, st.data())
def test_one_at_a_time_agrees_with_many(n, key, data):
    order = Permutation(n, *key)
    position = data.draw(st.integers(0, n - 1))
    value = order[position]
    assert order.take([position]).tolist() == [value]
    assert order.index(value) == position == order.indices([value])[0]


def test_a_slice_of_a_huge_order_is_the_same_wherever_it_starts():
    order = Permutation(HUGE, 1, 2)
    whole = order.slice(HUGE - 100_000, HUGE)
    assert np.array_equal(whole[60_000:], order.slice(HUGE - 40_000, HUGE))
    assert np.unique(whole).size == whole.size
    assert list(islice(order, 3)) == order.slice(0, 3).tolist()


def test_shape_is_kept():
    order = Permutation(100, 1)
    grid = np.arange(100).reshape(4, 25)
    assert order.take(grid).shape == (4, 25)
    assert order.take([]).size == 0
    assert order.take(np.array([], dtype=np.int64)).dtype == np.int64


def test_keys_give_unrelated_orders():
    orders = [Permutation(10_000, 7, epoch).slice(0, 10_000) for epoch in range(20)]
    for one, other in pairwise(orders):
        assert np.count_nonzero(one == other) < 12
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.06


@pytest.mark.parametrize("n", [6, 10])
def test_every_value_is_about_equally_often_at_every_position(n):
    keyed = 200 * n
    seen = np.zeros((n, n))
    for key in range(keyed):
        seen[np.arange(n), Permutation(n, 3, key).slice(0, n)] += 1
    assert seen.min() > 200 * 0.7
    assert seen.max() < 200 * 1.3


def test_what_is_outside_is_refused():
    order = Permutation(10, 1)
    for position in (-1, 10):
        with pytest.raises(IndexError, match="outside a permutation of 10"):
            order[position]
        with pytest.raises(IndexError, match="outside a permutation of 10"):
            order.index(position)
        with pytest.raises(IndexError, match="outside a permutation of 10"):
            order.take([0, position])
    with pytest.raises(IndexError, match="slice 3:11"):
        order.slice(3, 11)
    with pytest.raises(IndexError):
        Permutation(0)[0]


@pytest.mark.parametrize("n", [-1, 2**62 + 1])
def test_an_impossible_length_is_refused(n):
    with pytest.raises(ValueError, match="length"):
        Permutation(n)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError):
        Permutation(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Permutation(10, "seed")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integers"):
        Permutation(10).take([0.5])


@given(st.integers(0, 300_000), st.integers(0, 2**64))
@settings(max_examples=40, deadline=None)
def test_table_is_a_permutation_of_any_length(n, key) -> None:
    table = shuffled(n, key)
    assert np.array_equal(np.sort(table), np.arange(n))
    assert np.array_equal(table, shuffled(n, key))


def test_table_differs_by_key_and_mixes_well() -> None:
    n = 80_000
    first, second = shuffled(n, 1, 0), shuffled(n, 1, 1)
    assert np.mean(first == second) < 0.001
    for table in (first, second):
        assert abs(np.corrcoef(table, np.arange(n))[0, 1]) < 0.02
        assert abs(np.corrcoef(table[:-1], table[1:])[0, 1]) < 0.02
        assert np.mean(np.abs(np.diff(table))) == pytest.approx(n / 3, rel=0.02)


def test_table_is_the_same_everywhere() -> None:
    assert shuffled(12, 7, 3).tolist() == [3, 2, 7, 4, 0, 9, 11, 8, 10, 5, 1, 6]
