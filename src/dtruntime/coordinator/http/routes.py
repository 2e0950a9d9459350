"""The one table of paths, from which both the routes and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from ...errors import StorageError
from ...telemetry import EventLog
from ..state import Refused
from . import requests as q
from . import views
from .endpoints import Endpoints
from .read_model import Service
from .responses import Answer, Failure
from .security import SecurityHeaders

log = EventLog("http")

Handler = Callable[[Any, Request], Awaitable[Answer | Response]]


class Route(NamedTuple):
    """A path and what it gives."""

    method: str
    path: str
    handler: str
    """The name of the method of `Endpoints`, whose docstring is the summary."""
    query: type[Any] = q.NoQuery
    reply: Any = None
    media_types: tuple[str, ...] = ("application/json",)
    body: type[Any] | None = None
    errors: tuple[int, ...] = ()


_GET = "GET"
_OF_JOB = (400, 404)

ROUTES = (
    Route(_GET, "/api/health", "health", reply=views.Health),
    Route(
        _GET,
        "/api/dashboard",
        "dashboard",
        q.JobQuery,
        views.Dashboard,
        errors=_OF_JOB,
    ),
    Route(_GET, "/api/coordinator", "coordinator", reply=views.Coordinator),
    Route(_GET, "/api/jobs", "jobs", q.PageQuery, views.Page[views.Job], errors=(400,)),
    Route(
        _GET,
        "/api/workers",
        "workers",
        q.WorkerQuery,
        views.Page[views.Worker],
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/workers/{worker_id:path}",
        "worker",
        q.JobQuery,
        views.Worker,
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/datasets",
        "datasets",
        q.PageQuery,
        views.Page[views.Dataset],
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/checkpoints",
        "checkpoints",
        q.PageQuery,
        views.Page[views.Checkpoint],
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/barriers",
        "barriers",
        q.JobQuery,
        views.Barriers,
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/metrics",
        "metrics",
        q.JobQuery,
        views.Metrics,
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/history",
        "history",
        q.HistoryQuery,
        views.History,
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/tasks",
        "tasks",
        q.JobQuery,
        views.Page[views.Task],
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/logs",
        "logs",
        q.LogQuery,
        views.Page[views.LogEntry],
        ("application/json", "application/jsonl", "text/csv"),
        errors=_OF_JOB,
    ),
    Route(
        _GET,
        "/api/actions",
        "actions",
        q.JobQuery,
        views.Page[views.Action],
        errors=_OF_JOB,
    ),
    Route(
        "POST",
        "/api/actions",
        "act",
        reply=views.Action,
        body=q.ActionRequest,
        errors=(400, 403, 404, 413, 415, 429, 503),
    ),
    Route(
        _GET,
        "/api/events",
        "events",
        q.JobQuery,
        media_types=("text/event-stream",),
        errors=(*_OF_JOB, 503),
    ),
    Route(_GET, "/metrics", "prometheus", media_types=("text/plain",)),
)


class Application:
    """The routes over their handlers, with what all of them have in common."""

    def __init__(
        self,
        service: Service,
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
        except Failure as failure:
            return failure.response()
        except Refused as refused:
            return Failure.of(refused).response()
        except StorageError as exc:
            return Failure(503, "storage", str(exc)).response()
        except Exception as exc:
            log.error("http.failed", path=request.url.path, error=repr(exc))
            what = f"internal error: {type(exc).__name__}; the coordinator's log says more"
            return Failure(500, "internal", what).response()

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
        raise Failure(400, "invalid", f"a parameter is wrong: {what}") from None


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: "there is nothing here: /openapi.json lists what there is",
        405: f"{request.method} is not allowed here",
    }
    failure = Failure(
        error.status_code,
        {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "failed"),
        known.get(error.status_code, str(error.detail)),
    )
    response = failure.response()
    for name, value in (error.headers or {}).items():
        # Starlette keeps the methods in a set, whose order differs from process to process.
        response.headers[name] = ", ".join(sorted(value.split(", "))) if name == "Allow" else value
    return response
