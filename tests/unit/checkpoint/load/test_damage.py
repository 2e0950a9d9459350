"""Damage that was seen: it is named, passed over, and never built upon."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import CheckpointManager, CheckpointNotFoundError
from dtruntime.checkpoint.file_format.manifest import MANIFESTS, PACKS
from dtruntime.checkpoint.load.verify import Verifier
from dtruntime.checkpoint.store.catalog import Catalog
from dtruntime.errors import CheckpointDamagedError, StorageError
from dtruntime.storage import open_backend

CHUNK = 2 * 2**20


def files(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).iterdir())


def flip(path: Path, at: int = 6000) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"epoch":0', b'"epoch":7', 1))


def save_three(folder: Path, **options: Any) -> list[Path]:
    with CheckpointManager(folder, **options) as manager:
        for step in (1, 2, 3):
            manager.save(f"state {step}".encode() * 5000, step).wait()
    return files(folder, MANIFESTS)


def good_steps(folder: Path) -> list[int]:
    with open_backend(str(folder)) as backend:
        catalog = Catalog(backend)
        return [v.entry.step for v in Verifier(catalog, catalog.entries()).run() if v.good]


@pytest.mark.parametrize("how", ["swapped", "copied", "renamed"])
def test_manifest_under_another_name_is_damage(tmp_path, how):
    """Its digest is right: only its name says that it is not the one that was asked for."""
    first, second, third = save_three(tmp_path)
    if how == "swapped":
        second.rename(tmp_path / "aside")
        third.rename(second)
        (tmp_path / "aside").rename(third)
    elif how == "copied":
        shutil.copy(second, third)
    else:
        third.unlink()
        second.rename(second.with_name("00000003-000000000003.json"))
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointDamagedError, match="manifest of another checkpoint"):
            manager.load_bytes(3)
        left = 1 if how != "copied" else 2
        assert manager.load_bytes() == f"state {left}".encode() * 5000
        assert [info.step for info in manager.checkpoints()] == ([1, 2] if left == 2 else [1])
    assert first.exists()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_damaged_manifest_hides_no_other_checkpoint(tmp_path, number, caplog):
    spoil(save_three(tmp_path)[number])
    left = [step for step in (1, 2, 3) if step != number + 1]
    with CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.checkpoints()] == left
        assert [info.step for info in manager.checkpoints()] == left
        latest = manager.latest()
        assert latest is not None
        assert latest.step == left[-1]
        assert manager.load_latest().step == left[-1]
        for info in manager.checkpoints():
            assert manager.get_checkpoint(info.checkpoint_id).startswith(b"state")
        with pytest.raises(CheckpointNotFoundError, match="one of 1 whose manifests are damaged"):
            manager.get_checkpoint("nothing")
        manager.save(b"more", 4).wait()
        assert manager.load_bytes() == b"more"
    named = [r for r in caplog.records if r.event == "checkpoint.damaged"]
    assert [record.fields["step"] for record in named] == [number + 1]


def test_damaged_manifests_alone_are_an_error_and_not_an_empty_place(tmp_path):
    for path in save_three(tmp_path):
        spoil(path)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(StorageError, match="does not match its digest"),
    ):
        manager.checkpoints()


class Weights:
    """A state of several chunks, of which each step changes one."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.parts = {f"w{i}": rng.bytes(CHUNK) for i in range(3)}

    def at(self, step: int) -> dict[str, np.ndarray]:
        parts = {name: np.frombuffer(data, np.uint8).copy() for name, data in self.parts.items()}
        for done in range(1, step + 1):
            parts[f"w{done % 3}"][:] = np.random.default_rng(done).integers(0, 255, CHUNK, np.uint8)
        return parts


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("keep", [1, 2])
def test_saves_after_a_fall_back_do_not_refer_to_what_was_found_damaged(tmp_path, keep):
    weights = Weights()
    with CheckpointManager(tmp_path, keep_count=3, incremental=True) as manager:
        for step in (1, 2, 3):
            manager.save(weights.at(step), step).wait()
    newest = max(files(tmp_path, PACKS), key=lambda path: path.name.split("-")[0])
    flip(newest)
    with CheckpointManager(tmp_path, keep_count=keep, incremental=True) as manager:
        assert same(manager.load_state(), weights.at(2))
        for step in (3, 4, 5):  # trained again, with the same outcome
            manager.save(weights.at(step), step).wait()
            manager.wait()
            assert good_steps(tmp_path)[-1] == step
            assert len(good_steps(tmp_path)) >= min(keep, step - 1)
    with CheckpointManager(tmp_path) as fresh:
        assert same(fresh.load_state(), weights.at(5))


def test_other_ranks_do_not_refer_to_what_one_has_found_damaged(tmp_path):
    """A rank that loads an older step was told to, by one that could not read the newest."""
    weights = Weights()
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for step in (1, 2, 3):
            manager.save(weights.at(step), step).wait()
    flip(files(tmp_path, PACKS)[-1])
    with CheckpointManager(tmp_path, incremental=True) as manager:
        manager.load_state(2)
        manager.save(weights.at(3), 3).wait()
    assert good_steps(tmp_path)[-2:] == [2, 3]


def test_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    with CheckpointManager(tmp_path, keep_count=2) as manager:
        for step in (1, 2):
            manager.save(os.urandom(20_000), step).wait()
        flip(files(tmp_path, PACKS)[-1])
        assert manager.load_latest().step == 1
        manager.save(os.urandom(20_000), 3).wait()
        manager.wait()
        assert good_steps(tmp_path) == [1, 3]
        manager.save(os.urandom(20_000), 4).wait()
        manager.wait()
        assert good_steps(tmp_path) == [3, 4]


def test_older_save_of_the_same_step_is_loaded_when_the_newer_is_damaged(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(b"first" * 4000, 7).wait()
        before = files(tmp_path, PACKS)
        manager.save(b"again" * 4000, 7).wait()
        (newer,) = set(files(tmp_path, PACKS)) - set(before)
        flip(newer)
        assert manager.load_bytes(7) == b"first" * 4000


@pytest.mark.parametrize("what", ["link", "folder"])
def test_pack_replaced_by_something_else_is_damage(tmp_path, what):
    with CheckpointManager(tmp_path, keep_count=2, incremental=True) as manager:
        for step in (1, 2):
            manager.save(os.urandom(20_000), step).wait()
        pack = files(tmp_path, PACKS)[-1]
        aside = pack.rename(tmp_path / "elsewhere")
        if what == "link":
            pack.symlink_to(aside)
        else:
            pack.mkdir()
        with pytest.raises(CheckpointDamagedError, match=pack.name):
            manager.load_bytes(2)
        assert manager.load_latest().step == 1
        manager.save(b"more" * 1000, 3).wait()
        manager.wait()
        assert manager.load_bytes() == b"more" * 1000
        assert good_steps(tmp_path) == [1, 3]
