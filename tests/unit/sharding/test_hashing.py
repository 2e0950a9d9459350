import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.sharding.hashing import fold, mix, mix_array

words = st.integers(0, 2**64 - 1)


@given(st.lists(words, max_size=20))
def test_arrays_and_single_numbers_hash_alike(values):
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(v) for v in values]


@given(st.lists(st.integers(), max_size=4), st.lists(st.integers(), max_size=4))
def test_different_keys_fold_to_different_hashes(one, other):
    assert (fold(*one) == fold(*other)) == (one == other)
