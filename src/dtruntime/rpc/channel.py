"""The client's channel to the coordinator, with the one retry policy."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from ..config import split_address
from ..errors import ConfigError, ConnectionError, StrataError
from ..retry import JITTER, Backoff
from ..telemetry import EventLog, tracing
from .methods import METHODS
from .status_codes import CallFailure, failure_of

log = EventLog("rpc")

R = TypeVar("R", bound=Message)

ATTEMPT_SECONDS = 10.0
"""How long one attempt may take beyond the time that the coordinator may hold it."""
CONNECT_SECONDS = 10.0
"""How long to wait for a coordinator that has never answered, by default."""
HELD_A_WHILE = 1.0
"""A connection that lasted this long was good: the outage begins when it breaks."""
SPREAD_SECONDS = 0.2
"""Workers call at a random moment within this time after reconnecting."""
HURRY_SECONDS = 5.0
"""The least time between two calls that cut their back-off short after reconnecting."""

PROBE_SECONDS = 2.0
PROBE_BYTES = 65536
"""How long to wait for the answer of an HTTP port, and how much of it to read."""

_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a silent connection is only dropped after a minute, whatever the above says.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # gRPC varies each by a fifth. The second is how long one attempt to connect may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 600),
    # The layout and index of a large dataset are the longest replies.
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
]


def target_of(url: str) -> str:
    """The gRPC target of a coordinator URL, or a `ConfigError`."""
    if url.startswith("https://"):
        raise ConfigError(f"coordinator URL {url!r}: TLS is not supported; use http://HOST:PORT")
    host, port = split_address(url)
    return f"{host}:{port}"


async def _connected(channel: grpc.aio.Channel) -> None:
    """Connect; ends when the channel is connected or closed."""
    ends = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.SHUTDOWN
    while (state := channel.get_state(try_to_connect=True)) not in ends:
        await channel.wait_for_state_change(state)


def _is_of_another_protocol(failure: CallFailure) -> bool:
    """Whether gRPC's error says that the server does not speak HTTP/2."""
    return "http1" in failure.message or "parsing HTTP/2" in failure.message


async def _asked_over_http(host: str, port: int) -> Any:
    """What a coordinator's HTTP API says about its process."""
    reader, writer = await asyncio.open_connection(host.strip("[]"), port)
    try:
        asked = f"GET /api/coordinator HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(asked.encode())
        await writer.drain()
        answer = b""
        while len(answer) < PROBE_BYTES and (more := await reader.read(PROBE_BYTES)):
            answer += more
    finally:
        writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def _checked(answer: object, reply: type[R]) -> R:
    if not isinstance(answer, reply):
        raise TypeError(f"expected a {reply.__name__}, got a {type(answer).__name__}")
    return answer


class Channel:
    """Calls to one coordinator, retried while it is away.

    Every method of the service may be repeated safely (registrations carry a session,
    barriers a ticket, commits an id), so every call is retried. Use it on the I/O thread.
    """

    def __init__(self, url: str, *, connect_timeout: float | None = None) -> None:
        """``connect_timeout`` is how long to wait for a coordinator that has never answered.

        By default as long as for one that went away.
        """
        self.url = url
        self._connect_timeout = connect_timeout
        self._reached = False
        """Whether it has ever answered."""
        self._target = target_of(url)
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[str, Callable[..., Any]] = {}
        self._away_since: float | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._hurry_from = 0.0
        self._refused = False
        """Whether the last failed call was answered."""

    async def call(
        self,
        method: str,
        request: Any,
        reply: type[R],
        *,
        patience: float,
        hold: float | None = None,
    ) -> R:
        """Call ``method``; while the coordinator is away, try again for ``patience`` seconds.

        ``hold`` is how many seconds the coordinator may hold the call; it goes into the
        request's ``timeout_ms``, and time during which the coordinator is away does not use
        it up.
        """
        delays = Backoff().delays()
        trying_since: float | None = None
        began = time.monotonic()
        while True:
            if hold is not None:
                request.timeout_ms = round(hold * 1000)
            started = time.monotonic()
            left = max(SPREAD_SECONDS, self._contact_left(started - began))
            try:
                answer = await self._stub(method)(
                    request,
                    timeout=min(ATTEMPT_SECONDS + (hold or 0.0), left),
                    metadata=tracing.outgoing(),
                )
            except grpc.aio.AioRpcError as exc:
                failure = failure_of(exc)
            else:
                self._note_back()
                return _checked(answer, reply)
            self._reached = self._reached or self._was_reached(failure)
            now = time.monotonic()
            if hold is not None:
                hold = max(0.0, hold - (now - started))
            first = trying_since is None
            if trying_since is None or (failure.broke_off and now - started > HELD_A_WHILE):
                trying_since, delays = now, Backoff().delays()
            if first and not self._reached:
                await self._refuse_http_port(failure)
            delay = self._delay_before_retry(failure, next(delays), method, first)
            if delay > self._contact_left(now - began):
                raise self._never_reached(failure, now - began)
            if now + delay > trying_since + patience:
                raise self._give_up(failure, patience)
            if failure.means_absent:
                await self.rest(delay)
            else:
                await asyncio.sleep(delay)

    async def rest(self, seconds: float) -> None:
        """Wait before another attempt; less if the connection is back.

        Not too often: if connections keep breaking, the full delays apply.
        """
        reconnecting = self._reconnect()
        too_early = time.monotonic() < self._hurry_from
        if reconnecting is None or too_early or seconds <= SPREAD_SECONDS:
            await asyncio.sleep(seconds)
            return
        back, _ = await asyncio.wait({reconnecting}, timeout=seconds)
        if back:
            self._hurry_from = time.monotonic() + HURRY_SECONDS
            await asyncio.sleep(JITTER.uniform(0, SPREAD_SECONDS))

    async def stream(self, method: str, request: Message) -> AsyncIterator[Any]:
        """Call a streaming method once."""
        try:
            async for item in self._stub(method)(request):
                yield item
        except grpc.aio.AioRpcError as exc:
            failure = failure_of(exc)
            raise self._give_up(failure, 0) if failure.means_absent else failure.error() from exc

    async def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        self._stubs.clear()
        if channel is not None:
            await channel.close()

    def _reconnect(self) -> asyncio.Task[None] | None:
        """A task that ends with a connection; ``None`` while the coordinator refuses calls."""
        if self._reconnecting is None or self._reconnecting.done():
            channel, ready = self._channel, grpc.ChannelConnectivity.READY
            if channel is None or (self._refused and channel.get_state() is ready):
                return None
            self._reconnecting = asyncio.get_running_loop().create_task(_connected(channel))
        return self._reconnecting

    def _stub(self, method: str) -> Callable[..., Any]:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        stub = self._stubs.get(method)
        if stub is None:
            described = METHODS[method]
            make = self._channel.unary_stream if described.streams else self._channel.unary_unary
            stub = self._stubs[method] = make(
                described.path,
                request_serializer=described.request.SerializeToString,
                response_deserializer=described.reply.FromString,
            )
        return stub

    def _delay_before_retry(
        self, failure: CallFailure, backoff: float, method: str, first: bool
    ) -> float:
        if failure.means_absent:
            self._note_away(failure)
            return backoff
        self._note_back()
        if failure.retry_after is None:
            raise failure.error()
        if first:
            say = log.debug if failure.reason == "rate_limited" else log.warning
            say("call.postponed", method=method, reason=failure.message)
        return failure.retry_after + backoff

    def _contact_left(self, passed: float) -> float:
        """How much longer a call may go without any answer; forever once there was one."""
        if self._reached or self._connect_timeout is None:
            return math.inf
        return self._connect_timeout - passed

    def _was_reached(self, failure: CallFailure) -> bool:
        """Whether a coordinator was reached, however the call ended."""
        if not failure.means_absent or failure.reason:
            return True
        ready = grpc.ChannelConnectivity.READY
        return self._channel is not None and self._channel.get_state() is ready

    async def _refuse_http_port(self, failure: CallFailure) -> None:
        """Raise if the URL is that of a coordinator's HTTP port."""
        if not _is_of_another_protocol(failure):
            return
        host, port = split_address(self.url)
        try:
            answer = await asyncio.wait_for(_asked_over_http(host, port), PROBE_SECONDS)
            grpc_port = split_address(answer["grpc_address"])[1]
        except (OSError, TimeoutError, ValueError, LookupError, TypeError, StrataError):
            return
        raise ConnectionError(
            f"{self.url} is the HTTP port of a coordinator, for the dashboard and the API; "
            f"workers and commands need its gRPC port, which is {grpc_port} there: give "
            f"COORDINATOR_URL, or --url, as http://{host}:{grpc_port}"
        )

    def _never_reached(self, failure: CallFailure, passed: float) -> Exception:
        foreign = "what listens there does not speak gRPC: " * _is_of_another_protocol(failure)
        return ConnectionError(
            f"the coordinator at {self.url} could not be reached within {round(passed, 1):g} "
            f"s ({foreign}{failure.message}): start it (strata coordinator), or correct "
            "COORDINATOR_URL. Where it starts later than its workers, give them more time "
            "(STRATA_CONNECT_TIMEOUT_MS, connect_timeout_ms). "
            f"'strata doctor --url {self.url}' checks the rest"
        )

    def _give_up(self, failure: CallFailure, patience: float) -> Exception:
        if not failure.means_absent:
            return failure.error()
        return ConnectionError(
            f"the coordinator at {self.url} could not be reached for {patience:.0f} s "
            f"({failure.message}): check that it runs, that COORDINATOR_URL is right, and that the "
            f"network lets this host reach it; 'strata doctor --url {self.url}' checks all of that"
        )

    def _note_away(self, failure: CallFailure) -> None:
        self._refused = bool(failure.reason)
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("coordinator.unreachable", url=self.url, reason=failure.message)

    def _note_back(self) -> None:
        self._reached = True
        if self._away_since is not None:
            away = time.monotonic() - self._away_since
            self._away_since = None
            self._hurry_from = 0.0
            log.info("coordinator.back", url=self.url, away_seconds=round(away, 1))
