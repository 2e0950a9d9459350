"""Where bytes are kept: files of this machine and objects in S3, Google Cloud Storage and Azure.

For data: :func:`expand` turns what a user wrote (a file, a folder, a glob, a URL) into files;
:func:`read_range`, :func:`stream` and :func:`download` read them, and a :class:`DiskCache` reads
objects only once.

For checkpoints: :func:`open_backend` gives the :class:`StorageBackend` of a path or URL, which
reads and writes files by name, each of them complete or not there.
"""

from .backend import StorageBackend, StoredFile, StreamWriter
from .byte_source import ByteSource, download, read_range, read_ranges, stream
from .data_files import FileStat, expand
from .disk_cache import CacheUsage, DiskCache
from .local_disk.local_backend import LocalBackend
from .memory_backend import MemoryBackend
from .providers import AzureBackend, GcsBackend, S3Backend
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
