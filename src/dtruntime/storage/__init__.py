"""Where bytes are kept: local files, and objects in S3, Google Cloud Storage and Azure.

Read ``backend`` first (`StorageBackend`, the contract), then ``urls`` (`open_backend`). Training
data is found and read by ``data_files`` and cached by ``disk_cache``.
"""

from .backend import StorageBackend, StoredFile, StreamWriter
from .data_files import ByteSource, FileStat, download, expand, read_range, read_ranges, stream
from .disk_cache import CacheUsage, DiskCache
from .local_backend import LocalBackend
from .memory_backend import MemoryBackend
from .object_backend import AzureBackend, GcsBackend, S3Backend
from .urls import open_backend, resolve_url

__all__ = [
    "AzureBackend",
    "ByteSource",
    "CacheUsage",
    "DiskCache",
    "FileStat",
    "GcsBackend",
    "LocalBackend",
    "MemoryBackend",
    "S3Backend",
    "StorageBackend",
    "StoredFile",
    "StreamWriter",
    "download",
    "expand",
    "open_backend",
    "read_range",
    "read_ranges",
    "resolve_url",
    "stream",
]
