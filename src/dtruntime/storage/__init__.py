"""Where bytes are kept: files of this machine and objects in S3, Google Cloud Storage and Azure.

:func:`expand` turns what a user wrote (a file, a folder, a glob, a URL) into files;
:func:`read_range`, :func:`stream` and :func:`download` read them.
"""

from .locations import FileStat, expand
from .reading import download, read_range, read_ranges, stream

__all__ = ["FileStat", "download", "expand", "read_range", "read_ranges", "stream"]
