"""Where bytes are kept: files of this machine and objects in S3, Google Cloud Storage and Azure.

:func:`expand` turns what a user wrote (a file, a folder, a glob, a URL) into files;
:func:`read_range`, :func:`stream` and :func:`download` read them, and a :class:`DiskCache` reads
objects only once.
"""

from .cache import CacheUsage, DiskCache
from .locations import FileStat, expand
from .reading import ByteSource, download, read_range, read_ranges, stream

__all__ = [
    "ByteSource",
    "CacheUsage",
    "DiskCache",
    "FileStat",
    "download",
    "expand",
    "read_range",
    "read_ranges",
    "stream",
]
