"""Names and limits that the documentation gives are those of the code."""

import ast
import dataclasses
import importlib
import pkgutil
import re
import typing
from functools import cache
from pathlib import Path

import pytest

from dtruntime.config import Config
from dtruntime.coordinator import state
from scripts.docs_site.repository import CODE
from tests.repository.docs.test_examples import PAGES, ROOT

SOURCES = ("src", "proto", "scripts", "examples", "benchmarks", "deploy", "k8s", "dashboard/src")
FILES = ("Makefile", "Dockerfile", "docker-compose.yml", "docker-compose.prod.yml", ".env.example")
SUFFIXES = {".py", ".proto", ".sh", ".sbatch", ".yaml", ".yml", ".json", ".ts", ".tsx", ".sql"}

ELSEWHERE = {
    "--rdzv-backend",
    "--rdzv-id",
    "BatchNorm",
    "GraceTime",
    "GradScaler",
    "KillWait",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_RESOURCE_ATTRIBUTES",
    "SyncBatchNorm",
    "epoch_5",
    "monitored_barrier",
    "save_device_host_concurrent_gb",
    "validate_hash",
}
"""Names of other programs and libraries that nothing here uses, and one of an example."""


@cache
def words_of_the_code() -> frozenset[str]:
    """All identifiers and options in the sources, and the names of all files."""
    files = [ROOT / name for name in FILES] + [
        path
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and "static" not in path.parts
    ]
    words: set[str] = set()
    for file in files:
        words.update(re.findall(r"(?:--)?[A-Za-z_][\w-]*|\w+", file.read_text(encoding="utf-8")))
    words |= {part for word in words for part in re.findall(r"\w+", word)}
    for test in (ROOT / "tests").rglob("*.py"):
        words.add(test.stem)
        words.update(re.findall(r"\b(?:STRATA_\w+|test_\w+)", test.read_text(encoding="utf-8")))
    return frozenset(words)


def names_in(code: str) -> set[str]:
    """What in a piece of code without blanks can only be a name: options, variables, a_b, aB."""
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", code))
    plain = re.sub(r'"[^"]*"|\{[^}]*\}|--[a-z-]+', " ", code)
    return options | set(re.findall(r"\b(?:[A-Za-z]+_\w+|[A-Z][a-z]+[A-Z]\w+)\b", plain))


INLINE = dict.fromkeys(
    (f"{page.relative_to(ROOT)}", found[0].strip("`"))
    for page in PAGES
    for found in CODE.finditer(page.read_text(encoding="utf-8"))
    if not found[0].lstrip().startswith("```")
)


def unknown_in(code: str) -> set[str]:
    known = words_of_the_code() | ELSEWHERE
    # Metrics get these endings when they are scraped.
    plain = {name: re.sub(r"^(strata_.*)_(count|info)$", r"\1", name) for name in names_in(code)}
    return {name for name in plain if plain[name] not in known and name not in known}


def test_names_in_running_text_exist() -> None:
    complaints = [
        f"{page}: `{code}`: nothing is called {', '.join(sorted(unknown))}"
        for page, code in INLINE
        if (unknown := unknown_in(code))
    ]
    assert not complaints, "\n".join(complaints)


def test_names_that_do_not_exist_are_found() -> None:
    assert unknown_in("--multipart-dayz")
    assert unknown_in("heartbeat_timout_ms")
    assert unknown_in("Recovery(wait_secunds=)")
    assert unknown_in("StrataReeder")
    assert not unknown_in("Recovery(wait_seconds=)")


def test_names_that_are_listed_as_of_others_are_mentioned() -> None:
    mentioned = {name for _, code in INLINE for name in names_in(code)}
    assert mentioned >= ELSEWHERE
    assert not ELSEWHERE & words_of_the_code()


def test_configuration_keys_in_running_text_exist() -> None:
    keys = {
        section: {field.name for field in dataclasses.fields(kind)}
        for section, kind in typing.get_type_hints(Config).items()
    }
    for page in PAGES:
        named = re.findall(r"`\[(\w+)\](?: (\w+))?`", page.read_text(encoding="utf-8"))
        for section, key in named:
            assert section in keys, f"{page.name}: [{section}]"
            assert not key or key in keys[section], f"{page.name}: [{section}] {key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_in_running_text_exist(page: Path) -> None:
    folders = "|".join(("src", "tests", "docs", "examples", "scripts", "deploy", "k8s"))
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{page.name}: {missing}"


SOURCE = ROOT / "src" / "dtruntime"
STRUCTURE = ("docs/architecture.md", "docs/state-machine.md", "CONTRIBUTING.md")
"""Pages about the source: paths in them are relative to it, or to the repository."""


def missing_source(code: str) -> bool:
    """Whether a piece of code names a file, folder or module of ours that is not there."""
    places = (ROOT, SOURCE, ROOT / "tests" / "unit" / "coordinator" / "state")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", code) and ("/" in code or code.endswith(".py")):
        ours = code.endswith(".py") or any((at / code.partition("/")[0]).is_dir() for at in places)
        return ours and not any((at / code).exists() for at in places)
    parts = code.removeprefix("dtruntime.").split(".")
    if not re.fullmatch(r"\w+(\.\w+)+", code) or not (SOURCE / parts[0]).is_dir():
        return False
    path = SOURCE.joinpath(*parts)
    if path.is_dir() or path.with_suffix(".py").exists():
        return False
    return not hasattr(importlib.import_module(f"dtruntime.{'.'.join(parts[:-1])}"), parts[-1])


@pytest.mark.parametrize("page", STRUCTURE)
def test_sources_named_in_pages_about_the_source_exist(page: str) -> None:
    found = (match[0].strip("`") for match in CODE.finditer((ROOT / page).read_text("utf-8")))
    named = [code for code in found if "\n" not in code]
    assert any(code.endswith(".py") for code in named)
    missing = [code for code in named if missing_source(code)]
    assert not missing, f"{page}: {missing}"


HOP = re.compile(r"^\d+\. `([\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+): ", re.MULTILINE)


def hops_in(text: str) -> list[tuple[str, str]]:
    """File and function of each line of a walk."""
    found = HOP.findall(text)
    return [(file, name) for file, names in found for name in re.findall(r"`([\w.]+)`", names)]


def defined_in(file: str) -> set[str]:
    """The functions and methods of a source file, by their qualified names."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, kinds)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            names |= {f"{owner.name}.{node.name}" for node in owner.body if isinstance(node, kinds)}
    return names


def test_functions_of_the_walks_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = text[text.index("## Five walks") : text.index("## Decisions")]
    hops = hops_in(walks)
    assert len({file for file, _ in hops}) > 30
    assert len(HOP.findall(walks)) == len(re.findall(r"^\d+\.", walks, re.MULTILINE))
    missing = [f"{file} {name}" for file, name in hops if name not in defined_in(file)]
    assert not missing, missing


def test_sources_that_do_not_exist_are_found() -> None:
    missing = ("http/ports.py", "coordinator/http/ports.py", "filling.py", "coordinator/wire")
    assert all(map(missing_source, (*missing, "coordinator.wire", "testing.StorageConformity")))
    present = ("rpc/decode.py", "coordinator/http", "storage.urls", "testing.StorageConformance")
    assert not any(
        map(missing_source, (*present, "grpc.aio", "tests/repository/docs", "worker.slow"))
    )


BOUNDS = {
    "jobs": ["JOBS_LIMIT"],
    "open barriers of a job": ["OPEN_LIMIT"],
    "completed rounds kept": ["ROUNDS_KEPT", "VALUES_KEPT"],
    "losses kept": ["LOSSES_KEPT", "TIMES_KEPT"],
    "actions pending": ["ACTIONS_LIMIT"],
    "checkpoints": ["CHECKPOINTS_KEPT", "PENDING_LIMIT"],
    "attempts kept": ["ATTEMPTS_KEPT", "RANKS_KEPT"],
    "datasets": ["DATASETS_LIMIT", "SHARDS_LIMIT"],
    "shard assignments": ["ASSIGNMENTS_LIMIT"],
    "epochs kept": ["EPOCHS_KEPT"],
    "segments of an epoch": ["SEGMENTS_LIMIT", "SEGMENT_SLOTS_LIMIT"],
    "journal": ["JOURNAL_LENGTH", "JOB_EVENTS_KEPT"],
    "names in one answer": ["NAMES_CUT", "RANKS_CUT", "SLOTS_CUT"],
}
"""Rows of the table of bounds, and the constants of the state machine that they give."""


def limits() -> dict[str, int]:
    found: dict[str, int] = {}
    for module in pkgutil.walk_packages(state.__path__, f"{state.__name__}."):
        names = vars(importlib.import_module(module.name))
        found |= {name: value for name, value in names.items() if isinstance(value, int)}
    return found


def written(number: int) -> str:
    """A number as the page writes it."""
    if number % 2**20 == 0:
        return f"{number // 2**20} MiB"
    return f"{number // 10**6} million" if number % 10**6 == 0 else f"{number:,}"


@pytest.mark.parametrize("row", BOUNDS)
def test_documented_bound_is_that_of_the_state_machine(row: str) -> None:
    page = (ROOT / "docs" / "state-machine.md").read_text(encoding="utf-8")
    (bound,) = re.findall(rf"^\| {re.escape(row)} \| (.+) \|$", page, flags=re.MULTILINE)
    for name in BOUNDS[row]:
        number = written(limits()[name])
        assert re.search(rf"(?<![\d,]){number}(?![\d,]*\d)", bound), f"{name} is {number}"
