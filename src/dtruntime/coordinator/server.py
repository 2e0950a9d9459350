"""The coordinator process: store, service, transport, timers and signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ..config import CoordinatorConfig, TelemetryConfig, split_address
from ..errors import StrataError
from ..telemetry import EventLog, tracing
from .service import CoordinatorService
from .store import SqliteStore
from .transport import Transport, open_transport

if TYPE_CHECKING:
    from .http.http_server import HttpServer

log = EventLog("server")

TICK_SECONDS = 0.05
HOUSEKEEPING_SECONDS = 1.0
GRACE_SECONDS = 2.0

Started = Callable[[str, str], None]
"""Called with the addresses of gRPC and of HTTP once both are served."""


class CoordinatorServer:
    """A coordinator that runs on the current event loop."""

    def __init__(
        self, config: CoordinatorConfig | None = None, telemetry: TelemetryConfig | None = None
    ) -> None:
        self.config = config or CoordinatorConfig()
        self._telemetry = telemetry or TelemetryConfig()
        self._store: SqliteStore | None = None
        self._service: CoordinatorService | None = None
        self._transport: Transport | None = None
        self._http: HttpServer | None = None
        self._timers: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()

    @property
    def address(self) -> str:
        """HOST:PORT that is served; the actual port if 0 was requested."""
        host, port = split_address(self.config.address)
        return f"{host}:{self._transport.port if self._transport else port}"

    @property
    def http_address(self) -> str:
        """HOST:PORT of the HTTP API and the dashboard; empty when there is none."""
        return self._http.address if self._http else ""

    @property
    def service(self) -> CoordinatorService:
        """The service behind it, once started."""
        if self._service is None:
            raise StrataError("the coordinator has not been started: call start() first")
        return self._service

    async def start(self) -> None:
        """Load the state, bind the port, serve.

        Raises `StorageError` when the state cannot be used and `ConnectionError` when a
        port is taken; nothing is left behind then.
        """
        config = self.config
        traced = self._telemetry
        tracing.turn_on("strata-coordinator", traced.otlp_endpoint, traced.trace_ratio)
        self._store = SqliteStore(config.data_dir)
        try:
            service = CoordinatorService(self._store, config)
            transport = self._transport = open_transport(
                service,
                config.address,
                config.transport,
                config.data_dir,
            )
            service.transport = transport.name
            await transport.start()
            if config.http_address:
                self._http = _open_http(service, self._telemetry)
                await self._http.start(self.address)
        except BaseException:
            await self._abandon()
            raise
        self._service = service
        self._timers = [
            asyncio.create_task(self._every(TICK_SECONDS, self._tick)),
            asyncio.create_task(self._every(HOUSEKEEPING_SECONDS, service.housekeep)),
        ]
        log.info(
            "coordinator.started",
            address=self.address,
            http=self.http_address,
            data_dir=config.data_dir,
            transport=transport.name,
            term=self._store.term,
            jobs=len(service.machine.jobs),
        )

    async def stop(self) -> None:
        """Fail waiting calls, store what is left, and end."""
        for timer in self._timers:
            timer.cancel()
        await asyncio.gather(*self._timers, return_exceptions=True)
        if self._service is not None:
            self._service.close()
        if self._http is not None:
            await self._http.stop(GRACE_SECONDS)
        if self._transport is not None:
            await self._transport.stop(GRACE_SECONDS)
        if self._store is not None:
            await self._store.close()
        log.info("coordinator.stopped", address=self.address)

    async def _abandon(self) -> None:
        """Release everything after a failed start."""
        async with contextlib.AsyncExitStack() as left:
            if self._store is not None:
                left.push_async_callback(self._store.close)
            if self._transport is not None:
                left.push_async_callback(self._transport.stop, 0.0)
            if self._http is not None:
                left.push_async_callback(self._http.stop, 0.0)
        self._http = self._transport = None

    async def serve_until_stopped(self, on_started: Started | None = None) -> None:
        """Start, serve until SIGTERM or SIGINT (or a storage failure), stop.

        With ``drain_seconds`` it goes on serving after the first signal while workers are live.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        await self.start()
        try:
            if on_started is not None:
                on_started(self.address, self.http_address)
            await self._stop.wait()
            await self._drain()
        finally:
            with contextlib.suppress(StrataError):
                await self.stop()
        if self.service.failure is not None:
            raise self.service.failure

    async def _drain(self) -> None:
        """Let workers that got the signal too save their state; a second signal ends this."""
        seconds = self.config.drain_seconds
        if not seconds or not self._live_workers() or self.service.failure is not None:
            return
        log.info("coordinator.draining", workers=self._live_workers(), seconds=seconds)
        self._stop.clear()
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while self._live_workers() and clock() < deadline and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_SECONDS)

    def _live_workers(self) -> int:
        return sum(job.roster.live_count for job in self.service.machine.jobs.values())

    async def __aenter__(self) -> CoordinatorServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def _tick(self) -> None:
        service = self.service
        service.tick()
        if service.failure is not None and not self._stop.is_set():
            log.error("coordinator.cannot_store", error=str(service.failure))
            self._stop.set()

    async def _every(self, seconds: float, action: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                action()
            except Exception as exc:
                log.error("timer.failed", action=action.__name__, error=repr(exc))


def _open_http(service: CoordinatorService, telemetry: TelemetryConfig) -> HttpServer:
    """Bind the HTTP port; its libraries are only loaded if it is served."""
    from .http.http_server import HttpServer

    return HttpServer(service, telemetry)


def run(
    config: CoordinatorConfig,
    on_started: Started | None = None,
    telemetry: TelemetryConfig | None = None,
) -> None:
    """Run a coordinator in the foreground, on uvloop when it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop  # type: ignore[assignment]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config, on_started, telemetry))


async def _serve(
    config: CoordinatorConfig, on_started: Started | None, telemetry: TelemetryConfig | None
) -> None:
    def settle(address: str, http_address: str) -> None:
        _tame_collector()
        if on_started is not None:
            on_started(address, http_address)

    await CoordinatorServer(config, telemetry).serve_until_stopped(settle)


def _tame_collector() -> None:
    """Keep full garbage collections, 12 to 24 ms each under load, out of barriers' way.

    Everything loaded so far lives as long as the process and need not be scanned again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
