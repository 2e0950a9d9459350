"""The table of routes, from which the application and the OpenAPI document are built."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from ..._version import __version__
from ...errors import StorageError
from ...telemetry import EventLog
from ..state import Refused
from . import views
from .endpoints import Endpoints
from .read_model import ObservedService
from .responses import Answer, HttpError
from .security import SecurityHeaders

log = EventLog("http")

Handler = Callable[[Any, Request], Awaitable[Answer | Response]]


class Route(NamedTuple):
    """A path and what it gives."""

    method: str
    path: str
    handler: str
    """The name of the method of `Endpoints`, whose docstring is the summary."""
    query: type[Any] = views.NoQuery
    reply: Any = None
    media_types: tuple[str, ...] = ("application/json",)
    body: type[Any] | None = None
    errors: tuple[int, ...] = ()


_GET = "GET"
_OF_JOB = (400, 404)

ROUTES = (
    Route(_GET, "/api/health", "health", reply=views.Health),
    Route(_GET, "/api/dashboard", "dashboard", views.JobQuery, views.Dashboard, errors=_OF_JOB),
    Route(_GET, "/api/coordinator", "coordinator", reply=views.Coordinator),
    Route(_GET, "/api/jobs", "jobs", views.PageQuery, views.Page[views.Job], errors=(400,)),
    Route(
        _GET, "/api/workers", "workers", views.WorkerQuery, views.Page[views.Worker], errors=_OF_JOB
    ),
    Route(
        _GET,
        "/api/workers/{worker_id:path}",
        "worker",
        views.JobQuery,
        views.Worker,
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/datasets",
        "datasets",
        views.PageQuery,
        views.Page[views.Dataset],
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/checkpoints",
        "checkpoints",
        views.PageQuery,
        views.Page[views.Checkpoint],
        errors=_OF_JOB,
    ),
    Route(_GET, "/api/barriers", "barriers", views.JobQuery, views.Barriers, errors=_OF_JOB),
    Route(_GET, "/api/metrics", "metrics", views.JobQuery, views.Metrics, errors=_OF_JOB),
    Route(_GET, "/api/history", "history", views.HistoryQuery, views.History, errors=_OF_JOB),
    Route(_GET, "/api/tasks", "tasks", views.JobQuery, views.Page[views.Task], errors=_OF_JOB),
    Route(
        _GET,
        "/api/logs",
        "logs",
        views.LogQuery,
        views.Page[views.LogEntry],
        ("application/json", "application/jsonl", "text/csv"),
        errors=_OF_JOB,
    ),
    Route(
        _GET, "/api/actions", "actions", views.JobQuery, views.Page[views.Action], errors=_OF_JOB
    ),
    Route(
        "POST",
        "/api/actions",
        "act",
        reply=views.Action,
        body=views.ActionRequest,
        errors=(400, 403, 404, 413, 415, 429, 503),
    ),
    Route(
        _GET,
        "/api/events",
        "events",
        views.JobQuery,
        media_types=("text/event-stream",),
        errors=(*_OF_JOB, 503),
    ),
    Route(_GET, "/metrics", "prometheus", media_types=("text/plain",)),
)


class Application:
    """The ASGI application: routes, error handling and security headers."""

    def __init__(
        self,
        service: ObservedService,
        endpoints: Endpoints,
        document: Callable[[], bytes],
        dashboard: ASGIApp,
        counted: Callable[[str, int], None],
    ) -> None:
        self._service = service
        self._endpoints = endpoints
        self._counted = counted
        self._document: Answer | None = None
        self._make_document = document
        self.asgi = Starlette(
            routes=[
                *(self._route(route) for route in ROUTES),
                StarletteRoute("/openapi.json", self._openapi, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error},
            middleware=[Middleware(SecurityHeaders)],
        )
        self.asgi.router.default = dashboard

    def _route(self, route: Route) -> StarletteRoute:
        handler: Handler = getattr(self._endpoints, route.handler)

        async def endpoint(request: Request) -> Response:
            response = await self._answer(route, handler, request)
            self._counted(route.path, response.status_code)
            return response

        return StarletteRoute(route.path, endpoint, methods=[route.method])

    async def _answer(self, route: Route, handler: Handler, request: Request) -> Response:
        try:
            answer = await handler(_read_query(route.query, request), request)
            if isinstance(answer, Response):
                return answer
            if route.handler != "health":
                await self._service.settled()
            return await answer.response(request.headers)
        except HttpError as failure:
            return failure.response()
        except Refused as refused:
            return HttpError.of(refused).response()
        except StorageError as exc:
            return HttpError(503, "storage", str(exc)).response()
        except Exception as exc:
            log.error("http.failed", path=request.url.path, error=repr(exc))
            what = f"internal error: {type(exc).__name__}; the coordinator's log says more"
            return HttpError(500, "internal", what).response()

    async def _openapi(self, request: Request) -> Response:
        if self._document is None:
            self._document = Answer(self._make_document())
        self._counted("/openapi.json", 200)
        return await self._document.response(request.headers)


def _read_query(kind: type[Any], request: Request) -> Any:
    try:
        return msgspec.convert(dict(request.query_params), type=kind, strict=False)
    except msgspec.ValidationError as exc:
        what = str(exc).replace("$.", "")
        raise HttpError(400, "invalid", f"a parameter is wrong: {what}") from None


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: "there is nothing here: /openapi.json lists what there is",
        405: f"{request.method} is not allowed here",
    }
    failure = HttpError(
        error.status_code,
        {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "failed"),
        known.get(error.status_code, str(error.detail)),
    )
    response = failure.response()
    for name, value in (error.headers or {}).items():
        # Starlette keeps the methods in a set, whose order differs from process to process.
        response.headers[name] = ", ".join(sorted(value.split(", "))) if name == "Allow" else value
    return response


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
