"""What is asked of a store to load chunks, and where their bytes go."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime import CheckpointManager
from dtruntime.checkpoint.file_format.manifest import Chunk, Pack, Part
from dtruntime.checkpoint.load.pack_reader import TOGETHER, ChunkRead, PartReader, pack_reads
from dtruntime.errors import CheckpointDamagedError, StorageError
from dtruntime.storage import open_backend
from dtruntime.testing import RecordingBackend
from dtruntime.testing.backends import Call

MIB = 2**20


def _chunk(pack: int, position: int, size: int, codec: str = "") -> Chunk:
    return Chunk(0, size, f"{pack}-{position}", pack, position, size, codec)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 3 * TOGETHER), st.integers(0, 1)), max_size=20
    )
)
def test_requests_are_for_every_byte_once_and_cross_no_boundary(
    drawn: list[tuple[int, int, int]],
) -> None:
    ends = [4096, 4096, 4096]
    arrivals = []
    for pack, size, gap in drawn:
        arrivals.append(ChunkRead(_chunk(pack, ends[pack] + gap, size)))
        ends[pack] += gap + size
    found = list(pack_reads(reversed(arrivals)))
    covered: dict[str, list[tuple[int, int]]] = {one.chunk.digest: [] for one in arrivals}
    for request in found:
        assert request.start // TOGETHER == (request.stop - 1) // TOGETHER
        at = request.start
        for arrival, first, last in request.pieces:
            assert arrival.chunk.pack == request.pack
            assert arrival.chunk.position + first == at
            at += last - first
            covered[arrival.chunk.digest].append((first, last))
        assert at == request.stop
    for arrival in arrivals:
        at = 0
        for first, last in covered[arrival.chunk.digest]:
            assert first == at
            at = last
        assert at == arrival.chunk.stored
    apart = sum(
        1
        for one, other in pairwise(found)
        if (one.pack, one.stop) == (other.pack, other.start) and one.stop % TOGETHER
    )
    assert not apart, "what lies together is asked for together"


def test_bytes_arrive_where_they_are_wanted_and_are_copied_for_others() -> None:
    arrival = ChunkRead(_chunk(0, 4096, 8))
    one, other, some = bytearray(8), bytearray(8), bytearray(3)
    arrival.add(0, memoryview(one))
    arrival.add(0, memoryview(other))
    arrival.add(2, memoryview(some))
    arrival.stored()[:] = b"abcdefgh"
    assert one == b"abcdefgh"
    assert not arrival.has_arrived(5)
    assert arrival.has_arrived(3)
    arrival.hand_out(arrival.stored())
    assert [one, other, some] == [b"abcdefgh", b"abcdefgh", b"cde"]


def _reads(folder: Path, state: dict[str, np.ndarray]) -> list[Call]:
    """What is read to load a state that has just been saved."""
    recorded = RecordingBackend(open_backend(folder))
    with CheckpointManager(recorded) as manager:
        manager.save(state, 1).wait()
        manager.wait()
        recorded.reset()
        loaded = manager.load_state(1)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
    return [call for call in recorded.calls if call.operation.startswith("read")]


def test_layers_with_their_biases_are_loaded_in_few_requests(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    state = {}
    for layer in range(40):
        state[f"{layer}.weight"] = rng.random(MIB // 8)
        state[f"{layer}.bias"] = rng.random(100 + layer)
    reads = _reads(tmp_path, state)
    assert [call.operation for call in reads] == ["read_into"] * 3  # 40 MiB, and a little


def test_what_occurs_many_times_is_read_once(tmp_path: Path) -> None:
    state = {f"{n}": np.full(MIB, 7, np.uint8) for n in range(20)}
    reads = _reads(tmp_path, state)
    assert sum(call.size for call in reads) == MIB


class Unreadable(RecordingBackend):
    """Its disk fails at a read, once."""

    left = 0

    def _read_into(self, name: str, offset: int, views: list[memoryview]) -> None:
        self.left -= 1
        if not self.left:
            for view in views:
                view[:] = bytes(view.nbytes)
            error = StorageError("a bad sector")
            error.errno = errno.EIO
            raise error
        super()._read_into(name, offset, views)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_chunks_of_a_request_that_fails_are_read_alone(
    tmp_path: Path, number: int, compression: str
) -> None:
    """Also those of which another request has a piece."""
    rng = np.random.default_rng(number)
    state = {f"{n}": rng.integers(0, 9, 7 * MIB + 5, np.uint8) for n in range(6)}
    with CheckpointManager(tmp_path, compression=compression) as manager:
        manager.save(state, 1).wait()
    storage = Unreadable(open_backend(tmp_path))
    with CheckpointManager(storage) as manager:
        assert manager.steps() == [1]
        storage.left = number
        loaded = manager.load_state(1)
        # One of three requests failed; compressed, there are fewer.
        assert storage.left == number - 3 or compression == "gzip"
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())


@pytest.mark.parametrize(
    "change",
    [
        {"length": 2**50, "stored": 2**50},
        {"stored": 2**50, "codec": "zstd"},
        {"stored": 0},
        {"position": -1},
        {"length": 2**50, "codec": "gzip"},
        {"pack": 7},
    ],
)
def test_chunks_that_cannot_be_are_damage_and_take_no_memory(
    tmp_path: Path, change: dict[str, object]
) -> None:
    backend = open_backend(tmp_path)
    backend.write("packs/a", bytes(100))
    chunk = msgspec.structs.replace(Chunk(0, 100, "0" * 32, 0, 0, 100), **change)
    part = Part(
        rank=0,
        kind="bytes",
        length=chunk.length,
        chunks=(chunk,),
        packs=(Pack("packs/a", 2**60),),
        extents=(),
        skeleton=None,
    )
    reader = PartReader(backend, part, "step 1")
    with pytest.raises(CheckpointDamagedError):
        reader.read_into([(0, memoryview(bytearray(50)))])


def test_gap_between_chunks_is_damage(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    backend.write("packs/a", bytes(100))
    chunks = (Chunk(0, 10, "0" * 32, 0, 0, 10), Chunk(50, 10, "0" * 32, 0, 10, 10))
    part = Part(
        rank=0,
        kind="bytes",
        length=60,
        chunks=chunks,
        packs=(Pack("packs/a", 100),),
        extents=(),
        skeleton=None,
    )
    with pytest.raises(CheckpointDamagedError, match="has no bytes"):
        PartReader(backend, part, "step 1").read_into([(0, memoryview(bytearray(60)))])
