"""The reference of the HTTP API, from its OpenAPI document."""

import json
from collections.abc import Iterator
from typing import Any

from dtruntime.coordinator.http.routes import document
from scripts.docs_site.tables import code, table

INTRODUCTION = """\
# HTTP

Made from the OpenAPI document that a coordinator serves at `/openapi.json`. What the figures mean
and how they are measured is in [the HTTP API](../http-api.md). {description}
"""


def page() -> str:
    """The whole page."""
    described = json.loads(document())
    text = described["info"]["description"].replace(" docs/http-api.md says more.", "")
    lines = [INTRODUCTION.format(description=text), "## Paths", ""]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            lines += _operation(f"{method.upper()} {path}", operation)
    lines += ["## Objects", ""]
    for name, schema in described["components"]["schemas"].items():
        lines += _schema(name, schema)
    return "\n".join(lines)


def _operation(title: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"### {title}", "", operation.get("summary", "").replace("``", "`") + ".", ""]
    parameters = operation.get("parameters", [])
    lines += table(
        ("parameter", "in", "type", "default"),
        ((code(p["name"]), p["in"], shape(p["schema"]), _default(p["schema"])) for p in parameters),
    )
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if body:
        lines += [f"Body: {shape(body['schema'])}", ""]
    return lines + table(("status", "answer"), _answers(operation["responses"]))


def _answers(responses: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for status, response in responses.items():
        kinds = [
            shape(content.get("schema", {})) if media == "application/json" else code(media)
            for media, content in response.get("content", {}).items()
        ]
        yield status, f"{response['description']}: {', '.join(filter(None, kinds))}"


def _schema(name: str, schema: dict[str, Any]) -> list[str]:
    required = set(schema.get("required", []))
    rows = [
        (
            code(field),
            shape(kind),
            "" if field in required else "may be absent",
            kind.get("description", ""),
        )
        for field, kind in schema.get("properties", {}).items()
    ]
    text = schema.get("description", "").replace("``", "`")
    if not rows:
        return [f"### {name}", "", text, "", shape(schema), ""]
    return [f"### {name}", "", text, "", *table(("field", "type", "", ""), rows)]


def shape(schema: dict[str, Any]) -> str:
    """A type in words, with links to objects."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(shape, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        items = schema.get("items") or {}
        return f"list of {shape(items)}" if items else "list"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {shape(schema['additionalProperties'])}"
    return str(schema.get("type", "")) + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    names = {"minimum": "from", "maximum": "to", "maxLength": "at most", "pattern": "matches"}
    found = [f"{word} `{schema[name]}`" for name, word in names.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _default(schema: dict[str, Any]) -> str:
    return code(json.dumps(schema["default"])) if "default" in schema else ""
