"""Checkpoints of Lightning by the names that it gives them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.errors import CheckpointNotFoundError
from dtruntime.integrations.lightning import StrataCheckpointIO


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[StrataCheckpointIO]:
    made = StrataCheckpointIO(tmp_path)
    yield made
    made.checkpoints.close()


def save(storage: StrataCheckpointIO, name: str, value: float) -> None:
    storage.save_checkpoint({"global_step": 5, "epoch": 0, "w": value}, f"/run/{name}")


def test_several_names_of_one_step_are_several_checkpoints(storage: StrataCheckpointIO) -> None:
    save(storage, "best.ckpt", 1.0)
    save(storage, "last.ckpt", 2.0)
    assert storage.load_checkpoint("/run/best.ckpt")["w"] == 1.0
    assert storage.load_checkpoint("/run/last.ckpt")["w"] == 2.0
    storage.remove_checkpoint("/run/last.ckpt")
    assert storage.load_checkpoint("/run/best.ckpt")["w"] == 1.0
    with pytest.raises(CheckpointNotFoundError, match=r"last\.ckpt"):
        storage.load_checkpoint("/run/last.ckpt")


def test_name_that_is_used_again_is_the_newer_checkpoint(storage: StrataCheckpointIO) -> None:
    save(storage, "last.ckpt", 1.0)
    save(storage, "last.ckpt", 2.0)
    assert storage.load_checkpoint("last.ckpt")["w"] == 2.0


def test_newest_can_be_loaded_also_without_a_name(storage: StrataCheckpointIO) -> None:
    storage.checkpoints.save({"w": 3.0}, 7)
    newest = storage.newest()
    assert storage.load_checkpoint(newest)["w"] == 3.0
