"""Random numbers of the program's own: Strata does not draw from the generators it uses."""

import ast
from pathlib import Path

import dtruntime

PACKAGE = Path(dtruntime.__file__).parent
OWN_GENERATORS = {"Random", "SystemRandom"}
KEEP_THEM = {PACKAGE / "run" / "tracked_state.py", PACKAGE / "data" / "torch.py"}
"""Saves the program's generators with its checkpoints; seeds those of loader processes."""


def uses_of_the_global_generator(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names
    }
    if "random" not in imported:
        return []
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: random.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr not in OWN_GENERATORS
    ]


def test_nothing_draws_from_the_global_generator() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path not in KEEP_THEM]
    assert [use for path in modules for use in uses_of_the_global_generator(path)] == []
