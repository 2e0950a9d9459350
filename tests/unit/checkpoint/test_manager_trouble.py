"""Saves that fail, files that are damaged, and what dead writers have left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtruntime.checkpoint.file_format.manifest import PACKS, digest_of
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.store.checkpoint_store import Cleanup
from dtruntime.errors import StorageError


def packs(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / PACKS)) if (folder / PACKS).exists() else []


class Failing:
    """Makes a backend's packs fail to be written."""

    def __init__(self, monkeypatch, manager):
        self.on = True
        backend = manager.engine.store.backend
        writer = backend.writer

        def fail(name):
            if self.on and name.startswith(PACKS):
                raise StorageError("the disk is on fire")
            return writer(name)

        monkeypatch.setattr(backend, "writer", fail)


def test_failure_is_told_by_the_handle_or_else_by_the_next_call(manager, monkeypatch):
    manager.save(b"good", step=1).wait()
    failing = Failing(monkeypatch, manager)
    with pytest.raises(StorageError, match="on fire"):
        manager.save(b"a", step=2).wait()
    manager.save(b"b", step=3)
    with pytest.raises(StorageError, match="on fire"):
        manager.wait()
    manager.save(b"c", step=4)
    manager.engine.saves.wait()
    with pytest.raises(StorageError, match="on fire"):
        manager.save(b"d", step=5)
    failing.on = False
    manager.save(b"e", step=6).wait()
    assert manager.steps() == [1, 6]
    failing.on = True
    manager.save(b"f", step=7)
    with pytest.raises(StorageError, match="on fire"):
        manager.close()


def test_error_of_the_program_is_not_hidden_by_a_save_that_failed(tmp_path, monkeypatch):
    def program():
        with CheckpointManager(tmp_path) as manager:
            Failing(monkeypatch, manager)
            manager.save(b"x", step=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        program()
    (note,) = caught.value.__notes__
    assert "on fire" in note


def test_save_under_way_is_committed_when_the_program_fails(tmp_path):
    def program():
        with CheckpointManager(tmp_path) as manager:
            manager.save(bytes(20_000_000), step=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    with CheckpointManager(tmp_path) as manager:
        assert manager.load_bytes() == bytes(20_000_000)


def test_checkpoint_of_a_later_version_is_named_and_left_alone(manager, tmp_path):
    manager.save(b"x", step=1).wait()
    (path,) = (tmp_path / "ckpt" / "manifests").iterdir()
    body = path.read_bytes().split(b"\n")[0]
    later = body.replace(b'"version":1', b'"version":2', 1)
    assert later != body
    path.write_bytes(later + b"\n" + digest_of(later).encode() + b"\n")
    with CheckpointManager(tmp_path / "ckpt") as older:
        with pytest.raises(StorageError, match="newer Strata"):
            older.load_bytes()
        with pytest.raises(StorageError, match="newer Strata"):
            older.save(b"y", step=2).wait()
    assert path.exists()


def damage_pack(folder: Path, number: int, how: str) -> Path:
    path = folder / PACKS / packs(folder)[number]
    if how == "flip":
        with path.open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))
    elif how == "cut":
        os.truncate(path, 5000)
    else:
        path.unlink()
    return path


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damage_is_named_and_the_newest_good_one_is_loaded(manager, tmp_path, how, caplog):
    for step in (1, 2):
        manager.save(os.urandom(20_000), step=step).wait()
    good = manager.load_bytes(1)
    path = damage_pack(tmp_path / "ckpt", -1, how)
    with pytest.raises(StorageError, match=rf"step 2 is damaged: chunk .* of .*{path.name}"):
        manager.load_bytes(2)
    assert manager.load_bytes() == good
    assert manager.load_latest().step == 1
    assert "checkpoint.fell_back" in caplog.text


def test_damaged_manifest_is_named_and_nothing_is_swept_because_of_it(manager, tmp_path):
    folder = tmp_path / "ckpt"
    for step in (1, 2):
        manager.save(os.urandom(5000), step=step).wait()
    first = sorted((folder / "manifests").iterdir())[0]
    first.write_bytes(first.read_bytes().replace(b'"step":1', b'"step":9'))
    with CheckpointManager(folder, keep_count=3) as other:
        with pytest.raises(StorageError, match="does not match its digest"):
            other.load_bytes(1)
        before = packs(folder)
        other.save(b"x", step=3).wait()
        assert set(before) <= set(packs(folder))
        assert other.load_bytes() == b"x"


def test_everything_damaged_is_an_error_and_not_an_empty_folder(manager, tmp_path):
    manager.save(os.urandom(20_000), step=1).wait()
    damage_pack(tmp_path / "ckpt", 0, "flip")
    with pytest.raises(StorageError, match="damaged") as error:
        manager.load_bytes()
    assert not isinstance(error.value, FileNotFoundError)


def test_leftovers_of_dead_writers_are_collected_and_live_ones_are_not(tmp_path):
    program = (
        "import sys, os; from dtruntime.checkpoint.manager import CheckpointManager\n"
        "m = CheckpointManager(sys.argv[1]); store = m.engine.store\n"
        "name = store.session.tag('000000000001') + 'left.pack'\n"
        "store.backend.write('packs/' + name, b'x'); print(name, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as writer,
        CheckpointManager(tmp_path) as manager,
    ):
        assert writer.stdout is not None
        name = writer.stdout.readline().strip()
        manager.save(b"1", step=1).wait()
        manager.save(b"2", step=2)
        manager.wait()
        assert name in packs(tmp_path)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        manager.save(b"3", step=3)
        manager.wait()
        assert name not in packs(tmp_path)
        assert len(list((tmp_path / "locks").iterdir())) == 1


def test_foreign_files_are_left_alone(tmp_path):
    for folder in ("packs", "manifests", "parts"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "mine.txt").write_text("precious")
    (tmp_path / "notes.md").write_text("precious")
    with CheckpointManager(tmp_path, keep_count=1) as manager:
        for step in range(4):
            manager.save(b"x" * step, step=step).wait()
    for folder in ("packs", "manifests", "parts"):
        assert (tmp_path / folder / "mine.txt").read_text() == "precious"
    assert (tmp_path / "notes.md").exists()


def test_writers_that_die_right_after_their_commit_keep_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(Cleanup, "clean", lambda self, **options: None)
    for step in range(1, 6):
        with CheckpointManager(tmp_path, keep_count=2) as manager:
            manager.save(b"x", step=step)
    with CheckpointManager(tmp_path) as reader:
        assert reader.steps() == [3, 4, 5]
