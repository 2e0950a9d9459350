"""The OpenAPI document, made from the table of routes and the types of the answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from ..._version import __version__
from . import views
from .endpoints import Endpoints
from .routes import ROUTES, Route

_REFERENCE = "#/components/schemas/{name}"


def document() -> bytes:
    """The whole document as JSON."""
    types: list[Any] = [views.Error, views.Change, views.Dashboard]
    types += [route.reply for route in ROUTES if route.reply is not None]
    types += [route.body for route in ROUTES if route.body is not None]
    _, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Strata coordinator",
                "version": __version__,
                "description": "Times are seconds since 1970, sizes bytes; null is what is not "
                "known. docs/http-api.md says more.",
            },
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler,
        "summary": (getattr(Endpoints, route.handler).__doc__ or "").rstrip("."),
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": _responses(route),
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(route.body)}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+):path\}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    (schema,), components = msgspec.json.schema_components([route.query])
    described = components[schema["$ref"].rpartition("/")[2]]
    return [
        {"name": name, "in": "query", "required": False, "schema": shape}
        for name, shape in described.get("properties", {}).items()
    ]


def _responses(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {media: {} for media in route.media_types}
    if route.reply is not None:
        content |= _json(route.reply)
    if "text/event-stream" in content:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    if route.handler == "health":
        responses["503"] = {"description": "It does not work", "content": _json(route.reply)}
    for status in _errors(route):
        described = HTTPStatus(status).phrase
        responses[str(status)] = {"description": described, "content": _json(views.Error)}
    return responses


def _errors(route: Route) -> Sequence[int]:
    return sorted({*route.errors, 500})


def _json(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return {"application/json": {"schema": schema}}
