"""Spans recorded by OpenTelemetry's SDK and sent by OTLP over HTTP in the background.

They have a provider of their own, so that the program's use of OpenTelemetry is not affected. The
program's current span is still the parent of ours.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .._version import __version__
from .logs import EventLog
from .tracing import Metadata, Recorder, Span

log = EventLog("telemetry")

EXPORT_SECONDS = 5.0
"""How long one attempt to send may take, including retries."""
EXIT_SECONDS = 3.0
"""How long the process's exit may wait for what is still to be sent."""
DELAY_MS = 2000
_KEYS = frozenset({"traceparent", "tracestate"})
_EXPORTERS = "opentelemetry.exporter.otlp.proto.http"
_RANDOM = random.SystemRandom()
"""Not Python's global generator, which the program may have seeded."""
_NOT_RECORDED = trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False))
"""Stands for every span that is not sampled, and whose children are not either. Never sent."""


def open_recorder(service: str, endpoint: str, ratio: float) -> Recorder | None:
    """A recorder that sends to the collector at ``endpoint``; None if it cannot be used."""
    if not is_usable(endpoint):
        return None
    exporter = _SpanSender(OTLPSpanExporter(signal_url(endpoint, "traces"), timeout=EXPORT_SECONDS))
    # Which traces begin is decided in `OtlpRecorder`, without making a span first.
    provider = TracerProvider(
        sampler=DEFAULT_ON,
        resource=resource(service),
        shutdown_on_exit=False,
        id_generator=_Ids(),
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=DELAY_MS))
    atexit.register(_shut_down_soon, provider.shutdown)
    log.info("telemetry.tracing", service=service, collector=_shown(endpoint), ratio=ratio)
    return OtlpRecorder(provider.get_tracer("dtruntime", __version__), ratio)


def is_usable(endpoint: str) -> bool:
    """Whether traces and metrics can be sent there; logs why not."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if urlsplit(endpoint).scheme in ("http", "https") and protocol == "http/protobuf":
        return True
    log.warning(
        "telemetry.unusable",
        collector=_shown(endpoint),
        protocol=protocol,
        remedy="give the http:// address of a collector that speaks OTLP http/protobuf",
    )
    return False


def signal_url(endpoint: str, signal: str) -> str:
    """Where a signal goes: its own variable if that is set, else a path of the endpoint."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return own or f"{endpoint.rstrip('/')}/v1/{signal}"


def resource(service: str) -> Resource:
    """The process in everything that is sent; ``OTEL_SERVICE_NAME`` overrides ``service``."""
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or service,
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
    )


class _Ids(RandomIdGenerator):
    """Ids that are independent of the program's random state."""

    def generate_span_id(self) -> int:
        return _RANDOM.randrange(1, 2**64)

    def generate_trace_id(self) -> int:
        return _RANDOM.randrange(1, 2**128)


class OtlpRecorder:
    """Makes spans that are recorded."""

    def __init__(self, tracer: trace.Tracer, ratio: float) -> None:
        self._tracer = tracer
        self._ratio = ratio
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, attributes: dict[str, Any], *, calls: bool = False) -> Span:
        """Begin a child of the current span, or a trace."""
        parent = trace.get_current_span().get_span_context()
        sampled = not parent.is_valid and _RANDOM.random() < self._ratio
        if not sampled and not parent.trace_flags.sampled:
            return OtlpSpan(_NOT_RECORDED)
        kind = trace.SpanKind.CLIENT if calls else trace.SpanKind.INTERNAL
        span = OtlpSpan(self._tracer.start_span(name, kind=kind))
        span.set(**attributes)
        return span

    def serve(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span | None:
        """Begin a span for a call whose caller records one; None otherwise."""
        carrier = {key: value for key, value in metadata if key in _KEYS and type(value) is str}
        if not carrier:
            return None
        parent = self._propagator.extract(carrier, contexts.Context())
        if not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            return None
        return OtlpSpan(self._tracer.start_span(name, parent, trace.SpanKind.SERVER))

    def outgoing(self) -> Metadata | None:
        """Metadata that passes on the current span; None if it is not recorded."""
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            return None
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return tuple(carrier.items())


class OtlpSpan(Span):
    """A span of the SDK; one that is not sampled records nothing."""

    __slots__ = ("_ended", "_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._ended = False
        self._token: Any = None

    def set(self, **attributes: Any) -> None:
        """Add attributes."""
        if self._span.is_recording():
            for name, value in attributes.items():
                if value is not None:
                    self._span.set_attribute(f"strata.{name}", value)

    def fail(self, error: BaseException | str) -> None:
        """Mark it as failed."""
        if self._span.is_recording():
            self._span.set_status(trace.StatusCode.ERROR, str(error))
            if isinstance(error, BaseException):
                self._span.record_exception(error)

    def end(self) -> None:
        """End it; may be called more than once."""
        if not self._ended:
            self._ended = True
            self._span.end()

    @contextmanager
    def current(self) -> Iterator[object]:
        """Make it the current span of a block, without ending it there."""
        token = contexts.attach(trace.set_span_in_context(self._span))
        try:
            yield self
        finally:
            contexts.detach(token)

    def __enter__(self) -> Self:
        self._token = contexts.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        contexts.detach(self._token)
        if error is not None:
            self.fail(error)
        self.end()


class Sending:
    """Logs once that the collector cannot be reached, and once that it can be again.

    The exporters' own log, a few lines for every attempt, is suppressed meanwhile.
    """

    _own = threading.local()

    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False
        self._dropped = 0
        for name in ("trace_exporter", "metric_exporter"):
            logger = logging.getLogger(f"{_EXPORTERS}.{name}")
            if Sending._hush not in logger.filters:
                logger.addFilter(Sending._hush)

    @staticmethod
    def _hush(record: logging.LogRecord) -> bool:
        if not getattr(Sending._own, "sending", False):
            return True
        Sending._own.reason = record.getMessage()
        return False

    def attempt(self, send: Callable[[], bool], size: int) -> bool:
        """Send; returns whether that succeeded. Never raises."""
        own = Sending._own
        own.sending, own.reason = True, ""
        try:
            sent = send()
        except Exception as exc:
            sent, own.reason = False, repr(exc)
        finally:
            own.sending = False
        if not sent:
            self._dropped += size
            if not self._failing:
                log.warning("telemetry.not_sent", what=self._what, reason=own.reason)
        elif self._failing:
            log.info("telemetry.sent_again", what=self._what, dropped=self._dropped)
            self._dropped = 0
        self._failing = not sent
        return sent


class _SpanSender(SpanExporter):
    """Sends spans; those that cannot be sent are dropped."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._sending = Sending("spans")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some spans."""
        ok = SpanExportResult.SUCCESS
        sent = self._sending.attempt(lambda: self._exporter.export(spans) is ok, len(spans))
        return ok if sent else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Send no more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _shut_down_soon(end: Callable[[], None]) -> None:
    """Send what is left, without delaying the exit of the process for long."""
    thread = threading.Thread(target=end, name="strata-telemetry-end", daemon=True)
    thread.start()
    thread.join(EXIT_SECONDS)


def _shown(endpoint: str) -> str:
    """The endpoint without a user and password in it."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
