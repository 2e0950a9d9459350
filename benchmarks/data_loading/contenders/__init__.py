"""Who takes part in the race; each module needs its library only when it is measured."""

from __future__ import annotations

from ...harness import Entry, Kind

_PARQUET, _CSV, _TFRECORD = ("parquet",), ("csv",), ("tfrecord",)
_TWO = {"processes": 2}
_SHUFFLED = {"shuffle": True}
_TORCH = {"output": "torch"}
ENTRIES = (
    Entry("pyarrow dataset", Kind.LIMIT, "arrow:DatasetScan", _PARQUET),
    Entry("pyarrow iter_batches", Kind.LIMIT, "arrow:ParquetBatches", _PARQUET),
    Entry(
        "iter_batches, 1 thread",
        Kind.LIMIT,
        "arrow:ParquetBatches",
        _PARQUET,
        options={"threads": False},
    ),
    Entry("Strata sequential", Kind.STRATA, "strata:Strata", _PARQUET),
    Entry("Strata sequential, torch", Kind.STRATA, "strata:Strata", _PARQUET, "torch", _TORCH),
    Entry("Strata shuffled", Kind.STRATA, "strata:Strata", _PARQUET, options=_SHUFFLED),
    Entry(
        "Strata shuffled, torch",
        Kind.STRATA,
        "strata:Strata",
        _PARQUET,
        "torch",
        _SHUFFLED | _TORCH,
    ),
    Entry("DataLoader pyarrow", Kind.PEER, "pytorch:PlainDataLoader", _PARQUET, "torch"),
    Entry(
        "DataLoader pyarrow 2 procs",
        Kind.PEER,
        "pytorch:PlainDataLoader",
        _PARQUET,
        "torch",
        _TWO,
    ),
    Entry("HF datasets sequential", Kind.PEER, "huggingface:HuggingFace", _PARQUET, "datasets"),
    Entry(
        "HF datasets shuffled",
        Kind.PEER,
        "huggingface:HuggingFace",
        _PARQUET,
        "datasets",
        _SHUFFLED,
    ),
    Entry(
        "HF datasets, not decoded",
        Kind.REFERENCE,
        "huggingface:HuggingFace",
        _PARQUET,
        "datasets",
        {"format": "arrow"},
    ),
    Entry("Streaming shuffled", Kind.PEER, "mosaic:Mosaic", _PARQUET, "mosaicml-streaming"),
    Entry(
        "Streaming shuffled 2 procs",
        Kind.PEER,
        "mosaic:Mosaic",
        _PARQUET,
        "mosaicml-streaming",
        _TWO,
    ),
    Entry("LitData shuffled", Kind.PEER, "lightning:LitData", _PARQUET, "litdata"),
    Entry("LitData shuffled 2 procs", Kind.PEER, "lightning:LitData", _PARQUET, "litdata", _TWO),
    Entry("pyarrow dataset", Kind.LIMIT, "arrow:DatasetScan", _CSV),
    Entry("pyarrow open_csv", Kind.LIMIT, "arrow:CsvBatches", _CSV),
    Entry("Strata sequential", Kind.STRATA, "strata:Strata", _CSV),
    Entry("Strata shuffled", Kind.STRATA, "strata:Strata", _CSV, options=_SHUFFLED),
    Entry("plain records, unchecked", Kind.REFERENCE, "arrow:Records", _TFRECORD),
    Entry(
        "plain records, protobuf",
        Kind.LIMIT,
        "arrow:Records",
        _TFRECORD,
        options={"parsed": True},
    ),
    Entry("Strata records", Kind.REFERENCE, "strata:StrataRecords", _TFRECORD),
    Entry("Strata Examples", Kind.STRATA, "strata:StrataExamples", _TFRECORD),
)
