"""The documented TypeScript interfaces and the types of the answers are the same."""

import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtruntime.coordinator.http import routes, views
from dtruntime.coordinator.http.routes import ROUTES

PAGE = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text(encoding="utf-8")
(BLOCK,) = re.findall(r"```ts\n(.*?)```", PAGE, flags=re.DOTALL)
INTERFACES = dict(re.findall(r"interface (\w+) \{(.*?)\n\}", BLOCK, flags=re.DOTALL))
SCALARS = {"string": str, "boolean": bool}


def fields_of(body: str) -> dict[str, str]:
    """Field name to type, of an interface's body or an inline object."""
    bare = re.sub(r"//[^\n]*", "", body)
    found, depth, part = [], 0, ""
    for character in bare:
        depth += (character == "{") - (character == "}")
        if character == ";" and not depth:
            found.append(part)
            part = ""
        else:
            part += character
    pairs = (one.split(":", 1) for one in [*found, part] if one.strip())
    return {name.strip(): " ".join(kind.split()) for name, kind in pairs}


def alternatives(kind: str) -> list[str]:
    found, depth, part = [], 0, ""
    for character in kind:
        depth += (character in "{<") - (character in "}>")
        if character == "|" and not depth:
            found.append(part.strip())
            part = ""
        else:
            part += character
    return [*found, part.strip()]


def check(kind: str, ours: Any, where: str) -> None:
    """Assert that a documented type is that of a field."""
    documented = alternatives(kind)
    args = list(typing.get_args(ours)) if isinstance(ours, types.UnionType) else [ours]
    assert ("null" in documented) == (types.NoneType in args), f"{where}: null?"
    documented = [one for one in documented if one != "null"]
    (inner,) = [one for one in args if one is not types.NoneType]
    if typing.get_origin(inner) is typing.Literal:
        assert {one.strip('"') for one in documented} == set(typing.get_args(inner)), where
        return
    (one,) = documented
    if one.endswith("[]"):
        assert typing.get_origin(inner) is list, where
        check(one.removesuffix("[]"), typing.get_args(inner)[0], where)
    elif one.startswith("{"):
        compare(fields_of(one[1:-1]), inner, where)
    elif one.startswith("Record<"):
        value = one.removesuffix(">").partition(",")[2].strip()
        check(value, typing.get_args(inner)[1], where)
    elif one == "number":
        assert inner in (int, float), where
    elif one in SCALARS:
        assert inner is SCALARS[one], where
    else:
        assert inner is getattr(views, one), where


def compare(documented: dict[str, str], struct: Any, where: str) -> None:
    ours = typing.get_type_hints(struct)
    assert list(documented) == list(ours), where
    for name, kind in documented.items():
        check(kind, ours[name], f"{where}.{name}")


@pytest.mark.parametrize("name", INTERFACES)
def test_documented_interface_is_that_of_the_answers(name: str) -> None:
    compare(fields_of(INTERFACES[name]), getattr(views, name), name)


def test_documented_paths_are_those_that_are_served() -> None:
    rows = re.findall(r"^\| `(GET|POST) (/[^?`]*)(?:\?([^`]*))?` \|", PAGE, flags=re.MULTILINE)
    documented = {
        (method, path): {name.rstrip("=") for name in query.split("&") if name}
        for method, path, query in rows
    }
    served = {
        (route.method, re.sub(r":path", "", route.path)): set(route.query.__struct_fields__)
        for route in ROUTES
    }
    paged = served["GET", "/api/jobs"] - {"job"}
    served["GET", "/api/jobs"] = paged
    served["GET", "/openapi.json"] = set()
    assert documented == served


def test_openapi_document_refers_to_what_it_has() -> None:
    document = msgspec.json.decode(routes.document())
    references = set(re.findall(r"#/components/schemas/([\w.\[\]]+)", str(document)))
    assert references <= set(document["components"]["schemas"])
    assert len(document["paths"]) == len({route.path for route in ROUTES})


def test_defaults_of_queries_are_within_their_own_bounds() -> None:
    for route in ROUTES:
        msgspec.convert(msgspec.to_builtins(route.query()), route.query)
    assert views.PageQuery(cursor="12").start == 12
