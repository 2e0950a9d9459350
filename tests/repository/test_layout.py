"""The countable rules of the source's layout: few files in a folder, each a whole concept."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.repository.test_layers import imports_of, modules_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dtruntime"

MOST_FILES = 15
MOST_LINES = 600
SMALL = 120
"""A module of fewer lines that only one neighbour imports belongs into that neighbour."""

SAME_MODULES = {
    "datasets": "a registered dataset: of the machine, its HTTP view, the client, the command",
    "jax": "public paths: what checkpoints and data have for JAX",
}
"""Names that several modules have, and why they are the same concept."""
SAME_CLASSES = {
    "Action": "public, and its HTTP view, whose name is part of the API",
    "Barriers": "of the machine, and their HTTP view",
    "Dataset": "of the machine, and its HTTP view",
    "Job": "of the machine, and its HTTP view",
    "Destination": "one protocol, implemented for each library's arrays",
    "ArrayCollector": "one protocol, implemented for each library's arrays",
    "Membership": "public: as slots in sharding, and as the coordinator tells it",
    "Recovery": "public, and the HTTP view of one recovery, whose name is part of the API",
    "StrataCallback": "public: the callback for each library's trainer",
    "TakenBack": "one value, in two layers that may not import each other",
}
"""Names that several classes have, and why they are the same concept."""
SMALL_WITH_REASON: dict[str, str] = {}
"""Small modules with a single importer that have to be modules, and why."""

MODULES = {
    name: path for name, path in modules_of(SOURCE).items() if "gen" not in path.parts and name
}


def folders() -> dict[Path, list[Path]]:
    found = defaultdict(list)
    for path in MODULES.values():
        if path.name != "__init__.py":
            found[path.parent].append(path)
    return found


def packages() -> list[str]:
    """Packages that have modules or packages in them."""
    inner = {name.rpartition(".")[0] for name in MODULES}
    return [n for n, p in MODULES.items() if p.name == "__init__.py" and n in inner]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def importers() -> dict[str, set[str]]:
    """Who imports each module, lazily or not."""
    everything = modules_of(SOURCE)
    found = defaultdict(set)
    for name, path in everything.items():
        for item in imports_of(name, path, everything):
            if item.inner and item.inner != name:
                found[item.inner].add(name)
    return found


def test_no_folder_has_too_many_files():
    crowded = {
        str(folder.relative_to(SOURCE)): len(files)
        for folder, files in folders().items()
        if len(files) > MOST_FILES
    }
    assert not crowded, f"more than {MOST_FILES} files: {crowded}"


def test_no_file_is_too_long():
    long = {name: lines(path) for name, path in MODULES.items() if lines(path) > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: {long}"


def test_no_module_name_is_there_twice():
    homes = defaultdict(list)
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            homes[path.stem].append(name)
    twice = {stem: names for stem, names in homes.items() if len(names) > 1}
    assert set(twice) == set(SAME_MODULES), {
        stem: twice.get(stem, "only once: take it off the list")
        for stem in set(twice) ^ set(SAME_MODULES)
    }


def test_no_class_name_is_there_twice():
    homes = defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    twice = {label: names for label, names in homes.items() if len(names) > 1}
    assert set(twice) == set(SAME_CLASSES), {
        label: twice.get(label, "only once: take it off the list")
        for label in set(twice) ^ set(SAME_CLASSES)
    }


def test_small_modules_have_more_than_one_importer():
    lonely = {}
    known = importers()
    for name, path in MODULES.items():
        if path.name == "__init__.py" or lines(path) >= SMALL or len(known[name]) != 1:
            continue
        (importer,) = known[name]
        neighbour = MODULES.get(importer)
        if neighbour is not None and neighbour.parent == path.parent != SOURCE:
            lonely[name] = importer
    lonely = {name: user for name, user in lonely.items() if not user or "." in user}
    lonely = {name: user for name, user in lonely.items() if MODULES[user].name != "__init__.py"}
    assert set(lonely) == set(SMALL_WITH_REASON), {
        name: lonely.get(name, "has other importers: take it off the list")
        for name in set(lonely) ^ set(SMALL_WITH_REASON)
    }


@pytest.mark.parametrize("name", sorted(packages()))
def test_packages_say_which_file_to_read_first(name):
    docstring = ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8"))) or ""
    modules = {path.stem for path in MODULES[name].parent.glob("*.py")}
    modules |= {path.name for path in MODULES[name].parent.iterdir() if path.is_dir()}
    assert any(f"``{module}" in docstring for module in modules), (
        f"{name}: names no file of its own"
    )
