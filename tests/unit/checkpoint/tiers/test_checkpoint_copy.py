"""How packs are cut into blocks while they are copied."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.checkpoint.file_format.manifest import Chunk
from dtruntime.checkpoint.upload import checkpoint_copy
from dtruntime.checkpoint.upload.checkpoint_copy import blocks_of
from dtruntime.errors import CheckpointDamagedError

BLOCK = 100


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_copy, "BLOCK", BLOCK)
        yield


def chunk(position: int, stored: int) -> Chunk:
    return Chunk(0, stored, f"{position}", 0, position, stored)


@st.composite
def packs(draw: st.DrawFn) -> tuple[int, list[Chunk]]:
    """A pack's size and chunks, with gaps before, between and behind them."""
    at, chunks = 0, []
    for gap, stored in draw(st.lists(st.tuples(st.integers(0, 250), st.integers(1, BLOCK)))):
        chunks.append(chunk(at + gap, stored))
        at += gap + stored
    return at + draw(st.integers(0, 250)), draw(st.permutations(chunks))


@given(packs())
def test_blocks_cover_a_pack_and_cut_no_chunk(pack: tuple[int, list[Chunk]]) -> None:
    size, chunks = pack
    blocks = list(blocks_of(size, chunks))
    assert [start for start, _, _ in blocks] == [0, *(stop for _, stop, _ in blocks)][: len(blocks)]
    assert (blocks[-1][1] if blocks else 0) == size
    assert all(0 < stop - start <= BLOCK for start, stop, _ in blocks)
    held = [one for _, _, inside in blocks for one in inside]
    assert held == sorted(chunks, key=lambda one: one.position)
    for start, stop, inside in blocks:
        assert all(start <= c.position and c.position + c.stored <= stop for c in inside)


@pytest.mark.parametrize("chunks", [[(0, 20), (10, 20)], [(90, 20)]])
def test_chunks_that_cannot_lie_so_are_damage(chunks: list[tuple[int, int]]) -> None:
    with pytest.raises(CheckpointDamagedError):
        list(blocks_of(100, [chunk(*one) for one in chunks]))
