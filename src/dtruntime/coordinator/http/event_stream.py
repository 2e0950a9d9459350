"""Server-sent events: snapshots and changes of each watched job, encoded once for all readers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import msgspec

from ...errors import StorageError
from ...telemetry import EventLog
from .responses import Answer
from .snapshot.job import CheckpointsVersion, JobSnapshot, SnapshotReader, encode
from .snapshot.workers import SeenWorker
from .views import Checkpoint

log = EventLog("http")

TICK_SECONDS = 0.5
SNAPSHOT_SECONDS = 0.5
COMMENT_SECONDS = 15.0
LINGER_SECONDS = 60.0
"""A stream without readers goes on for this long, so that a reconnecting one misses nothing."""
CHANGES_KEPT = 240
CHANGES_BYTES = 32 * 1024 * 1024
ROWS_IN_CHANGE = 1000
"""More workers than this are split over several changes, news first."""

_SAMPLED = ("coordinator", "jobs", "metrics", "tasks", "datasets")
"""Sections that change once a second at most."""


class Snapshot:
    """A whole dashboard, encoded."""

    def __init__(self, event_id: int, body: bytes) -> None:
        self.event_id = event_id
        self.answer = Answer(body)
        self.made_at = time.monotonic()

    @property
    def frame(self) -> tuple[bytes, ...]:
        """As a server-sent event, in parts: the body is large and not copied for each reader."""
        return _head(self.event_id, b"snapshot"), self.answer.body, b"\n\n"


class JobStream:
    """The changes of one job, in order."""

    def __init__(self, job: str, snapshots: SnapshotReader, ids: count[int]) -> None:
        self.job = job
        self._snapshots = snapshots
        self._ids = ids
        self.last_id = next(ids)
        self._floor = self.last_id
        """The oldest event after which every change is kept."""
        self._changes: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._published = asyncio.Event()
        self._snapshot: Snapshot | None = None
        self._making = asyncio.Lock()
        self.readers = 0
        self.asked_at = self.woken_at = time.monotonic()
        self._rows: dict[str, SeenWorker] = {}
        self._sent: dict[str, bytes] = {}
        self._sample = -1
        self._event = 0
        self._checkpoints_version: CheckpointsVersion | None = None
        self._checkpoints: dict[str, Checkpoint] = {}
        """As they were sent last."""
        self._seeded = False
        """Whether there was a first snapshot that changes relate to."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody has asked for anything for a while."""
        return not self.readers and time.monotonic() - self.asked_at > LINGER_SECONDS

    async def snapshot(self) -> Snapshot:
        """Everything, at most half a second old."""
        self.asked_at = time.monotonic()
        async with self._making:
            latest = self._snapshot
            if latest is not None and time.monotonic() - latest.made_at < SNAPSHOT_SECONDS:
                return latest
            event_id = self.last_id
            current = await self._snapshots.take(self.job)
            if not self._seeded:
                self._seed(current)
            rest: dict[str, Any] = {"event_id": event_id, **msgspec.structs.asdict(current)}
            del rest["workers"], rest["last_event"], rest["checkpoints_version"]
            body = await encode(rest, "workers", current.workers, current.workers.members)
            await self._snapshots.service.settled()
            self._snapshot = Snapshot(event_id, body)
            return self._snapshot

    async def tick(self) -> None:
        """Find out what has changed since the last time, and publish it."""
        if not self._seeded:
            return
        current = await self._snapshots.take(
            self.job, since_event=self._event, unless=self._checkpoints_version
        )
        change: dict[str, Any] = {}
        self._add_sections(current, change)
        rows, removed = self._changed_rows(current.workers.members)
        self._event = current.last_event
        if removed:
            change["removed_workers"] = removed
        if change or rows:
            event_id = next(self._ids)
            rest = {"event_id": event_id, "job": self.job, **change}
            body = msgspec.json.encode(rest)
            if rows:
                body = await encode(rest, "workers", current.workers, rows)
            await self._snapshots.service.settled()
            self._publish(event_id, _head(event_id, b"change") + body + b"\n\n")

    def _seed(self, current: JobSnapshot) -> None:
        self._seeded = True
        self._event = current.last_event
        self._rows = {seen.record.worker_id: seen for seen in current.workers.members}
        self._add_sections(current, {})

    def _add_sections(self, current: JobSnapshot, change: dict[str, Any]) -> None:
        if current.logs:
            change["logs"] = current.logs
        self._add_checkpoints(current, change)
        sampled = self._snapshots.sampler.samples
        fresh, self._sample = sampled != self._sample, sampled
        names = (*_SAMPLED, "actions") if fresh else ("actions",)
        for name in names:
            self._add_if_changed(change, name, getattr(current, name))
        still = [msgspec.structs.replace(one, open_seconds=0.0) for one in current.barriers.open]
        key = msgspec.json.encode(msgspec.structs.replace(current.barriers, open=still))
        if self._sent.get("barriers") != key:
            self._sent["barriers"] = key
            change["barriers"] = current.barriers

    def _add_checkpoints(self, current: JobSnapshot, change: dict[str, Any]) -> None:
        """Add checkpoints that are new, changed or gone."""
        if current.checkpoints is None:
            return
        self._checkpoints_version, sent = current.checkpoints_version, self._checkpoints
        fresh = [one for one in current.checkpoints if sent.get(one.checkpoint_id) != one]
        sent.update((one.checkpoint_id, one) for one in fresh)
        job = self._snapshots.machine.jobs.get(self.job)
        gone = [key for key in sent if not job or not job.checkpoints.history.is_present(key)]
        for key in gone:
            del sent[key]
        if fresh:
            change["checkpoints"] = fresh
        if gone:
            change["removed_checkpoints"] = gone

    def _add_if_changed(self, change: dict[str, Any], name: str, value: Any) -> None:
        encoded = msgspec.json.encode(value)
        if self._sent.get(name) != encoded:
            self._sent[name] = encoded
            change[name] = msgspec.Raw(encoded)

    def _changed_rows(self, members: list[SeenWorker]) -> tuple[list[SeenWorker], list[str]]:
        """Workers to send: news first, then those with just another heartbeat."""
        rows = self._rows
        urgent: list[SeenWorker] = []
        heard: list[SeenWorker] = []
        newcomers = 0
        for seen in members:
            before = rows.get(seen.record.worker_id)
            if before is None or before.record is not seen.record:
                newcomers += before is None
                urgent.append(seen)
            elif before.pulse is not seen.pulse or before.is_straggler != seen.is_straggler:
                news = before.state != seen.state or before.is_straggler != seen.is_straggler
                (urgent if news else heard).append(seen)
        removed: list[str] = []
        if len(rows) > len(members) - newcomers:
            present = {seen.record.worker_id for seen in members}
            removed = [worker_id for worker_id in rows if worker_id not in present]
            for worker_id in removed:
                del rows[worker_id]
        if len(urgent) + len(heard) > ROWS_IN_CHANGE:
            heard.sort(key=lambda seen: rows[seen.record.worker_id].last_seen)
        sent = (urgent + heard)[:ROWS_IN_CHANGE]
        for seen in sent:
            rows[seen.record.worker_id] = seen
        return sent, removed

    def _publish(self, event_id: int, frame: bytes) -> None:
        self._changes.append((event_id, frame))
        self._size += len(frame)
        while len(self._changes) > CHANGES_KEPT or (
            self._size > CHANGES_BYTES and len(self._changes) > 1
        ):
            self._floor, dropped = self._changes.popleft()
            self._size -= len(dropped)
        self.last_id = event_id
        self.wake()

    def can_resume(self, event_id: int) -> bool:
        """Whether everything after an event is kept."""
        return self._seeded and self._floor <= event_id <= self.last_id

    def after(self, event_id: int) -> list[tuple[int, bytes]]:
        """The changes after an event."""
        return [change for change in self._changes if change[0] > event_id]

    async def wait(self) -> None:
        """Wait for the next change, or for `wake`, without a timer for each reader."""
        await self._published.wait()

    def wake(self) -> None:
        """Wake all waiting readers."""
        self.woken_at = time.monotonic()
        published, self._published = self._published, asyncio.Event()
        published.set()


class JobStreams:
    """The streams of all jobs that somebody watches."""

    def __init__(self, snapshots: SnapshotReader) -> None:
        self._snapshots = snapshots
        # Ids must keep rising when a coordinator is restarted.
        self._ids = count(int(time.time() * 1000))
        self._streams: dict[str, JobStream] = {}
        self.closing = False
        self.readers = 0

    def of(self, job: str) -> JobStream:
        """The stream of a job that exists, or of none."""
        stream = self._streams.get(job)
        if stream is None:
            stream = self._streams[job] = JobStream(job, self._snapshots, self._ids)
        stream.asked_at = time.monotonic()
        return stream

    async def run(self) -> None:
        """Publish changes until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for job, stream in list(self._streams.items()):
                if stream.is_idle:
                    del self._streams[job]
                    continue
                try:
                    await stream.tick()
                except StorageError:
                    continue
                except Exception as exc:
                    log.error("feed.failed", job=job, error=repr(exc))
                finally:
                    if time.monotonic() - stream.woken_at > COMMENT_SECONDS:
                        stream.wake()

    def close(self) -> None:
        """End all streams."""
        self.closing = True
        for stream in self._streams.values():
            stream.wake()

    async def stream(self, job: str, last_id: int | None) -> AsyncIterator[bytes]:
        """Server-sent events: what was missed or a snapshot, then changes."""
        stream = self.of(job)
        stream.readers += 1
        self.readers += 1
        try:
            yield b"retry: 1000\n\n"
            while not self.closing:
                if not stream.job and self._snapshots.machine.jobs:
                    # There was no job to watch before.
                    stream.readers -= 1
                    stream, last_id = self.of(self._snapshots.resolve("")), None
                    stream.readers += 1
                if last_id is None or not stream.can_resume(last_id):
                    try:
                        snapshot = await stream.snapshot()
                    except StorageError:
                        return
                    last_id = snapshot.event_id
                    for part in snapshot.frame:
                        yield part
                changes = stream.after(last_id)
                for event_id, frame in changes:
                    last_id = event_id
                    yield frame
                if not changes and not self.closing:
                    await stream.wait()
                    if stream.last_id == last_id:
                        yield b": still here\n\n"
        finally:
            stream.readers -= 1
            self.readers -= 1
            stream.asked_at = time.monotonic()


def _head(event_id: int, kind: bytes) -> bytes:
    return b"id: %d\nevent: %s\ndata: " % (event_id, kind)
