"""Chunks come back as they were, and are only encoded where it pays."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.checkpoint.file_format.chunks import Compressor, apply_difference, decode, difference
from dtruntime.errors import StorageError

METHODS = ("none", "gzip", "zstd")


@pytest.mark.parametrize("method", METHODS)
@given(data=st.binary(max_size=3000), times=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_what_was_encoded_comes_back(method, data, times):
    whole = memoryview(data * times)
    codec, stored = Compressor(method).encode(whole)
    assert codec in ("", method)
    assert len(stored) <= len(whole)
    assert bytes(decode(codec, stored, len(whole))) == bytes(whole)


@pytest.mark.parametrize("method", ["gzip", "zstd"])
def test_noise_is_stored_as_it_is_and_zeros_are_not(method):
    noise = memoryview(os.urandom(2**20))
    assert Compressor(method).encode(noise) == ("", noise)
    codec, stored = Compressor(method).encode(memoryview(bytes(2**20)))
    assert codec == method
    assert len(stored) < 10_000


@given(st.binary(min_size=1, max_size=4000), st.sampled_from([1, 2, 4, 8]), st.data())
@settings(max_examples=60, deadline=None)
def test_difference_makes_the_new_of_the_old(old, width, data):
    new = bytearray(old)
    for place in data.draw(st.lists(st.integers(0, len(old) - 1), max_size=20)):
        new[place] ^= 1
    encoded = difference(memoryview(bytes(new)), old, width)
    if encoded is not None:
        assert apply_difference(encoded, old, width, len(old)) == bytes(new)


def test_small_changes_of_numbers_make_small_differences():
    rng = np.random.default_rng(0)
    old = rng.standard_normal(2**18).astype(np.float32)
    new = old * np.float32(1 + 2**-16)
    encoded = difference(memoryview(new.data).cast("B"), old.tobytes(), 4)
    assert encoded is not None
    assert len(encoded) < 0.6 * new.nbytes


@pytest.mark.parametrize("codec", ["gzip", "zstd", "delta"])
def test_damage_and_lies_about_the_length_are_errors(codec):
    method = "zstd" if codec == "delta" else codec
    stored = bytes(Compressor(method).encode(memoryview(bytes(100_000)))[1])
    for broken, length in [
        (stored[:-3], 100_000),
        (b"\x00" * 50, 100_000),
        (stored, 99_999),
        (stored, 2**40),
    ]:
        with pytest.raises(StorageError):
            decode(codec, broken, length)
    with pytest.raises(StorageError, match="does not know"):
        decode("lzma", stored, 10)


def test_unknown_method_is_named():
    with pytest.raises(ValueError, match="'lz4'"):
        Compressor("lz4")
