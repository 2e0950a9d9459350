"""Buffers lie where arrays can be used, and chunks follow large buffers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dtruntime.checkpoint.file_format.chunks import (
    ALIGNMENT,
    CHUNK,
    FIRST_GROUP,
    GROUP,
    LARGE,
    PAGE,
    grouped,
    lay_out,
    packed,
)

sizes = st.lists(st.one_of(st.integers(1, 5000), st.integers(LARGE - 2, 3 * CHUNK)), max_size=30)


@given(sizes)
def test_buffers_do_not_overlap_and_chunks_tile_the_stream(given_sizes):
    layout = lay_out(given_sizes)
    at = 0
    for offset, size in zip(layout.offsets, given_sizes, strict=True):
        assert offset >= at
        assert offset % ALIGNMENT == 0
        at = offset + size
    assert at <= layout.length
    assert layout.bounds[0] == 0
    assert layout.bounds[-1] == layout.length
    assert all(0 < stop - start <= CHUNK for start, stop in layout.chunks())


@given(sizes)
def test_large_buffers_have_chunks_of_their_own(given_sizes):
    layout = lay_out(given_sizes)
    for offset, size in zip(layout.offsets, given_sizes, strict=True):
        if size >= LARGE:
            assert offset % PAGE == 0
            assert offset in layout.bounds
            end = -(-(offset + size) // PAGE) * PAGE
            assert end in layout.bounds


@given(sizes, sizes)
def test_large_buffers_keep_their_chunks_when_small_ones_before_them_change(before, after):
    """Only where they begin may differ, so that they are recognised."""
    big = 3 * CHUNK + 17

    def cut(small):
        layout = lay_out([*small, big])
        start = layout.offsets[-1]
        return [bound - start for bound in layout.bounds if bound >= start]

    assert cut(before) == cut(after)


def test_nothing_has_no_chunks():
    layout = lay_out([])
    assert (layout.length, list(layout.chunks())) == (0, [])


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_chunks_are_packed_in_order_and_as_many_as_fit(lengths, size):
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    packs = list(packed(bounds, size))
    assert [piece for pack in packs for piece in pairwise(pack)] == list(pairwise(bounds))
    for pack, after in pairwise(packs):
        assert after[1] - pack[0] > size
    for pack in packs:
        assert len(pack) == 2 or pack[-1] - pack[0] <= size
        assert len(pack) >= 2


@given(st.lists(st.integers(1, CHUNK), max_size=40), st.integers(0, 2))
def test_groups_tile_a_stretch_and_only_the_first_of_a_stream_is_small(lengths, start):
    bounds = [start]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    groups = list(grouped(bounds))
    assert [piece for group in groups for piece in pairwise(group)] == list(pairwise(bounds))
    sizes = [group[-1] - group[0] for group in groups]
    assert all(size <= GROUP for size in sizes)
    if start == 0 and sizes:
        assert sizes[0] <= FIRST_GROUP
        assert len(sizes) > 1 or bounds[-1] <= FIRST_GROUP
