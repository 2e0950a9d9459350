"""A collector of the tests' own: takes OTLP over HTTP and keeps what comes."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from dtruntime.testing import eventually

Attributes = dict[str, Any]
SECONDS = 20.0


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    kind: int
    attributes: Attributes
    status: int
    message: str
    events: tuple[str, ...]


class Receiver:
    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.metrics: dict[str, tuple[str, Metric]] = {}
        self.requests = 0
        self.answer = 200
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if receiver.answer == 200:
                    receiver.take(self.path, body)
                receiver.requests += 1
                self.send_response(receiver.answer)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        with self._lock:
            if path == "/v1/traces":
                self.spans += _spans(ExportTraceServiceRequest.FromString(body))
            else:
                assert path == "/v1/metrics", path
                sent = ExportMetricsServiceRequest.FromString(body)
                for resource in sent.resource_metrics:
                    service = _attributes(resource.resource.attributes)["service.name"]
                    for scope in resource.scope_metrics:
                        self.metrics |= {metric.name: (service, metric) for metric in scope.metrics}

    def span(self, name: str, *, of: bytes | None = None, **attributes: Any) -> ReceivedSpan:
        """Wait for the one span of this name (in one trace) that has these attributes."""

        def found() -> list[ReceivedSpan]:
            return [
                span
                for span in list(self.spans)
                if span.name == name
                and of in (None, span.trace_id)
                and attributes.items() <= span.attributes.items()
            ]

        eventually(lambda: len(found()) == 1, within=SECONDS, what=f"a span {name} {attributes}")
        return found()[0]

    def wait(self, condition: Callable[[], bool]) -> None:
        eventually(condition, within=SECONDS)


def _spans(sent: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in sent.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    service,
                    span.name,
                    span.trace_id,
                    span.span_id,
                    span.parent_span_id,
                    span.kind,
                    _attributes(span.attributes),
                    span.status.code,
                    span.status.message,
                    tuple(event.name for event in span.events),
                )


def _attributes(pairs: Any) -> Attributes:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a port of its own."""
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()
