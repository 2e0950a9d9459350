"""Objects in a bucket without checkpoints: obstore, which Strata uses, and boto3."""

from __future__ import annotations

import io
import os
from typing import Any

from obstore.store import S3Store

from dtruntime.bench.raw_storage import download, upload
from dtruntime.checkpoint.load.pack_reader import lanes
from dtruntime.storage.object_backend import PARALLEL_PARTS, PART_BYTES

from .base import SavesBytes


class _Objects(SavesBytes):
    def key(self) -> str:
        return f"{self.task.folder.name}/{self.number}"


class RawObstore(_Objects):
    """Parts of the size and number that Strata has."""

    def make_state(self) -> Any:
        self._store = S3Store(self.task.bucket, client_options={"allow_http": True})
        return super().make_state()

    def save(self) -> None:
        self.number += 1
        upload(self._store, self.key(), memoryview(self.state))

    def load(self) -> object:
        return download(self._store, self.key(), self.task.size, lanes())


class Boto(_Objects):
    """``upload_fileobj`` and ``download_fileobj``, with the same parts."""

    def make_state(self) -> Any:
        import boto3
        from boto3.s3.transfer import TransferConfig

        self._client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        self._transfer = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=PARALLEL_PARTS,
        )
        return super().make_state()

    def save(self) -> None:
        self.number += 1
        self._client.upload_fileobj(
            io.BytesIO(self.state), self.task.bucket, self.key(), Config=self._transfer
        )

    def load(self) -> object:
        target = io.BytesIO()
        self._client.download_fileobj(self.task.bucket, self.key(), target, Config=self._transfer)
        return target.getbuffer()
