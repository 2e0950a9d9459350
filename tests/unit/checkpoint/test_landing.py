"""What is asked of a store to load chunks, and where their bytes go."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime import CheckpointManager
from dtruntime.checkpoint import place
from dtruntime.checkpoint.format import Chunk
from dtruntime.checkpoint.landing import TOGETHER, Landing, requests_for
from dtruntime.storage import StorageBackend, open_backend
from dtruntime.testing import RecordingBackend

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
    landings = []
    for pack, size, gap in drawn:
        landings.append(Landing(_chunk(pack, ends[pack] + gap, size)))
        ends[pack] += gap + size
    found = list(requests_for(reversed(landings)))
    covered: dict[str, list[tuple[int, int]]] = {one.chunk.digest: [] for one in landings}
    for request in found:
        assert request.start // TOGETHER == (request.stop - 1) // TOGETHER
        at = request.start
        for landing, first, last in request.pieces:
            assert landing.chunk.pack == request.pack
            assert landing.chunk.position + first == at
            at += last - first
            covered[landing.chunk.digest].append((first, last))
        assert at == request.stop
    for landing in landings:
        at = 0
        for first, last in covered[landing.chunk.digest]:
            assert first == at
            at = last
        assert at == landing.chunk.stored
    apart = sum(
        1
        for one, other in pairwise(found)
        if (one.pack, one.stop) == (other.pack, other.start) and one.stop % TOGETHER
    )
    assert not apart, "what lies together is asked for together"


def test_bytes_arrive_where_they_are_wanted_and_are_copied_for_others() -> None:
    landing = Landing(_chunk(0, 4096, 8))
    one, other, some = bytearray(8), bytearray(8), bytearray(3)
    landing.add(0, memoryview(one))
    landing.add(0, memoryview(other))
    landing.add(2, memoryview(some))
    landing.stored()[:] = b"abcdefgh"
    assert one == b"abcdefgh"
    assert not landing.has_arrived(5)
    assert landing.has_arrived(3)
    landing.hand_out(landing.stored())
    assert (one, other, some) == (b"abcdefgh", b"abcdefgh", b"cde")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordingBackend]:
    made: list[RecordingBackend] = []

    def opened(url: str, **options: object) -> StorageBackend:
        made.append(RecordingBackend(open_backend(url, **options)))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(place, "open_backend", opened)
    return made


def test_layers_with_their_biases_are_loaded_in_few_requests(
    tmp_path: Path, recorded: list[RecordingBackend]
) -> None:
    rng = np.random.default_rng(5)
    state = {}
    for layer in range(40):
        state[f"{layer}.weight"] = rng.random(MIB // 8)
        state[f"{layer}.bias"] = rng.random(100 + layer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1).wait()
        manager.wait()
        recorded[0].reset()
        loaded = manager.load_state(1)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
    reads = [call for call in recorded[0].calls if call.operation.startswith("read")]
    assert [call.operation for call in reads] == ["read_into"] * 3  # 40 MiB, and a little


def test_what_occurs_many_times_is_read_once(
    tmp_path: Path, recorded: list[RecordingBackend]
) -> None:
    state = {f"{n}": np.full(MIB, 7, np.uint8) for n in range(20)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1).wait()
        manager.wait()
        recorded[0].reset()
        loaded = manager.load_state(1)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
    assert sum(call.size for call in recorded[0].calls if call.operation == "read_into") == MIB
