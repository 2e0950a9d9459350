"""The Dockerfile and the compose files fit the code, and each other."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from dtruntime.config import CoordinatorConfig, split_address
from tests.repository.deploy.configurations import (
    GRACE_SECONDS,
    ROOT,
    compose,
    dockerfile_ports,
    known_variables,
)

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE_FILES = ["docker-compose.yml", "docker-compose.prod.yml"]
SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/images/*.sh")]


def default_ports() -> set[int]:
    config = CoordinatorConfig()
    return {split_address(config.address)[1], split_address(config.http_address)[1]}


def test_exposed_ports_are_those_that_the_coordinator_takes_by_default() -> None:
    assert dockerfile_ports() == default_ports()


def sent_to_the_builder() -> tuple[set[str], set[str]]:
    """What .dockerignore lets through, and what it holds back of that."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    return sent, set(rules[1:]) - {f"!{rule}" for rule in sent}


def test_everything_that_the_dockerfile_copies_is_sent_to_the_builder_and_is_there() -> None:
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE)
    sources = {source for line in copies for source in line.split()}
    sent, held_back = sent_to_the_builder()
    folders = {name for name in sent if (ROOT / name).is_dir()}
    assert {name for name in sources if name.partition("/")[0] not in folders} | folders == sent
    assert held_back == {"**/__pycache__", "dashboard/node_modules"}
    for source in sources - {"dist/*.whl"}:  # there where a build has to do without an index
        assert (ROOT / source).exists(), source


def test_wheel_built_from_what_the_builder_gets_is_that_of_the_repository(tmp_path: Path) -> None:
    sent, _ = sent_to_the_builder()
    for name in ("LICENSE", "README.md", "pyproject.toml", "src"):
        assert name in sent
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    assert files_of_the_wheel(tmp_path) == files_of_the_wheel(ROOT)


def files_of_the_wheel(root: Path) -> list[str]:
    """Names of what hatchling packs, without building anything."""
    builder = WheelBuilder(str(root))
    with builder.config.set_build_data({"artifacts": [], "force_include": {}}):
        included = builder.recurse_included_files()
        return sorted(file.distribution_path for file in included)


def test_clone_is_all_that_a_build_needs() -> None:
    """Nothing has to be made beforehand: images of both compose files are built from the clone."""
    for name in COMPOSE_FILES:
        for service, options in compose(name)["services"].items():
            assert options["build"] == {"context": ".", "target": service}


def test_every_stage_that_installs_takes_the_settings_of_the_package_index() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    installing = [s for s in stages if re.search(r'RUN .*/(install|wheel)\.sh"', s)]
    assert len(installing) == 3
    for stage in installing:
        for argument in ("PIP_INDEX_URL", "PIP_NO_INDEX", "SOURCE_DATE_EPOCH"):
            assert re.search(rf"^ARG {argument}\b", stage, flags=re.MULTILINE), (argument, stage)


def test_images_run_as_a_numbered_user_that_is_not_root() -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, flags=re.MULTILINE)
    assert user[0] == user[1] != "0"


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_sets_only_variables_that_strata_reads(name: str) -> None:
    for service in compose(name)["services"].values():
        assert set(service["environment"]) <= known_variables()


def test_example_settings_are_those_that_the_compose_file_uses_or_strata_reads() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    offered = set(re.findall(r"^#?([A-Z_]+)=", example, flags=re.MULTILINE))
    text = (ROOT / "docker-compose.prod.yml").read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{([A-Z_]+)", text))
    assert used <= offered
    assert offered - used <= known_variables()


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_builds_targets_that_exist_and_publishes_to_loopback_only(name: str) -> None:
    targets = set(re.findall(r" AS (\S+)$", DOCKERFILE, flags=re.MULTILINE))
    for service in compose(name)["services"].values():
        assert service.get("build", {"target": "worker"})["target"] in targets
        for port in service.get("ports", []):
            host, published, inside = port.split(":")
            assert host == "127.0.0.1"
            assert published == inside
            assert int(inside) in default_ports()


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_gives_workers_time_to_save_and_waits_for_a_healthy_coordinator(name: str) -> None:
    services = compose(name)["services"]
    worker = services["worker"]
    assert float(worker["stop_grace_period"].removesuffix("s")) >= 2 * GRACE_SECONDS
    assert worker["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
    port = split_address(CoordinatorConfig().address)[1]
    assert worker["environment"]["COORDINATOR_URL"] == f"http://coordinator:{port}"


def test_demonstration_has_four_workers_and_tells_them_so() -> None:
    worker = compose("docker-compose.yml")["services"]["worker"]
    assert worker["deploy"]["replicas"] == int(worker["environment"]["WORLD_SIZE"]) == 4
    program = (ROOT / "examples" / Path(worker["command"][1]).name).read_text(encoding="utf-8")
    for option in worker["command"][2:]:
        assert f'"{option.partition("=")[0]}"' in program


def test_production_limits_resources_restarts_and_keeps_no_secret_in_the_file() -> None:
    for service in compose("docker-compose.prod.yml")["services"].values():
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
        assert service["restart"] in ("always", "on-failure")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert not any("SECRET" in name or "KEY" in name for name in service["environment"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_and_executable(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert script.stat().st_mode & 0o111
