"""Spans of saves, barriers and calls, for OpenTelemetry.

Off until `turn_on` is called with an endpoint: every function below then does nothing, and no
package of OpenTelemetry is imported. What records is in `dtruntime.telemetry.otlp`::

    with tracing.span("save.commit", step=7):       # a child of the current span, if there is one
        ...

Attributes are named ``strata.<name>``; those that are None are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

from .logs import EventLog

log = EventLog("telemetry")

Metadata = tuple[tuple[str, str | bytes], ...]


class Span:
    """A span that nobody records.

    In a ``with`` block it is the current one, and it ends with the block: failed, if that raises.
    """

    __slots__ = ()

    def set(self, **attributes: Any) -> None:
        """Add attributes."""

    def fail(self, error: BaseException | str) -> None:
        """Note that it failed."""

    def end(self) -> None:
        """End it; once is enough."""

    def current(self) -> AbstractContextManager[object]:
        """Makes it the current span of a block, without ending it there."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class Recorder(Protocol):
    """What makes spans that are recorded."""

    def begin(self, name: str, attributes: dict[str, Any], *, calls: bool = False) -> Span:
        """Begin a child of the current span, or a trace."""
        ...

    def serve(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span | None:
        """Begin a span for a call whose caller records one; else None."""
        ...

    def outgoing(self) -> Metadata | None:
        """What tells the called side of the current span; None if it is not recorded."""
        ...


NO_SPAN = Span()
_recorder: Recorder | None = None
_asked = False
"""The one recorder of this process, and whether somebody has asked for it."""


def turn_on(service: str, endpoint: str, ratio: float) -> None:
    """Record the share ``ratio`` of all traces and send them to ``endpoint``, if there is one.

    The first call with an endpoint counts. Where OpenTelemetry is not installed, or the endpoint
    cannot be used, that is logged and everything goes on without spans.
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
    """Begin a span under the current one; ``calls``: it stands for a call to another process."""
    if _recorder is None:
        return NO_SPAN
    return _recorder.begin(name, attributes, calls=calls)


def serve(name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span | None:
    """Begin the span of a call that came in; None when its caller records none."""
    return None if _recorder is None else _recorder.serve(name, metadata)


def outgoing() -> Metadata | None:
    """Metadata for a call made now, so that the called side continues the trace."""
    return None if _recorder is None else _recorder.outgoing()
