"""Objects in a bucket without checkpoints: obstore, which Strata uses, and boto3."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor

import boto3
import numpy as np
import obstore
from boto3.s3.transfer import TransferConfig
from obstore.store import S3Store

from dtruntime.checkpoint.load.pack_reader import lanes
from dtruntime.storage.object_backend import PARALLEL_PARTS, PART_BYTES

from .. import states
from .base import Contender, Task


class _Objects(Contender):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.data = states.make_bytes(task.size)

    def key(self) -> str:
        return f"{self.task.folder.name}/{self.number}"

    def check(self, loaded: object) -> None:
        if memoryview(loaded) != memoryview(self.data):  # type: ignore[arg-type]
            raise ValueError("other bytes came back")


class RawObstore(_Objects):
    """Parts of the size and number that Strata has."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._store = S3Store(task.bucket, client_options={"allow_http": True})

    def save(self) -> None:
        self.number += 1
        obstore.put(
            self._store,
            self.key(),
            self.data,
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=PARALLEL_PARTS,
        )

    def load(self) -> object:
        target = np.empty(self.task.size, np.uint8)

        def fetch(at: int) -> None:
            end = min(at + PART_BYTES, self.task.size)
            part = obstore.get_range(self._store, self.key(), start=at, end=end)
            target[at:end] = np.frombuffer(memoryview(part), np.uint8)

        with ThreadPoolExecutor(lanes()) as threads:
            list(threads.map(fetch, range(0, self.task.size, PART_BYTES)))
        return target


class Boto(_Objects):
    """``upload_fileobj`` and ``download_fileobj``, with the same parts."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        self._transfer = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=PARALLEL_PARTS,
        )

    def save(self) -> None:
        self.number += 1
        self._client.upload_fileobj(
            io.BytesIO(self.data), self.task.bucket, self.key(), Config=self._transfer
        )

    def load(self) -> object:
        target = io.BytesIO()
        self._client.download_fileobj(self.task.bucket, self.key(), target, Config=self._transfer)
        return target.getbuffer()
