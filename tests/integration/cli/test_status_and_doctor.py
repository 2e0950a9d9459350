"""The commands ``strata status``, ``strata doctor`` and ``strata coordinator``."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime import DatasetRegistry, TrainingOrchestrator, __version__
from dtruntime.cli.doctor_checks import VARIABLES
from dtruntime.cli.main import main
from dtruntime.testing import LocalCoordinator, eventually

STRATA = [sys.executable, "-m", "dtruntime.cli.main"]
SOURCE = Path(__file__).parents[3] / "src" / "dtruntime"


@pytest.fixture
def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def trainer(coordinator: LocalCoordinator, job: str) -> Iterator[TrainingOrchestrator]:
    """Rank 0 of 2, with something to show; rank 1 has not come yet."""
    orchestrator = TrainingOrchestrator(
        coordinator_url=coordinator.url, job=job, rank=0, world_size=2
    )
    with orchestrator:
        orchestrator.register()
        orchestrator.report(step=1234, epoch=3, state="training", loss=0.5)
        orchestrator.commit_checkpoint("step-1200", 1200, epoch=3, size_bytes=5_000_000)
        eventually(lambda: orchestrator.get_status().step == 1234, what="the report's arrival")
        yield orchestrator


def test_status_shows_job_checkpoint_and_workers(
    coordinator: LocalCoordinator,
    trainer: TrainingOrchestrator,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "--url", coordinator.url, "--job", trainer.job]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        rf"coordinator {coordinator.url}   strata {__version__}   up .+ term 1", lines[0]
    )
    assert re.match(rf"job {trainer.job}   generation 1   world of 2   1 live   0 dead", lines[2])
    assert "step 1,200, epoch 3, 5.0 MB" in lines[3]
    heading, missing, present = lines[4].split(), lines[5], lines[6]
    assert heading[:6] == ["rank", "worker", "state", "step", "epoch", "heartbeat"]
    assert re.match(r" +1 +worker-1 +expected .*not registered yet", missing)
    assert re.match(r" +0 +worker-0 +training +1,234 +3 +[\d.]+ s ago +\d+% +[\d.]+ [MG]B", present)


def test_status_as_json_has_the_documented_fields(
    coordinator: LocalCoordinator,
    trainer: TrainingOrchestrator,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "--url", coordinator.url, "--job", trainer.job, "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    page = (SOURCE.parents[1] / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name, record in (
        ("object", document),
        ("coordinator", document["coordinator"]),
        ("method", document["coordinator"]["methods"][0]),
        ("job", document["jobs"][0]),
        ("worker", document["jobs"][0]["workers"][0]),
        ("checkpoint", document["jobs"][0]["latest_checkpoint"]),
    ):
        (row,) = re.findall(rf"^\| {name} \| (.+) \|$", page, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == set(record), name
    assert document["schema"] == 1
    job = document["jobs"][0]
    assert [(w["rank"], w["membership"], w["step"]) for w in job["workers"]] == [
        (0, "live", 1234),
        (1, "expected", None),
    ]


def test_status_names_who_keeps_a_barrier_open(
    coordinator: LocalCoordinator,
    trainer: TrainingOrchestrator,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = (
        "from dtruntime import TrainingOrchestrator as T\n"
        f"with T(coordinator_url={coordinator.url!r}, job={trainer.job!r}, rank=1, world_size=2)"
        " as worker:\n"
        "    worker.register(); worker.barrier('epoch-end', timeout_ms=60_000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", command]) as other:

        def shown() -> str:
            main(["status", "--url", coordinator.url, "--job", trainer.job])
            return capsys.readouterr().out

        line = r"epoch-end: 1 of 2 arrived, open for .+; missing worker-0 \(step 1,234\)"
        eventually(lambda: re.search(line, shown()), within=20, what=line)
        trainer.barrier("epoch-end")
        assert other.wait(timeout=20) == 0


def test_status_of_an_empty_coordinator_says_what_to_do_next(
    own_coordinator: LocalCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--url", own_coordinator.url]) == 0

    output = capsys.readouterr().out
    assert "no jobs yet" in output
    assert f'TrainingOrchestrator(coordinator_url="{own_coordinator.url}").register()' in output


def test_status_of_an_unknown_job_fails_and_names_the_known_ones(
    coordinator: LocalCoordinator,
    trainer: TrainingOrchestrator,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "--url", coordinator.url, "--job", "nonesuch"]) == 1

    error = capsys.readouterr().err
    assert "job 'nonesuch' does not exist" in error
    assert "(known: " in error


def test_status_of_an_unreachable_coordinator_has_an_exit_code_of_its_own(
    unused_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COORDINATOR_URL", unused_url)

    assert main(["status"]) == 3

    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"strata doctor --url {unused_url}" in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--watch"],
        ["jobs", "ls"],
        ["actions", "ls"],
        ["datasets", "ls"],
        ["datasets", "show", "train"],
    ],
)
def test_hint_to_the_doctor_is_given_once(
    arguments: list[str], unused_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--url", unused_url]) == 3
    assert capsys.readouterr().err.count("strata doctor") == 1


def test_status_with_a_wrong_url_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "nonsense"]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_watch_goes_on_until_interrupted(
    coordinator: LocalCoordinator, trainer: TrainingOrchestrator
) -> None:
    command = [*STRATA, "status", "--url", coordinator.url, "--job", trainer.job]
    command += ["--watch", "--json", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        uptimes = [
            json.loads(watching.stdout.readline())["coordinator"]["uptime_seconds"]
            for _ in range(3)
        ]
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()

    assert uptimes == sorted(set(uptimes))
    assert watching.returncode == 0


def findings_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    """The exit code and the findings by name."""
    code = main(["doctor", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] == (code == 0)
    return code, {finding["name"]: finding for finding in document["findings"]}


def test_doctor_measures_the_way_to_a_coordinator(
    coordinator: LocalCoordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", coordinator.url, "--data-dir", str(tmp_path)]
    code, found = findings_of(arguments, capsys)

    assert code == 0
    assert {found[name]["verdict"] for name in ("name", "connection", "gRPC", "version")} == {"ok"}
    trip, clock = found["gRPC"]["measured"], found["clock"]["measured"]
    assert 0 < trip["median_seconds"] <= trip["longest_seconds"] < 10
    assert abs(clock["difference_seconds"]) < 1
    assert found["disk sync"]["measured"]["median_seconds"] > 0
    assert found["disk space"]["measured"]["free_bytes"] > 0
    assert found["open files"]["measured"]["soft_limit"] > 0
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_to_do_about_an_unreachable_coordinator(
    unused_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--url", unused_url, "--data-dir", str(tmp_path / "state")]) == 1

    output = capsys.readouterr().out
    port = unused_url.rpartition(":")[2]
    assert f"✗ connection        nothing listens at 127.0.0.1:{port}" in output
    assert f"→ start one there: strata coordinator 0.0.0.0:{port}" in output
    assert "state is not there yet" in output
    assert re.search(r"\d+ checks: \d+ fine.*, 1 failure$", output.strip())


def test_doctor_tells_an_open_port_from_a_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as web:
        assert web.stdout is not None
        port = re.search(r"port (\d+)", web.stdout.readline())
        assert port
        code, found = findings_of(["--url", f"http://127.0.0.1:{port[1]}"], capsys)
        web.terminate()

    assert code == 1
    assert found["connection"]["verdict"] == "ok"
    assert found["gRPC"]["verdict"] == "fail"
    assert "strata doctor" not in found["gRPC"]["text"], "it is the doctor who speaks"


@pytest.mark.parametrize(
    ("variables", "name", "verdict", "said"),
    [
        ({"COORDINATOR_URL": "https://host:1"}, "COORDINATOR_URL", "fail", "TLS"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK, WORLD_SIZE", "fail", "ranks are 0 to 3"),
        ({"RANK": "one"}, "RANK, WORLD_SIZE", "fail", "must be a number"),
        ({"RANK": "1"}, "RANK, WORLD_SIZE", "warn", "WORLD_SIZE is not set"),
        ({"STRATA_HEARTBEAT_TIMEOUT_MS": "1"}, "configuration", "fail", "at least twice"),
        ({"STRATA_DATADIR": "x"}, "STRATA_DATADIR", "warn", "did you mean STRATA_DATA_DIR?"),
        ({"http_proxy": "http://proxy:1"}, "proxy", "warn", "no_grpc_proxy=127.0.0.1"),
    ],
)
def test_doctor_finds_a_wrong_environment_variable(
    variables: dict[str, str],
    name: str,
    verdict: str,
    said: str,
    unused_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)

    _, found = findings_of(["--url", unused_url], capsys)

    assert found[name]["verdict"] == verdict
    assert said in f"{found[name]['text']} {found[name]['remedy']}"


def test_doctor_knows_every_variable_that_the_code_reads() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))

    assert set(re.findall(r"[\"'](STRATA_[A-Z_]+)[\"']", code)) == VARIABLES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-port"], "HOST:PORT"),
        (["127.0.0.1:0", "--config", "missing.toml"], "missing.toml does not exist"),
    ],
)
def test_coordinator_with_a_wrong_setting_is_a_usage_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coordinator", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_reader_that_has_seen_enough_is_no_error(coordinator: LocalCoordinator) -> None:
    status = f"{sys.executable} -m dtruntime.cli.main status --json --url {coordinator.url}"
    command = ["bash", "-c", f"{status} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_file_that_cannot_be_made_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--keep", "/proc/none/such"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("strata: ")
    assert "/proc/none" in told


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["coordinator", "--transport", "pigeon"], ["demo", "--workers", "0"]],
)
def test_wrong_usage_has_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert "usage: strata" in capsys.readouterr().err


@pytest.mark.parametrize("command", [(), ("jobs",), ("actions",), ("datasets",), ("checkpoints",)])
def test_command_alone_says_what_there_is(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command)

    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("usage: ") == 1
    assert ("show" if command == ("datasets",) else "ls" if command else "coordinator") in told
    assert "-h, --help" in told


def test_dataset_and_left_worker_appear_in_the_status(
    coordinator: LocalCoordinator, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as worker:
        worker.register()
        DatasetRegistry().register_dataset("numbers", 1000, 100)
        worker.deregister("finished early")

    assert main(["status", "--url", coordinator.url, "--job", job, "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)["jobs"]
    assert status["dataset_count"] == 1
    assert main(["status", "--url", coordinator.url, "--job", job]) == 0
    assert re.search(r" 0 +worker-0 +left .*finished early", capsys.readouterr().out)
