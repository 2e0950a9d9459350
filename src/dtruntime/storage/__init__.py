"""Where bytes are kept: files of this machine and objects in S3, Google Cloud Storage and Azure.

For data: :func:`expand` turns what a user wrote (a file, a folder, a glob, a URL) into files;
:func:`read_range`, :func:`stream` and :func:`download` read them, and a :class:`DiskCache` reads
objects only once.

For checkpoints: :func:`open_backend` gives the :class:`StorageBackend` of a path or URL, which
reads and writes files by name, each of them complete or not there.
"""

from .backend import StorageBackend, StoredFile, StreamWriter
from .cache import CacheUsage, DiskCache
from .local import LocalBackend
from .locations import FileStat, expand
from .memory import MemoryBackend
from .opening import open_backend, resolve_url
from .providers import AzureBackend, GcsBackend, S3Backend
from .reading import ByteSource, download, read_range, read_ranges, stream

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
