"""Who takes part in the race; each module needs its library only when it is measured."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import StrEnum

from .base import Batches, Contender, Task


class Kind(StrEnum):
    """What a contender stands for."""

    LIMIT = "limit"
    """Plain reading, which a loader cannot beat."""
    STRATA = "strata"
    PEER = "peer"
    REFERENCE = "reference"
    """Shown for comparison; it does other work, so that no target refers to it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender by name."""

    name: str
    format: str
    kind: Kind
    home: str
    """Module and class."""
    package: str = ""
    """What has to be installed."""

    def make(self, task: Task) -> Contender:
        """Import and make it."""
        module, _, name = self.home.partition(":")
        made: Contender = getattr(importlib.import_module(f".{module}", __package__), name)(task)
        return made


ENTRIES = (
    Entry("pyarrow dataset", "parquet", Kind.LIMIT, "arrow:DatasetScan"),
    Entry("pyarrow iter_batches", "parquet", Kind.LIMIT, "arrow:ParquetBatches"),
    Entry("iter_batches, 1 thread", "parquet", Kind.LIMIT, "arrow:ParquetBatchesOneThread"),
    Entry("Strata sequential", "parquet", Kind.STRATA, "strata:Strata"),
    Entry("Strata sequential, torch", "parquet", Kind.STRATA, "strata:StrataTorchInOrder", "torch"),
    Entry("Strata shuffled", "parquet", Kind.STRATA, "strata:StrataShuffled"),
    Entry("Strata shuffled, torch", "parquet", Kind.STRATA, "strata:StrataTorch", "torch"),
    Entry("DataLoader pyarrow", "parquet", Kind.PEER, "pytorch:PlainDataLoader", "torch"),
    Entry(
        "DataLoader pyarrow 2 procs",
        "parquet",
        Kind.PEER,
        "pytorch:PlainDataLoaderProcesses",
        "torch",
    ),
    Entry("HF datasets sequential", "parquet", Kind.PEER, "huggingface:HuggingFace", "datasets"),
    Entry(
        "HF datasets shuffled", "parquet", Kind.PEER, "huggingface:HuggingFaceShuffled", "datasets"
    ),
    Entry(
        "HF datasets, not decoded",
        "parquet",
        Kind.REFERENCE,
        "huggingface:HuggingFaceMapped",
        "datasets",
    ),
    Entry("Streaming shuffled", "parquet", Kind.PEER, "mosaic:Mosaic", "mosaicml-streaming"),
    Entry(
        "Streaming shuffled 2 procs",
        "parquet",
        Kind.PEER,
        "mosaic:MosaicProcesses",
        "mosaicml-streaming",
    ),
    Entry("LitData shuffled", "parquet", Kind.PEER, "lightning:LitData", "litdata"),
    Entry(
        "LitData shuffled 2 procs",
        "parquet",
        Kind.PEER,
        "lightning:LitDataProcesses",
        "litdata",
    ),
    Entry("pyarrow dataset", "csv", Kind.LIMIT, "arrow:DatasetScan"),
    Entry("pyarrow open_csv", "csv", Kind.LIMIT, "arrow:CsvBatches"),
    Entry("Strata sequential", "csv", Kind.STRATA, "strata:Strata"),
    Entry("Strata shuffled", "csv", Kind.STRATA, "strata:StrataShuffled"),
    Entry("plain records, unchecked", "tfrecord", Kind.REFERENCE, "arrow:TfrecordFrames"),
    Entry("plain records, protobuf", "tfrecord", Kind.LIMIT, "arrow:TfrecordProtobuf"),
    Entry("Strata records", "tfrecord", Kind.REFERENCE, "strata:StrataRecords"),
    Entry("Strata Examples", "tfrecord", Kind.STRATA, "strata:StrataExamples"),
)

__all__ = ["ENTRIES", "Batches", "Contender", "Entry", "Kind", "Task"]
