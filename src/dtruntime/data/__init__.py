"""Datasets: their files, samples and shards, and the loaders that read them.

A *dataset* is a set of files; its *index* has the location of each sample; *shards* are runs of
samples that are read at once; the *order* is the sequence in which ranks read them; a *source*
reads shards; a *block* is samples by column; a *batch* is what the training loop gets. Read
``loader`` first, then ``epoch_reader`` (which samples, in which order) and ``prefetch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy

_PACKAGES = {"pyarrow": "pyarrow", "google_crc32c": "google-crc32c"}
"""Packages that a minimal install may lack, by import name."""


def _missing(library: str) -> str | None:
    package = _PACKAGES.get(library.partition(".")[0])
    if package is None:
        return None
    return f"reading data needs {library}, which is not installed: pip install {package}"


if TYPE_CHECKING:
    from .index import Changes as Changes
    from .index import DatasetIndex as DatasetIndex
    from .index import IndexProgress as IndexProgress
    from .index import Shards as Shards
    from .index import ShardSpec as ShardSpec
    from .index import build_index as build_index
    from .index import changes_since as changes_since
    from .index import index_from_json as index_from_json
    from .index import index_to_json as index_to_json
    from .index import shards as shards
    from .live_loader import LiveLoader as LiveLoader
    from .loader import Loader as Loader
    from .loader_state import merge_states as merge_states
    from .mixture import Mixture as Mixture
    from .readers import CsvOptions as CsvOptions
    from .readers import ParquetOptions as ParquetOptions
    from .readers import TfrecordOptions as TfrecordOptions
    from .source import DatasetRows as DatasetRows
    from .source import FileSource as FileSource
    from .source import NumberSource as NumberSource
    from .source import Source as Source
else:
    __getattr__, __dir__, __all__ = _lazy.exports(
        __name__,
        {
            ".index": (
                "Changes DatasetIndex IndexProgress ShardSpec Shards build_index "
                "changes_since index_from_json index_to_json shards"
            ),
            ".live_loader": "LiveLoader",
            ".loader": "Loader",
            ".loader_state": "merge_states",
            ".mixture": "Mixture",
            ".readers": "CsvOptions ParquetOptions TfrecordOptions",
            ".source": "DatasetRows FileSource NumberSource Source",
        },
        missing=_missing,
    )
