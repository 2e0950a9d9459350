"""What `import dtruntime` and `import strata` offer, and what they cost."""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

dtruntime = importlib.import_module("dtruntime")
strata = importlib.import_module("strata")

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dtruntime"

CONTRACT = {
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "ConnectionError",
    "DatasetRegistry",
    "DatasetSummary",
    "MovePlan",
    "Runtime",
    "ShardError",
    "ShardInfo",
    "StorageError",
    "StrataError",
    "SyncError",
    "TrainingOrchestrator",
    "WorkerConfig",
}
"""Names that users have been promised."""

LAZY_PACKAGES = [
    "dtruntime",
    "dtruntime.checkpoint",
    "dtruntime.coordinator",
    "dtruntime.data",
    "dtruntime.testing",
]
"""Packages that list their names in a table and, for type checkers, as imports."""

HEAVY = ["torch", "jax", "grpc", "numpy", "pyarrow"]

SUBMODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path != SOURCE / "__init__.py" and path.name != "__main__.py"
)


def names_for_type_checkers(package: str) -> set[str]:
    """Public names that the `__init__.py` of a package imports from modules of ours."""
    folder = SOURCE.joinpath(*package.split(".")[1:])
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.level > 0 or (node.module or "").partition(".")[0] == "dtruntime")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_all_is_sorted_without_repeats() -> None:
    assert list(dtruntime.__all__) == sorted(set(dtruntime.__all__))


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_all_equals_the_names_that_type_checkers_see(package: str) -> None:
    exported = importlib.import_module(package).__all__
    assert set(exported) - {"__version__"} == names_for_type_checkers(package)


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_lazy_names_are_there_and_listed(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert name in dir(module)
        assert getattr(module, name) is getattr(module, name)


def test_all_has_every_promised_name() -> None:
    assert set(dtruntime.__all__) >= CONTRACT


@pytest.mark.parametrize("name", dtruntime.__all__)
def test_exported_name_is_importable_documented_and_listed(name: str) -> None:
    assert getattr(dtruntime, name).__doc__, f"{name} has no docstring"
    assert name in dir(dtruntime)


def test_unknown_name_is_an_attribute_error() -> None:
    for package in (dtruntime, strata):
        with pytest.raises(AttributeError, match="CheckpointManger"):
            _ = package.CheckpointManger


def test_strata_exports_the_same_objects() -> None:
    assert strata.__all__ == dtruntime.__all__
    assert set(dir(strata)) >= set(strata.__all__)
    for name in strata.__all__:
        assert getattr(strata, name) is getattr(dtruntime, name)


@pytest.mark.parametrize("package", ["dtruntime", "strata"])
def test_star_import_binds_every_exported_name(package: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from {package} import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(dtruntime.__all__)


@pytest.mark.parametrize("name", SUBMODULES)
def test_strata_submodule_is_the_module_of_dtruntime(name: str) -> None:
    try:
        real = importlib.import_module(f"dtruntime.{name}")
    except ImportError as error:
        if str(error.name).startswith("dtruntime"):
            raise
        pytest.skip(f"an optional library is missing: {error}")
    assert importlib.import_module(f"strata.{name}") is real
    assert real.__spec__ is not None
    assert real.__name__ == real.__spec__.name == f"dtruntime.{name}"


def test_strata_submodule_imported_first_is_the_module_of_dtruntime() -> None:
    code = (
        "import strata.errors, sys; from strata.errors import StrataError; import dtruntime.errors;"
        "print(strata.errors is dtruntime.errors, sys.modules['strata.errors'] is strata.errors,"
        " StrataError is dtruntime.StrataError)"
    )
    assert run_python(code) == "True True True"


def test_strata_submodules_load_only_when_asked_for() -> None:
    code = (
        "import sys, importlib.util, strata; importlib.util.find_spec('strata.errors');"
        "print('dtruntime.errors' in sys.modules)"
    )
    assert run_python(code) == "False"


def test_unknown_strata_submodule_is_named_in_the_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'strata\.checkpoints'"):
        importlib.import_module("strata.checkpoints")


def test_class_reached_through_strata_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(strata.WorkerConfig)) is dtruntime.WorkerConfig


@pytest.mark.parametrize("package", ["dtruntime", "strata"])
def test_importing_the_package_alone_loads_no_heavy_library(package: str) -> None:
    code = f"import sys, {package}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert run_python(code) == ""
