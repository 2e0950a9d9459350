"""Tools for testing programs that use Strata: real processes, killed, paused and cut off.

Read ``coordinator_process`` and ``worker_process`` first. ``proxy`` breaks connections,
``backends`` records and breaks storage, ``waiting`` replaces sleeps; ``machine_invariants`` says
what holds in every state of the coordinator's machine. ``StorageConformance`` (in ``conformance``)
needs pytest, and is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .backends import Call as Call
    from .backends import Fault as Fault
    from .backends import FaultRates as FaultRates
    from .backends import FaultyBackend as FaultyBackend
    from .backends import RecordingBackend as RecordingBackend
    from .backends import WrappedBackend as WrappedBackend
    from .backends import WrappedWriter as WrappedWriter
    from .conformance import StorageConformance as StorageConformance
    from .coordinator_process import LocalCoordinator as LocalCoordinator
    from .proxy import TcpProxy as TcpProxy
    from .waiting import eventually as eventually
    from .waiting import eventually_async as eventually_async
    from .worker_process import WorkerProcess as WorkerProcess
else:
    __getattr__, __dir__, __all__ = _lazy.exports(
        __name__,
        {
            ".backends": (
                "Call Fault FaultRates FaultyBackend RecordingBackend WrappedBackend WrappedWriter"
            ),
            ".coordinator_process": "LocalCoordinator",
            ".proxy": "TcpProxy",
            ".waiting": "eventually eventually_async",
            ".worker_process": "WorkerProcess",
            ".conformance": "StorageConformance",
        },
    )
