"""Tools for testing programs that use Strata: real processes, killed, paused and cut off.

Read ``processes`` first: a coordinator, workers, and waits that replace sleeps. ``proxy`` breaks
connections, ``backends`` records and breaks storage, ``conformance`` tests a storage backend (and
needs pytest).
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
    from .processes import LocalCoordinator as LocalCoordinator
    from .processes import WorkerProcess as WorkerProcess
    from .processes import eventually as eventually
    from .processes import eventually_async as eventually_async
    from .proxy import TcpProxy as TcpProxy
else:
    __getattr__, __dir__, __all__ = _lazy.exports(
        __name__,
        {
            ".backends": (
                "Call Fault FaultRates FaultyBackend RecordingBackend WrappedBackend WrappedWriter"
            ),
            ".conformance": "StorageConformance",
            ".processes": "LocalCoordinator WorkerProcess eventually eventually_async",
            ".proxy": "TcpProxy",
        },
    )
