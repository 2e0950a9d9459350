"""Where it is measured: nothing else is touched, and nothing is left."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtruntime.bench.checkpoint_throughput import State
from dtruntime.bench.raw_storage import new_place
from dtruntime.errors import ConfigError, StorageError, StrataError

SIZE = 5 * 2**20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems")


@pytest.fixture(scope="module")
def state() -> State:
    return State(SIZE)


def test_state_is_the_same_in_all_its_forms(state: State) -> None:
    joined = np.concatenate(list(state.arrays.values()))
    assert len(state.data) == SIZE
    assert joined.tobytes() == state.data == bytes(state.memory)
    blocks = {state.data[at : at + 2**20] for at in range(0, SIZE, 2**20)}
    assert len(blocks) == SIZE // 2**20, "equal blocks could be stored once"


def test_copy_brings_the_arrays_over() -> None:
    state = State(SIZE)
    for array in state.arrays.values():
        array += 1
    state.copy()
    assert bytes(state.memory) != state.data
    assert bytes(state.memory) == np.concatenate(list(state.arrays.values())).tobytes()


def test_state_that_does_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(StrataError, match=r"of memory are available.*choose a smaller --size"):
        State(2**60)


def test_what_is_written_is_read_and_removed_and_neighbours_stay(
    tmp_path: Path, state: State
) -> None:
    (tmp_path / "mine").write_text("kept")
    with new_place(str(tmp_path), SIZE) as place:
        (folder,) = (path for path in tmp_path.iterdir() if path.name != "mine")
        assert folder.name.startswith("strata-bench-")
        assert place.url == folder.as_uri()
        place.write(state.memory)
        place.forget()
        assert place.read(SIZE).tobytes() == state.data
        place.delete()
        place.write(state.memory)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "kept"


def test_place_is_removed_when_measuring_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with new_place(str(tmp_path), SIZE):
            assert list(tmp_path.iterdir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_url_of_a_folder_is_that_folder(tmp_path: Path) -> None:
    with new_place(tmp_path.as_uri(), SIZE) as place:
        assert place.url.startswith(f"{tmp_path.as_uri()}/strata-bench-")


def test_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not a folder"), new_place(str(tmp_path / "x"), SIZE):
        pass
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"free, and .* are needed: choose a smaller --size"),
        new_place(str(tmp_path), 2**60),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["memory://x", "ftp://host/x", "s3://"])
def test_places_that_cannot_be_measured_are_refused(place: str) -> None:
    with pytest.raises(ConfigError), new_place(place, SIZE):
        pass


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "ramfs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@as_root
def test_file_system_without_direct_writes_is_named_so(ramfs: Path, state: State) -> None:
    with new_place(str(ramfs), SIZE) as place:
        place.write(state.memory)
        assert place.read(SIZE).tobytes() == state.data
        assert "page cache" in place.raw_write
