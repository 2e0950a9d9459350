"""Imports point strictly down: the layer table of docs/architecture.md, enforced."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dtruntime"
TABLE = ROOT / "docs" / "architecture.md"

ALLOWED_IMPORTERS = {
    "torch": {
        "data.torch",
        "checkpoint.save.cuda",
        "checkpoint.dcp.items",
        "checkpoint.dcp.metadata",
        "checkpoint.dcp.sharded_states",
        "checkpoint.dcp.reader",
        "checkpoint.dcp.writer",
        "checkpoint.state_dict.torch_tensors",
        "run.pytorch.gradients",
        "run.pytorch.process_group",
        "run.pytorch.sharded_models",
    },
    "jax": {
        "data.jax",
        "checkpoint.jax",
        "checkpoint.state_dict.jax_arrays",
    },
    "pytorch_lightning": {"integrations.lightning"},
    "transformers": {"integrations.transformers"},
    "etcd3": {"coordinator.store.etcd"},
    "aetcd": {"coordinator.store.etcd"},
    "etcd_client": {"coordinator.store.etcd"},
}
"""Heavy or optional libraries, and the only modules that may import each."""

HANDLE_MESSAGES = ("rpc", "client", "coordinator", "bench.coordinator_throughput")
"""Packages and modules that may import protobuf's messages."""

Layers = dict[str, int]


@dataclass(frozen=True)
class Import:
    """One imported module, seen in the module `importer` (names relative to dtruntime)."""

    importer: str
    line: int
    target: str
    """The absolute name of the imported module."""
    lazy: bool
    """Inside a function or under TYPE_CHECKING: importing the importer does not run it."""

    @property
    def inner(self) -> str | None:
        """The target relative to dtruntime, "" for the root package, None when it is foreign."""
        if self.target == "dtruntime":
            return ""
        ours = self.target.startswith("dtruntime.")
        return self.target.removeprefix("dtruntime.") if ours else None

    def __str__(self) -> str:
        return f"{self.importer or '__init__'}, line {self.line}: imports {self.target}"


def read_layers(text: str) -> Layers:
    """Level by unit, from the table between the layers:begin and layers:end comments."""
    table = re.search(r"<!-- layers:begin -->\n(.*?)<!-- layers:end -->", text, re.DOTALL)
    assert table, "the layer table's begin and end comments are missing"
    rows = [line for line in table[1].splitlines() if line.startswith("|")]
    assert re.fullmatch(r"\|\s*level\s*\|\s*units\s*\|", rows[0]), f"unexpected header: {rows[0]}"
    layers: Layers = {}
    for row in rows[2:]:
        cells = re.fullmatch(r"\|\s*(\d+)\s*\|(.*)\|", row)
        assert cells, f"not a row of levels and units: {row}"
        for unit in re.findall(r"`([^`]+)`", cells[2]):
            assert unit not in layers, f"{unit} is in the layer table twice"
            layers[unit] = int(cells[1])
    return layers


def modules_of(source: Path) -> dict[str, Path]:
    """Every module under `source` by its name relative to it; "" is the root package."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, lazy in walk(ast.parse(path.read_text(encoding="utf-8")), lazy=False):
        for target in targets_of(node, package, modules):
            yield Import(name, node.lineno, target, lazy)


def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """Every statement and expression with whether it runs later than the module's import."""
    guarded: list[ast.AST]
    if isinstance(node, ast.If) and names_type_checking(node.test):
        guarded, lazily = [*node.body], True
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        guarded, lazily = list(ast.iter_child_nodes(node)), True
    else:
        guarded, lazily = [], lazy
    for child in ast.iter_child_nodes(node):
        child_lazy = lazily if child in guarded else lazy
        if isinstance(child, ast.stmt | ast.expr):
            yield child, child_lazy
        yield from walk(child, child_lazy)


def names_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def targets_of(node: ast.AST, package: str, modules: dict[str, Path]) -> Iterator[str]:
    """The absolute names of the modules that one statement or expression imports."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = absolute(module or "", level, package)
            for alias in names:
                yield submodule_or_base(base, alias.name, modules)
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(func) in {"import_module", "importlib.import_module", "__import__"}:
                stripped = name.lstrip(".")
                yield absolute(stripped, len(name) - len(stripped), package)


def absolute(module: str, level: int, package: str) -> str:
    if level == 0:
        return module
    parts = ["dtruntime", *package.split(".")] if package else ["dtruntime"]
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def submodule_or_base(base: str, name: str, modules: dict[str, Path]) -> str:
    """`from base import name`: base.name when that is a module of ours, otherwise base."""
    if base == "dtruntime" or base.startswith("dtruntime."):
        candidate = f"{base}.{name}".removeprefix("dtruntime.")
        if candidate in modules:
            return f"dtruntime.{candidate}"
        if base == "dtruntime" and name.startswith("__"):
            return "dtruntime.__init__"
    return base


def unit_of(module: str, layers: Layers) -> str | None:
    """The table's unit that the module is or lies in."""
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return module or None


def is_facade(module: str, layers: Layers) -> bool:
    """A package whose parts are units of their own; its `__init__` only re-exports them."""
    prefix = f"{module}." if module else ""
    return module not in layers and any(unit.startswith(prefix) for unit in layers)


def facade_level(module: str, layers: Layers) -> int:
    prefix = f"{module}." if module else ""
    return max(level for unit, level in layers.items() if unit.startswith(prefix))


def violations(source: Path, layers: Layers) -> list[str]:
    modules = modules_of(source)
    found: list[str] = []
    for name, path in modules.items():
        if is_facade(name, layers):
            check = check_facade
        elif unit_of(name, layers):
            check = check_unit
        else:
            found.append(f"{name} belongs to no unit of the layer table in docs/architecture.md")
            continue
        for item in imports_of(name, path, modules):
            complaint = check(item, layers) or check_library(item)
            if complaint:
                found.append(f"{item}: {complaint}")
    return found


def check_facade(item: Import, layers: Layers) -> str | None:
    if item.inner is None:
        foreign = item.target.partition(".")[0] not in sys.stdlib_module_names
        return "must be lazy in a re-exporting package" if foreign and not item.lazy else None
    if item.inner == "_lazy":
        return None  # what makes the others lazy
    if not item.lazy:
        return "must be lazy (in a table of _lazy.exports, with an import under TYPE_CHECKING)"
    if item.importer and not item.inner.startswith(f"{item.importer}."):
        return "a package re-exports its own modules only"
    return None


def check_unit(item: Import, layers: Layers) -> str | None:
    if item.inner is None or item.inner == "__init__":
        return None
    own = unit_of(item.importer, layers)
    assert own is not None
    if own == "client" and (item.inner + ".").startswith("coordinator."):
        return "client and coordinator meet in rpc only"
    if (item.inner + ".").startswith("coordinator.http.") and not own.startswith("coordinator."):
        return "only the coordinator uses its HTTP side"
    other = unit_of(item.inner, layers)
    if other == own:
        return None
    if other is None and not is_facade(item.inner, layers):
        return "belongs to no unit of the layer table"
    level = layers[other] if other else facade_level(item.inner, layers)
    if level < layers[own]:
        return None
    return f"{own} (level {layers[own]}) must not import level {level}"


def check_library(item: Import) -> str | None:
    library = item.target.partition(".")[0]
    allowed = ALLOWED_IMPORTERS.get(library)
    if allowed is None or item.importer in allowed:
        return None
    return f"only {', '.join(sorted(allowed))} may import {library}"


def test_imports_of_the_source_tree_point_strictly_down() -> None:
    found = violations(SOURCE, read_layers(TABLE.read_text(encoding="utf-8")))
    assert not found, "\n".join(["imports against the layer table:", *found])


def test_messages_of_protobuf_stay_between_clients_and_the_coordinator() -> None:
    modules = modules_of(SOURCE)
    handling = {
        name
        for name, path in modules.items()
        for item in imports_of(name, path, modules)
        if (item.inner or "").startswith("rpc.gen") or item.target.startswith("google.protobuf")
    }
    places = tuple(f"{place}." for place in HANDLE_MESSAGES)
    assert {name for name in handling if not f"{name}.".startswith(places)} == set()
    assert any(name.startswith("client.") for name in handling)


LAYERS = {
    "errors": 0,
    "types": 0,
    "config": 1,
    "sharding": 2,
    "coordinator.state": 3,
    "rpc": 4,
    "data.torch": 5,
    "client": 6,
    "coordinator.server": 6,
    "cli": 7,
}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("config.py", "from dtruntime.rpc import codec"),
        ("config.py", "import dtruntime.rpc.codec"),
        ("config.py", "from .rpc import codec"),
        ("config.py", "from . import rpc"),
        ("config.py", "def load():\n    from dtruntime.rpc import codec"),
        ("config.py", "if TYPE_CHECKING:\n    from dtruntime.rpc import codec"),
        ("config.py", "x = importlib.import_module('dtruntime.rpc')"),
        ("config.py", "import torch"),
        ("config.py", "import dtruntime"),
        ("sharding/consistent_hash.py", "from ..rpc import codec"),
        ("types.py", "from dtruntime.errors import StrataError"),
        ("stray.py", ""),
        ("coordinator/stray.py", ""),
        ("client/worker.py", "from dtruntime.coordinator.state import apply"),
        ("client/worker.py", "from dtruntime import coordinator"),
        ("cli/main.py", "from dtruntime.coordinator.http import event_log"),
        ("coordinator/server.py", "from dtruntime.coordinator import CoordinatorService"),
        ("__init__.py", "from dtruntime.errors import StrataError"),
        ("__init__.py", "import numpy"),
        ("coordinator/__init__.py", "from .state import apply"),
        ("coordinator/__init__.py", "def f():\n    from dtruntime.client import worker"),
        ("coordinator/__init__.py", "class A:\n    from .state import apply"),
    ],
)
def test_forbidden_import_is_reported(tmp_path: Path, path: str, code: str) -> None:
    assert len(violations(tree(tmp_path, {path: code}), LAYERS)) == 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("config.py", "import numpy, os\nfrom dtruntime.errors import StrataError"),
        ("config.py", "from dtruntime import __version__"),
        ("sharding/consistent_hash.py", "from . import table\nfrom .table import Slots"),
        ("sharding/consistent_hash.py", "from ..types import ShardInfo"),
        ("sharding/consistent_hash.py", "from dtruntime.sharding import Slots"),
        ("client/worker.py", "from dtruntime.rpc import codec"),
        ("coordinator/server.py", "from .state import apply"),
        ("data/torch.py", "import torch.utils.data"),
        ("cli/main.py", "from dtruntime.coordinator import CoordinatorService"),
        ("__init__.py", "import sys\nif TYPE_CHECKING:\n    from dtruntime.client import worker"),
        ("coordinator/__init__.py", "def __getattr__(name):\n    from . import state, server"),
    ],
)
def test_downward_import_is_accepted(tmp_path: Path, path: str, code: str) -> None:
    assert violations(tree(tmp_path, {path: code}), LAYERS) == []


def tree(folder: Path, changes: dict[str, str]) -> Path:
    """A source tree with every unit of LAYERS, empty but for the given files."""
    empty = (
        "__init__.py errors.py types.py config.py sharding/__init__.py sharding/table.py "
        "coordinator/__init__.py coordinator/state.py coordinator/server.py rpc/__init__.py "
        "rpc/codec.py data/__init__.py data/torch.py client/__init__.py client/worker.py "
        "cli/__init__.py cli/main.py"
    )
    for name, code in {**dict.fromkeys(empty.split(), ""), **changes}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    return folder


def test_layer_table_in_another_shape_is_an_error() -> None:
    with pytest.raises(AssertionError, match="unexpected header"):
        read_layers("<!-- layers:begin -->\n| units | level |\n<!-- layers:end -->")
    with pytest.raises(AssertionError, match="twice"):
        read_layers(
            "<!-- layers:begin -->\n| level | units |\n|---|---|\n"
            "| 1 | `auth` |\n| 0 | `auth` |\n<!-- layers:end -->"
        )
