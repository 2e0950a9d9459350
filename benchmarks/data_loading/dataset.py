"""The data that every contender reads: seeded, the same rows in three formats."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from dtruntime.bench.loader_throughput import FEATURES, FILES, LABEL, ROW_GROUP, random_table

TOUCHED = FEATURES[0]
"""The column that every contender adds up."""
SEED = 20_240_601
_MASK = 0xA282EAD8


@dataclass(frozen=True, slots=True)
class Dataset:
    """Files of one format."""

    format: str
    folder: Path
    rows: int
    touched_sum: float
    """The sum of the touched column over all rows."""
    file_bytes: int


def write(format: str, rows: int, folder: Path) -> Dataset:
    """Write a dataset; all files are in the page cache afterwards."""
    folder.mkdir(parents=True)
    total = 0.0
    for number in range(FILES):
        count = rows * (number + 1) // FILES - rows * number // FILES
        table = random_table(count, SEED, number)
        total += float(np.sum(table[TOUCHED].to_numpy(), dtype=np.float64))
        path = folder / f"part-{number:02}.{format}"
        match format:
            case "parquet":
                pq.write_table(table, path, row_group_size=ROW_GROUP)
            case "csv":
                pyarrow.csv.write_csv(table, path)
            case "tfrecord":
                _write_tfrecord(table, path)
    files = sorted(folder.iterdir())
    return Dataset(format, folder, rows, total, sum(len(file.read_bytes()) for file in files))


def _write_tfrecord(table: pa.Table, path: Path) -> None:
    with path.open("wb") as file:
        for record in _examples(table):
            length = struct.pack("<Q", len(record))
            file.write(length + _masked_crc(length) + record + _masked_crc(record))


def _examples(table: pa.Table) -> Iterator[bytes]:
    features = np.stack([table[name].to_numpy() for name in FEATURES], axis=1)
    for values, label in zip(features, table[LABEL].to_pylist(), strict=True):
        example = Example()
        example.features.feature["x"].float_list.value.extend(values)
        example.features.feature[LABEL].int64_list.value.append(label)
        yield example.SerializeToString(deterministic=True)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


_PACKAGE = "strata_benchmark"
_MESSAGES = {
    "BytesList": ["repeated BYTES value"],
    "FloatList": ["repeated FLOAT value"],
    "Int64List": ["repeated INT64 value"],
    "Feature": ["BytesList bytes_list", "FloatList float_list", "Int64List int64_list"],
    "Features": ["repeated Features.FeatureEntry feature"],
    "Example": ["Features features"],
}
"""``tf.train.Example``, since TensorFlow is not needed for it."""


def _field(number: int, text: str) -> dict[str, Any]:
    *label, kind, name = text.split()
    described = {"name": name, "number": number}
    described["label"] = "LABEL_REPEATED" if label else "LABEL_OPTIONAL"
    if kind.isupper():
        return described | {"type": f"TYPE_{kind}"}
    return described | {"type": "TYPE_MESSAGE", "typeName": f".{_PACKAGE}.{kind}"}


def _example_class() -> Any:
    types = [
        {"name": name, "field": [_field(n, text) for n, text in enumerate(fields, 1)]}
        for name, fields in _MESSAGES.items()
    ]
    fields = [_field(1, "STRING key"), _field(2, "Feature value")]
    entry = {"name": "FeatureEntry", "options": {"mapEntry": True}, "field": fields}
    next(each for each in types if each["name"] == "Features")["nestedType"] = [entry]
    file = {"name": "example.proto", "package": _PACKAGE, "syntax": "proto3", "messageType": types}
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(file, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


Example = _example_class()
