"""Spans of saves, barriers and calls, for OpenTelemetry.

Off until `turn_on` is called with an endpoint: until then every function below does nothing, and no
package of OpenTelemetry is imported. Recording is in `dtruntime.telemetry.otlp`::

    with tracing.span("save.commit", step=7):       # a child of the current span, if there is one
        ...

Attributes are named ``strata.<name>``; those that are None are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

from .logs import EventLog

log = EventLog("telemetry")

Metadata = tuple[tuple[str, str | bytes], ...]


class Span:
    """A span that is not recorded.

    In a ``with`` block it is the current span. It ends with the block, as failed if that raises.
    """

    __slots__ = ()

    def set(self, **attributes: Any) -> None:
        """Add attributes."""

    def fail(self, error: BaseException | str) -> None:
        """Mark it as failed."""

    def end(self) -> None:
        """End it; may be called more than once."""

    def current(self) -> AbstractContextManager[object]:
        """Make it the current span of a block, without ending it there."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        return None


class Recorder(Protocol):
    """Makes spans that are recorded."""

    def begin(self, name: str, attributes: dict[str, Any], *, calls: bool = False) -> Span:
        """Begin a child of the current span, or a trace."""
        ...

    def serve(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span | None:
        """Begin a span for a call whose caller records one; None otherwise."""
        ...

    def outgoing(self) -> Metadata | None:
        """Metadata that passes on the current span; None if it is not recorded."""
        ...


NO_SPAN = Span()
_recorder: Recorder | None = None
_asked = False
"""The one recorder of this process, and whether it has been asked for."""


def turn_on(service: str, endpoint: str, ratio: float) -> None:
    """Record the share ``ratio`` of all traces and send them to ``endpoint``, if there is one.

    The first call with an endpoint counts. If OpenTelemetry is not installed, or the endpoint is
    unusable, that is logged and there are no spans.
    """
    global _recorder, _asked
    if not endpoint or _asked:
        return
    _asked = True
    try:
        from .otlp import open_recorder
    except ImportError as exc:
        log.warning(
            "telemetry.not_installed",
            missing=exc.name,
            remedy="pip install 'dtruntime[otel]', or unset OTEL_EXPORTER_OTLP_ENDPOINT",
        )
        return
    _recorder = open_recorder(service, endpoint, ratio)


def is_on() -> bool:
    """Whether spans are recorded in this process."""
    return _recorder is not None


def span(name: str, /, *, calls: bool = False, **attributes: Any) -> Span:
    """Begin a child of the current span; ``calls``: it is a call to another process."""
    if _recorder is None:
        return NO_SPAN
    return _recorder.begin(name, attributes, calls=calls)


def serve(name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span | None:
    """Begin the span of an incoming call; None if its caller records none."""
    return None if _recorder is None else _recorder.serve(name, metadata)


def outgoing() -> Metadata | None:
    """Metadata for a call made now, with which the called side continues the trace."""
    return None if _recorder is None else _recorder.outgoing()
