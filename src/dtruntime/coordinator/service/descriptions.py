"""Datasets described in full, with what the machine does not hold."""

from __future__ import annotations

import asyncio

from ...errors import StorageError
from ...rpc import encode
from ...rpc.gen import coordinator_pb2 as pb
from ..state import Job, Refused
from ..state.records import DatasetRecord, IndexRecord
from ..store import SqliteStore


class Descriptions:
    """Describes datasets; what was read last is kept, since all workers of a job ask at once."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._record: DatasetRecord | None = None
        self._reading: asyncio.Future[pb.DatasetInfo] | None = None
        self._described: pb.DatasetDescription | None = None
        """The newest answer: callers that ask at once share it rather than get a copy each."""

    def brief(self, job: Job, record: DatasetRecord) -> pb.DatasetDescription:
        """A dataset without the lists of its shards and files."""
        description = _heading(job, record, self._store.state_id)
        description.dataset.CopyFrom(encode.dataset(record, job.name))
        return description

    async def full(self, job: Job, record: DatasetRecord) -> pb.DatasetDescription:
        """A dataset with layout and index; everything it tells is stored before it returns."""
        if self._reading is None or self._record is not record:
            self._record, self._described = record, None
            self._reading = asyncio.ensure_future(self._read(job.name, record))
        reading = self._reading
        try:
            dataset = await asyncio.shield(reading)
            await self._store.flush()
        except StorageError as exc:
            self._record = self._reading = self._described = None
            raise Refused("storage", str(exc)) from exc
        heading, known = _heading(job, record, self._store.state_id), self._described
        if reading is self._reading and known is not None and _same_heading(heading, known):
            return known
        heading.dataset.CopyFrom(dataset)
        if reading is self._reading:
            self._described = heading
        return heading

    async def _read(self, job: str, record: DatasetRecord) -> pb.DatasetInfo:
        index = await self._store.read("index", job, record.dataset_id)
        data = index.data if isinstance(index, IndexRecord) else b""
        return encode.dataset(record, job, full=True, index=data)


def _heading(job: Job, record: DatasetRecord, state_id: str) -> pb.DatasetDescription:
    slot_count, dead = job.roster.view()
    return pb.DatasetDescription(
        found=True,
        generation=job.roster.generation,
        slot_count=slot_count,
        dead_slots=sorted(dead),
        state_id=state_id,
        order=job.coverages.order(record.dataset_id),
    )


def _same_heading(one: pb.DatasetDescription, other: pb.DatasetDescription) -> bool:
    return (
        one.generation == other.generation
        and one.slot_count == other.slot_count
        and one.dead_slots == other.dead_slots
        and one.order == other.order
    )
