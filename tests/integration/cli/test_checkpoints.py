"""``strata checkpoints``: what it prints, its exit codes, and that looking writes nothing."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from tests.integration.cli.test_datasets import PAGE
from tests.support import command_line
from tests.support.command_line import Result

STRATA = [sys.executable, "-m", "dtruntime.cli.main", "checkpoints"]


def strata(*arguments: object) -> Result:
    return command_line.strata("checkpoints", *arguments)


def shown(*arguments: object) -> str:
    result = strata(*arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def answered(*arguments: object) -> Any:
    return json.loads(shown(*arguments, "--json"))


def refused(*arguments: object, code: int = 1) -> str:
    result = strata(*arguments)
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stdout == ""
    return result.stderr


def files(folder: Path) -> dict[str, tuple[int, int]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three steps of a state; the large array is stored once."""
    folder = tmp_path / "check [points]"
    frozen = np.random.default_rng(0).standard_normal(200_000)
    with CheckpointManager(folder, incremental=True) as manager:
        for step in (10, 20, 30):
            state = {"model": {"w": frozen, "b": np.full((2, 5), step)}, "note": "x"}
            manager.save(state, step, 1, metrics={"loss": 1 / step}, metadata={"run": "a"}).wait()
    return folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def pack_of(place: Path, step: int) -> Path:
    (found,) = (place / "packs").glob(f"{step:012d}-*")
    return found


def test_ls_shows_what_is_there_and_which_is_newest(place: Path) -> None:
    before = files(place)
    text = shown("ls", place)
    assert re.search(r"10 +1 +step-000000000010-\w+ +1\.6 MB +1\.6 MB +full +1 ", text)
    assert re.search(r"30 .* 80 bytes +incremental +1 .* newest", text)
    assert text.count("newest") == 1
    report = answered("ls", place)
    assert [one["step"] for one in report["checkpoints"]] == [10, 20, 30]
    assert [one["newest"] for one in report["checkpoints"]] == [False, False, True]
    assert report["unneeded_bytes"] == 0
    assert files(place) == before


def test_show_names_arrays_and_the_steps_that_packs_belong_to(place: Path) -> None:
    text = shown("show", place, 30)
    assert re.search(r"model/b +numpy +int64 +2×5 +80", text)
    assert re.search(r"step 10 +10, 20 +packs/000000000010-", text)
    assert re.search(r"loss +0\.0333", text)
    report = answered("show", place, "latest")
    assert {a["key"]: a["shape"] for a in report["arrays"]} == {
        "model/w": [200_000],
        "model/b": [2, 5],
    }
    assert {pack["step"]: pack["needed_by"] for pack in report["packs"]} == {
        30: [30],
        10: [10, 20, 30],
    }
    assert report["metadata"] == {"run": "a"}
    assert "there: 10, 20, 30" in refused("show", place, 40)


def test_show_of_bytes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(b"x" * 1000, 5).wait()
    (array,) = answered("show", tmp_path, 5)["arrays"]
    assert (array["kind"], array["nbytes"]) == ("bytes", 1000)


def test_verify_names_each_damaged_chunk_and_the_good_checkpoints(place: Path) -> None:
    assert answered("verify", place)["newest_good"] == 30
    flip(pack_of(place, 20), 4100)
    result = strata("verify", place)
    assert result.returncode == 1
    assert re.search(
        r"step 20: .*packs/000000000020-.* chunk \w{32} \(80 bytes at 4,096\)", result.stdout
    )
    assert "its bytes do not match its digest" in result.stdout
    assert "good: 10, 30" in result.stdout
    assert strata("verify", place, 10, 30).returncode == 0
    report = json.loads(strata("verify", place, "--json").stdout)
    assert [one["good"] for one in report["checkpoints"]] == [True, False, True]


def test_verify_finds_missing_packs_cut_packs_and_bad_manifests(place: Path) -> None:
    pack_of(place, 20).unlink()
    os.truncate(pack_of(place, 30), 4100)
    first = sorted((place / "manifests").iterdir())[0]
    first.write_bytes(first.read_bytes()[:-40])
    report = json.loads(strata("verify", place, "--json").stdout)
    details = [one["damages"][0]["detail"] for one in report["checkpoints"]]
    assert "does not match its digest" in details[0]
    assert "does not exist" in details[1]
    assert "has 4100 bytes" in details[2]
    assert report["newest_good"] is None
    assert "damaged" in shown("ls", place)
    assert answered("ls", place)["unneeded_bytes"] is None


def test_verify_reads_shared_chunks_once(place: Path) -> None:
    assert answered("verify", place)["read_bytes"] < 2_000_000


def test_rm_removes_what_nothing_else_needs(place: Path) -> None:
    report = answered("rm", place, 10, 20, "--yes")
    assert (report["removed"], report["left"], report["deleted_files"]) == ([10, 20], [30], 1)
    assert pack_of(place, 10).exists(), "step 30 refers to it"
    with CheckpointManager(place) as manager:
        assert manager.steps() == [30]
        assert manager.load_state()["model"]["b"][0, 0] == 30


def test_rm_of_the_newest_moves_the_pointer(place: Path) -> None:
    shown("rm", place, 30, "--yes")
    assert json.loads((place / "latest.json").read_bytes())["step"] == 20
    shown("rm", place, 10, 20, "--yes", "--force")
    assert not (place / "latest.json").exists()
    assert not list(place.rglob("*.pack"))


def test_rm_keeps_the_last_one_that_is_whole(place: Path) -> None:
    before = files(place)
    assert "--force" in refused("rm", place, 10, 20, 30, "--yes")
    assert files(place) == before
    pack_of(place, 30).unlink()
    assert "--force" in refused("rm", place, 10, 20, "--yes"), "step 30 is not whole"
    shown("rm", place, 10, "--yes")


def test_rm_asks_first(place: Path) -> None:
    before = files(place)
    assert "--yes" in refused("rm", place, 10, code=2)
    for answer, code in (("n", 1), ("y", 0)):
        assert files(place) == before
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [*STRATA, "rm", str(place), "10"], stdin=slave, stderr=subprocess.PIPE, text=True
        )
        os.write(master, f"{answer}\n".encode())
        _, said = process.communicate(timeout=60)
        os.close(slave)
        os.close(master)
        assert process.returncode == code, said
        assert "remove 1 checkpoint (10)" in said
    assert len(files(place)) == len(before) - 1


def test_rm_of_a_step_that_is_not_there_removes_nothing(place: Path) -> None:
    before = files(place)
    assert "no checkpoint of step 99" in refused("rm", place, 10, 99, "--yes")
    assert files(place) == before


def test_rm_leaves_what_a_live_writer_is_about_to_commit(place: Path) -> None:
    with CheckpointManager(place) as writer:
        session = writer.engine.store.session
        name = f"packs/{session.tag('000000000040')}abc.pack"
        writer.engine.store.backend.write(name, b"under way")
        shown("rm", place, 20, "--yes")
        assert (place / name).exists()
    shown("rm", place, 10, "--yes")
    assert not (place / name).exists()


@pytest.mark.parametrize("arguments", [("ls",), ("show", "1"), ("verify",), ("rm", "1", "--yes")])
def test_places_without_checkpoints_are_refused_and_not_written_to(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    action, *rest = arguments
    assert "there is no folder" in refused(action, tmp_path / "typo", *rest)
    (tmp_path / "empty").mkdir()
    assert "no checkpoints in" in refused(action, tmp_path / "empty", *rest)
    assert files(tmp_path) == {}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty"]


def test_folder_above_checkpoints_names_them(place: Path) -> None:
    assert "in its folders check [points]" in refused("ls", place.parent)


def test_export_writes_a_file_that_numpy_can_read(place: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    before = files(place)
    assert "wrote step 30" in shown("export", place, "latest", target)
    assert files(place) == before
    data = target.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, stop = header["model.b"]["data_offsets"]
    values = np.frombuffer(data[8 + length + start : 8 + length + stop], np.int64)
    assert values.tolist() == [30] * 10
    assert "no checkpoint of step 7" in refused("export", place, 7, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_export_of_bytes_says_why_not(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "ckpt") as manager:
        manager.save(b"x", 5).wait()
    assert "Traceback" not in refused("export", tmp_path / "ckpt", 5, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_bucket_is_a_place_too(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    url = "s3://ready/cli/checkpoints"
    with CheckpointManager(url) as manager:
        for step in (1, 2):
            manager.save({"w": np.arange(1000) + step}, step).wait()
    assert [one["step"] for one in answered("ls", url)["checkpoints"]] == [1, 2]
    assert answered("verify", url)["newest_good"] == 2
    assert answered("rm", url, 1, "--yes")["left"] == [2]
    assert strata("ls", "s3://ready/cli/typo").returncode == 1
    assert "a-secret" not in strata("ls", url, "--json").stdout


def test_documented_fields_are_those_that_are_printed(place: Path) -> None:
    page = PAGE.read_text(encoding="utf-8").partition("\n## Checkpoints\n")[2]
    page = page.partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([\w ]+) \| (`.*`) \|$", page, re.MULTILINE))
    documented = {name: set(re.findall(r"`(\w+)`", fields)) for name, fields in rows.items()}
    listed, show = answered("ls", place), answered("show", place, 30)
    flip(pack_of(place, 30), 4100)
    verified = json.loads(strata("verify", place, "--json").stdout)
    printed = {
        "checkpoints": listed,
        "listed checkpoint": listed["checkpoints"][0],
        "shown checkpoint": show,
        "array": show["arrays"][0],
        "pack": show["packs"][0],
        "verification": verified,
        "verified checkpoint": verified["checkpoints"][-1],
        "damage": verified["checkpoints"][-1]["damages"][0],
        "removal": answered("rm", place, 10, "--yes"),
    }
    assert {name: set(record) for name, record in printed.items()} == documented


def test_metadata_cannot_give_orders_to_a_terminal(tmp_path: Path) -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\x9b31m"
    with CheckpointManager(tmp_path / "place") as manager:
        state = {f"w{attack}": np.zeros(3)}
        manager.save(state, 1, metrics={f"loss{attack}": 1.0}, metadata={attack: attack}).wait()
    place = tmp_path / "place"
    for command in (("ls", place), ("show", place, 1), ("verify", place)):
        for options in ((), ("--json",)):
            printed = shown(*command, *options)
            assert not set(printed) & {"\x1b", "\x07", "\x9b"}, command
    assert r"\x1b]0;owned" in shown("show", place, 1)
    message = refused("show", tmp_path / f"not{attack}there", 1)
    assert not set(message) & {"\x1b", "\x07", "\x9b"}
