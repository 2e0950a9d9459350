"""Handlers of the HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..._version import __version__
from ...rpc.gen import coordinator_pb2 as pb
from ..state import Job
from ..state.records import copied
from . import event_log, views
from .event_stream import JobStreams
from .metrics.prometheus import Exporter
from .responses import Answer, HttpError
from .security import OriginPolicy
from .snapshot.job import NO_BARRIERS, SnapshotReader, barriers, checkpoints, encode, tasks
from .snapshot.workers import WorkersSnapshot, read_workers, see, select

T = TypeVar("T")

BODY_MOST = 64 * 1024
STREAMS_MOST = 256


class Endpoints:
    """The handlers of all paths; raise `HttpError` or `Refused`."""

    def __init__(
        self,
        snapshots: SnapshotReader,
        streams: JobStreams,
        exporter: Exporter,
        origins: OriginPolicy,
    ) -> None:
        self._snapshots = snapshots
        self._service = snapshots.service
        self._streams = streams
        self._exporter = exporter
        self._origins = origins

    # The process

    async def health(self, query: views.NoQuery, request: Request) -> Answer:
        """Whether the coordinator works."""
        service = self._service
        state: Any = "ok"
        if service.failure is not None:
            state = "cannot_store"
        elif service.closing:
            state = "shutting_down"
        uptime = max(0.0, service.clock() - service.started_at)
        return Answer.json(views.Health(state, __version__, uptime), 200 if state == "ok" else 503)

    async def coordinator(self, query: views.NoQuery, request: Request) -> Answer:
        """The process."""
        return Answer.json(self._snapshots.coordinator())

    async def prometheus(self, query: views.NoQuery, request: Request) -> Answer:
        """Prometheus."""
        text, media_type = await self._exporter.expose(request.headers.get("accept", ""))
        return Answer(text, media_type)

    # Everything

    async def dashboard(self, query: views.JobQuery, request: Request) -> Answer:
        """Everything about one job, in one consistent snapshot."""
        stream = self._streams.of(self._snapshots.resolve(query.job))
        return (await stream.snapshot()).answer

    async def events(self, query: views.JobQuery, request: Request) -> Response:
        """Server-sent events: a snapshot, then changes."""
        job = self._snapshots.resolve(query.job)
        if self._streams.readers >= STREAMS_MOST:
            raise HttpError(
                503,
                "too_many_streams",
                f"{STREAMS_MOST} streams of events are open: close a dashboard, or ask "
                "/api/dashboard now and then",
            )
        last = request.headers.get("last-event-id", "")
        last_id = int(last) if last.isascii() and last.isdigit() and len(last) < 17 else None
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return Response(headers=headers, media_type="text/event-stream")
        await self._service.settled()
        stream = self._streams.stream(job, last_id)
        return StreamingResponse(stream, headers=headers, media_type="text/event-stream")

    # Lists

    async def jobs(self, query: views.PageQuery, request: Request) -> Answer:
        """All jobs."""
        return _page(self._snapshots.jobs.show(), query)

    async def workers(self, query: views.WorkerQuery, request: Request) -> Answer:
        """Workers, page by page."""
        job = self._job(query.job)
        workers = read_workers(job, self._service.clock()) if job else WorkersSnapshot([], 0.0, 0.0)
        matches = select(workers, query.state, query.search, query.sort)
        part, following = _cut(matches, query)
        rest = {"total": len(matches), "next_cursor": following}
        return Answer(await encode(rest, "items", workers, part))

    async def worker(self, query: views.JobQuery, request: Request) -> Answer:
        """One worker."""
        job, worker_id = self._job(query.job), request.path_params["worker_id"]
        member = job.roster.by_id.get(worker_id) if job else None
        if job is None or member is None:
            raise HttpError(
                404,
                "no_such_worker",
                f"there is no worker {worker_id[:200]!r} in job {job.name if job else ''!r}: "
                "/api/workers lists them",
            )
        workers = WorkersSnapshot([see(job, member)], job.stragglers.median, self._service.clock())
        return Answer.json(workers.show(workers.members)[0])

    async def datasets(self, query: views.PageQuery, request: Request) -> Answer:
        """Datasets with the coverage of their epochs and shards per rank."""
        job = self._job(query.job)
        if job is None:
            return _page([], query)
        await self._snapshots.figures(job)
        return _page(self._snapshots.sampler.board(job.name).rows, query)

    async def checkpoints(self, query: views.PageQuery, request: Request) -> Answer:
        """Committed checkpoints, newest first."""
        job = self._job(query.job)
        if job is None:
            return _page([], query)
        durations, total = (
            self._snapshots.sampler.durations.get(job.name, {}),
            job.checkpoints.history.present,
        )
        rows = checkpoints(job, durations, self._snapshots.forecasts, query.limit, query.start)
        end = query.start + query.limit
        return Answer.json(views.Page(rows, total, str(end) if end < total else None))

    async def tasks(self, query: views.JobQuery, request: Request) -> Answer:
        """Runs with their progress."""
        job = self._job(query.job)
        if job is None:
            return Answer.json(views.Page[views.Task]([], 0, None))
        figures = await self._snapshots.figures(job)
        rows = tasks(job, figures, self._snapshots.sampler.board(job.name).rows)
        return Answer.json(views.Page(rows, len(rows), None))

    async def logs(self, query: views.LogQuery, request: Request) -> Answer:
        """The journal, newest first."""
        job = self._snapshots.machine.job(query.job).name if query.job else ""
        events = self._snapshots.machine.journal.after(query.after)
        matches = await asyncio.to_thread(
            event_log.find,
            events,
            job=job,
            search=query.search,
            level=query.level,
            kind=query.event,
            before=query.before,
        )
        rows = matches[: query.limit]
        if query.format != "json":
            write = event_log.as_csv if query.format == "csv" else event_log.as_jsonl
            kind = "text/csv" if query.format == "csv" else "application/jsonl"
            name = f'attachment; filename="strata-journal.{query.format}"'
            body = await asyncio.to_thread(write, rows)
            return Answer(body, kind, headers={"Content-Disposition": name})
        following = str(rows[-1].id) if len(matches) > len(rows) else None
        return Answer.json(views.Page(rows, len(matches), following))

    # Figures

    async def barriers(self, query: views.JobQuery, request: Request) -> Answer:
        """Open barriers with who is missing, and a histogram of latencies."""
        job = self._job(query.job)
        if job is None:
            return Answer.json(NO_BARRIERS)
        figures = await self._snapshots.sampler.figures(job.name)
        return Answer.json(barriers(job, figures, self._service.clock()))

    async def metrics(self, query: views.JobQuery, request: Request) -> Answer:
        """Current figures."""
        job = self._job(query.job)
        figures = await self._snapshots.figures(job) if job else None
        return Answer.json(self._snapshots.metrics(job, figures))

    async def history(self, query: views.HistoryQuery, request: Request) -> Answer:
        """Figures over time, for charts."""
        job = self._job(query.job)
        if job is None:
            return Answer.json(views.History(1.0, [], []))
        figures = await self._snapshots.sampler.figures(job.name)
        now, known = self._service.clock(), figures.recoveries.known
        return Answer.json(figures.rings.read(query.seconds, now, known))

    # Actions

    async def actions(self, query: views.JobQuery, request: Request) -> Answer:
        """What is asked for and not done yet."""
        job = self._job(query.job)
        pending = job.actions.pending.values() if job else ()
        rows = [copied(record, views.Action) for record in pending]
        return Answer.json(views.Page(rows, len(rows), None))

    async def act(self, query: views.NoQuery, request: Request) -> Answer:
        """Ask a run for something."""
        self._origins.check(request.headers)
        asked = await _read_json(request)
        message = pb.ActionRequest(
            job=asked.job, kind=asked.kind, worker_id=asked.worker_id, reason=asked.reason
        )
        peer = f"ipv4:{request.client.host}:{request.client.port}" if request.client else "http:"
        self._service.admit("RequestAction", peer)
        reply = self._service.handle("RequestAction", message)
        done = cast(pb.Action, await reply if isinstance(reply, asyncio.Future) else reply)
        kind = cast(Any, done.kind)
        return Answer.json(
            views.Action(done.action_id, kind, done.worker_id, done.reason, done.requested_at)
        )

    def _job(self, job: str) -> Job | None:
        name = self._snapshots.resolve(job)
        return self._snapshots.machine.jobs[name] if name else None


async def _read_json(request: Request) -> views.ActionRequest:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(
            415, "not_json", "send the action as JSON, with Content-Type: application/json"
        )
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MOST:
            raise HttpError(413, "request_too_large", f"a request has at most {BODY_MOST} bytes")
    try:
        return msgspec.json.decode(body, type=views.ActionRequest)
    except msgspec.DecodeError as exc:
        raise HttpError(400, "invalid", f"the body is not an action: {exc}") from None


def _cut(items: Sequence[T], query: views.PageQuery) -> tuple[list[T], str | None]:
    end = query.start + query.limit
    return list(items[query.start : end]), str(end) if end < len(items) else None


def _page(items: Sequence[T], query: views.PageQuery) -> Answer:
    part, following = _cut(items, query)
    return Answer.json(views.Page(part, len(items), following))
