"""The coordinator's state on disk. Read ``sqlite`` first: it writes and loads records."""

from .sqlite import SqliteStore

__all__ = ["SqliteStore"]
