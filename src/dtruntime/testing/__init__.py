"""Tools for testing programs that use Strata: real processes, killed, paused and cut off."""

from .cluster import LocalCoordinator
from .proxy import TcpProxy
from .waiting import eventually, eventually_async
from .worker import WorkerProcess

__all__ = ["LocalCoordinator", "TcpProxy", "WorkerProcess", "eventually", "eventually_async"]
