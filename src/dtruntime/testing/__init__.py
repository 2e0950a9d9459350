"""Tools for testing programs that use Strata: real processes, killed, paused and cut off.

Read ``coordinator_process`` and ``worker_process`` first. ``proxy`` breaks connections,
``backends`` records and breaks storage, ``waiting`` replaces sleeps; ``machine_invariants`` says
what holds in every state of the coordinator's machine. ``StorageConformance`` (in ``conformance``)
needs pytest, and is loaded when it is asked for.
"""

from typing import TYPE_CHECKING

from .backends import (
    Call,
    Fault,
    FaultRates,
    FaultyBackend,
    RecordingBackend,
    WrappedBackend,
    WrappedWriter,
)
from .coordinator_process import LocalCoordinator
from .proxy import TcpProxy
from .waiting import eventually, eventually_async
from .worker_process import WorkerProcess

if TYPE_CHECKING:
    from .conformance import StorageConformance

__all__ = [
    "Call",
    "Fault",
    "FaultRates",
    "FaultyBackend",
    "LocalCoordinator",
    "RecordingBackend",
    "StorageConformance",
    "TcpProxy",
    "WorkerProcess",
    "WrappedBackend",
    "WrappedWriter",
    "eventually",
    "eventually_async",
]


def __getattr__(name: str) -> object:
    if name != "StorageConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .conformance import StorageConformance

    return StorageConformance
