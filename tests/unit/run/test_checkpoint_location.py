"""Which of several places a run goes on in."""

import threading
from pathlib import Path

import pytest

from dtruntime import CheckpointManager
from dtruntime.errors import StorageError
from dtruntime.run.run_checkpoints import LocationNote, right_location


def notes(*places: str) -> dict[int, LocationNote]:
    """One for each rank; capital letters have checkpoints."""
    return {
        rank: LocationNote(place.lower(), f"/{place}", "host", place.isupper(), "")
        for rank, place in enumerate(places)
    }


@pytest.mark.parametrize(
    ("places", "known", "right"),
    [
        (["a", "a", "b"], "", "a"),
        (["b", "a", "a"], "", "a"),
        (["a", "b"], "", ""),
        (["a", "b", "c"], "", ""),
        (["a", "a", "b", "b"], "", ""),
        (["A", "b"], "", "a"),
        (["b", "b", "A"], "", "a"),
        (["A", "B"], "", ""),
        (["A", "A", "B"], "", "a"),
        (["A", "b"], "b", "b"),
        (["A", "A", "B"], "b", "b"),
        (["A", "A", "B"], "elsewhere", "a"),
    ],
)
def test_place_with_the_last_checkpoint_then_with_any_then_with_most_workers(places, known, right):
    assert right_location(notes(*places), known) == right


def test_identity_is_made_once_whoever_comes_first(tmp_path: Path) -> None:
    found = []

    def look() -> None:
        with CheckpointManager(tmp_path / "place") as manager:
            found.append(manager.engine.main.identity())

    lookers = [threading.Thread(target=look) for _ in range(8)]
    for thread in lookers:
        thread.start()
    for thread in lookers:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    with CheckpointManager(tmp_path / "other") as manager:
        assert manager.engine.main.identity() not in found


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"place": 3}', b'{"place": "x"}'])
def test_damaged_identity_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "place.json").write_bytes(content)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(StorageError, match=r"place\.json is damaged: remove it"),
    ):
        manager.engine.main.identity()
