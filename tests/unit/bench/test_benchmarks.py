"""The programs of ``benchmarks/``, as far as they can be checked without running them."""

import ast
import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.checkpoint_throughput import contenders as checkpoints
from benchmarks.data_loading import contenders as loaders
from benchmarks.harness import Benchmark, Entry, Kind, Outcome, Target
from benchmarks.plots import Bar, Panel
from benchmarks.processes import Process, ProcessFailed

PROGRAMS = {
    "coordinator": "benchmarks.coordinator.__main__",
    "http_clients": "benchmarks.http_clients",
    "data_loading": "benchmarks.data_loading.__main__",
    "checkpoint_throughput": "benchmarks.checkpoint_throughput.__main__",
    "coordinator_attacks": "benchmarks.coordinator_attacks",
}


@pytest.mark.parametrize(("name", "module"), PROGRAMS.items())
def test_program_is_named_after_its_module(name: str, module: str) -> None:
    assert import_module(module).BENCHMARK.name == name


@pytest.mark.parametrize("package", [checkpoints, loaders])
def test_every_contender_has_a_class(package) -> None:
    folder = Path(package.__file__).parent
    for entry in package.ENTRIES:
        module, _, name = entry.home.partition(":")
        tree = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))
        assert name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)], entry
    names = [(entry.name, part) for entry in package.ENTRIES for part in entry.parts]
    assert len(names) == len(set(names)), "two contenders of a part with one name"


def run(benchmark: Benchmark, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    arguments = ["benchmark", "--quick", "--only", "fast", "--results", str(folder)]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return benchmark.main()


@pytest.mark.parametrize("failed", [False, True])
def test_results_are_shown_and_saved(
    failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def measure(options, scratch: Path, announce) -> Outcome:
        assert options.quick
        assert options.only == ["fast"]
        assert scratch.is_dir()
        return Outcome(
            tables=["a table"],
            document={"rate": 2.5},
            targets=[Target("rate", "≥ 2", "2.5", met=True)],
            problems=["a library: not installed"],
            panels=[Panel("rates", [Bar("ours", 2.5, "2.5/s")])],
            failed=failed,
        )

    benchmark = Benchmark("mine", "something", "a second", measure, parts=("fast", "slow"))

    assert run(benchmark, tmp_path, monkeypatch) == int(failed)

    shown = capsys.readouterr().out
    assert "a table" in shown
    assert "met" in shown
    assert "NOT MEASURED: a library: not installed" in shown
    saved = json.loads((tmp_path / "mine.json").read_text())
    assert saved["rate"] == 2.5
    assert saved["targets"] == [{"name": "rate", "wanted": "≥ 2", "measured": "2.5", "met": True}]


def test_contender_that_cannot_be_made_says_why() -> None:
    order = {"name": "nobody", "size": 1, "folder": "/nowhere"}
    with (
        Process("benchmarks.checkpoint_throughput.worker", order) as process,
        pytest.raises(ProcessFailed, match="StopIteration"),
    ):
        process.ask({"do": "save"})


def test_contender_gets_its_options() -> None:
    entry = Entry("mine", Kind.LIMIT, "arrow:ParquetBatches", (), options={"threads": 0})
    assert entry.make("benchmarks.data_loading", None).threads == 0
