"""The reference of the configuration, from the classes that hold it."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator

from dtruntime.config import ENVIRONMENT, Config
from scripts.docs_site.tables import code, table

INTRODUCTION = """\
# Configuration keys

Made from the classes that hold the configuration. How file, environment and arguments come
together, a whole file, and the variables of workers are in [configuration](../configuration.md).
"""


def page() -> str:
    """The whole page."""
    variables = {place: variable for variable, place in ENVIRONMENT.items()}
    lines = [INTRODUCTION]
    for section, kind in typing.get_type_hints(Config).items():
        lines += [f"## [{section}]", "", inspect.getdoc(kind) or "", ""]
        head = ("key", "type", "default", "meaning, and the variable that beats the file")
        lines += table(head, _rows(section, kind, variables))
    return "\n".join(lines)


def _rows(
    section: str, kind: type, variables: dict[tuple[str, str], str]
) -> Iterator[tuple[str, ...]]:
    meanings, types = field_docstrings(kind), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        meaning = meanings.get(field.name, "").replace("``", "`")
        variable = variables.get((section, field.name), "")
        yield (
            code(field.name),
            _type(types[field.name]),
            code(_value(field.default)),
            f"{meaning} {code(variable)}".strip(),
        )


def field_docstrings(kind: type) -> dict[str, str]:
    """The texts under the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found, before = {}, ""
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and before:
            found[before] = str(node.value.value)
        before = ""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            before = node.target.id
    return found


def _type(kind: object) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(code(_value(choice)) for choice in typing.get_args(kind))
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(
        typing.cast(type, kind), str(kind)
    )


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
