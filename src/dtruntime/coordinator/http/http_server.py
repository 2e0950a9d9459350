"""The HTTP server, on the coordinator's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...config import TelemetryConfig, split_address
from ...dashboard import static_folder
from ...errors import ConnectionError
from ...telemetry import EventLog, tracing
from . import routes
from .endpoints import Endpoints
from .event_stream import JobStreams
from .metrics.prometheus import Exporter
from .metrics.sampler import Sampler
from .metrics.time_series import HistoryFiles
from .read_model import ObservedService
from .routes import Application
from .security import OriginPolicy
from .snapshot.job import SnapshotReader

if TYPE_CHECKING:
    from .metrics.otlp_export import MetricsExport

log = EventLog("http")

CONNECTIONS_MOST = 1024
ADDRESS_CONNECTIONS_MOST = 256
"""Connections of one address, so that none can lock the others out."""
REQUEST_SECONDS = 10.0
"""How long a request may take to arrive, with its body."""
UNREAD_SECONDS = 30.0
"""A client that has read nothing of its answer for this long is cut off."""
BACKLOG = 128
MISSING = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Strata</title>
<h1>Strata</h1>
<p>The coordinator works, but its dashboard has not been built: run <code>make dashboard</code> in
the repository and start the coordinator again.</p>
<p>The same figures: <a href="api/dashboard">/api/dashboard</a>, <a href="metrics">/metrics</a>,
<a href="openapi.json">/openapi.json</a>, or <code>strata status --watch</code>.</p>
</html>
"""
FOREVER = "public, max-age=31536000, immutable"


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with timeouts for requests that do not arrive and for clients that do not read."""

    def __init__(self, by_address: Counter[str], **options: Any) -> None:
        """``by_address`` counts the connections of all protocols of a server."""
        super().__init__(**options)
        self._by_address = by_address
        self._address = ""
        self._request_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless its address has too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._by_address[self._address] += 1
        if self._by_address[self._address] > ADDRESS_CONNECTIONS_MOST:
            transport.abort()
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._by_address[self._address] -= 1
        if not self._by_address[self._address]:
            del self._by_address[self._address]
        self._stop_expecting()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and check if the request is complete."""
        super().data_received(data)
        answering = bool(self.cycle) and not self.cycle.response_complete
        state = self.conn.their_state
        if state is h11.SEND_BODY or (state is h11.IDLE and not answering):
            self._expect_request()
        else:
            self._stop_expecting()

    def on_response_complete(self) -> None:
        """From here on uvicorn limits the time until the next request."""
        self._stop_expecting()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Watch a client that does not keep up."""
        super().pause_writing()
        if self._reading_timer is None:
            self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client keeps up again."""
        self._stop_watching()
        super().resume_writing()

    def _expect_request(self) -> None:
        if self._request_timer is None and not self.transport.is_closing():
            self._request_timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop_expecting(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _watch_reader(self, unread: int) -> None:
        self._reading_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread >= before:
            self.transport.abort()
        else:
            self._watch_reader(unread)

    def _stop_watching(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to the coordinator."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


class HttpServer:
    """The API, the metrics and the dashboard of one coordinator."""

    def __init__(self, service: ObservedService, telemetry: TelemetryConfig | None = None) -> None:
        """Bind the port of ``service.config.http_address``; `ConnectionError` if it is taken."""
        config = service.config
        self._service = service
        self._socket = _bind(config.http_address)
        host, _ = split_address(config.http_address)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        """HOST:PORT that is served; the actual port if 0 was requested."""
        self._sampler = Sampler(service, HistoryFiles(config.data_dir))
        self._snapshots = SnapshotReader(service, self._sampler)
        self._streams = JobStreams(self._snapshots)
        exporter = Exporter(self._snapshots, self._streams)
        origins = OriginPolicy(config.http_origins, host.strip("[]"))
        endpoints = Endpoints(self._snapshots, self._streams, exporter, origins)
        application = Application(
            service, endpoints, routes.document, dashboard_files(), exporter.count
        )
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                application.asgi,
                http=partial(BoundedProtocol, Counter()),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MOST,
            )
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._export = _open_export(exporter, telemetry or TelemetryConfig())

    async def start(self, grpc_address: str) -> None:
        """Begin to serve."""
        self._snapshots.grpc_address = grpc_address
        self._snapshots.http_address = self.address
        self._tasks = [
            asyncio.create_task(self._sampler.run()),
            asyncio.create_task(self._streams.run()),
        ]
        if self._export is not None:
            self._tasks.append(asyncio.create_task(self._export.run()))
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        self._tasks.append(serving)
        while not self._uvicorn.started:
            if serving.done():
                await serving
                raise ConnectionError(f"the HTTP server on {self.address} did not start")
            await asyncio.sleep(0.005)
        log.info("http.started", address=self.address)

    async def stop(self, grace: float) -> None:
        """End all streams, give pending answers ``grace`` seconds, store the history."""
        self._streams.close()
        if not self._tasks:
            self._socket.close()
            return
        *background, serving = self._tasks
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        if self._export is not None:
            await self._export.close()
        self._uvicorn.config.timeout_graceful_shutdown = max(1, int(grace))
        self._uvicorn.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        self._socket.close()
        await self._sampler.store()


def _bind(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
        return listening
    except OSError as exc:
        raise ConnectionError(
            f"cannot listen on {address} for HTTP: {exc}. Is another coordinator (or another "
            "program) using the port? Choose another with --http HOST:PORT (http_address in "
            "[coordinator]), or do without API and dashboard with --no-http"
        ) from exc


def _open_export(exporter: Exporter, config: TelemetryConfig) -> MetricsExport | None:
    """The periodic export of metrics; None if it is not configured."""
    if not config.otlp_endpoint or not config.metrics_interval_ms or not tracing.is_on():
        return None
    from .metrics.otlp_export import MetricsExport

    return MetricsExport(exporter, config.otlp_endpoint, config.metrics_interval_ms / 1000)


class _Files(StaticFiles):
    """Static files; browsers may cache those whose names contain a hash."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        hashed = path.startswith("assets/") and response.status_code < 400
        response.headers["Cache-Control"] = FOREVER if hashed else "no-cache"
        return response


def dashboard_files(folder: Path | None = None) -> ASGIApp:
    """Serves the built dashboard, or a page that says how to build it."""
    place = static_folder() if folder is None else folder
    if not (place / "index.html").is_file():
        return Router([Route("/", _missing), Route("/index.html", _missing)])
    return GZipMiddleware(_Files(directory=place, html=True), minimum_size=1024, compresslevel=5)


async def _missing(_: Request) -> Response:
    return HTMLResponse(MISSING, headers={"Cache-Control": "no-cache"})
