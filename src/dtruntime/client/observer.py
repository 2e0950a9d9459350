"""Looking at a coordinator without being a member of anything."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from .._loop import awaitable, blocking
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..types import JobStatus
from . import wire


class Observer:
    """Status queries to one coordinator."""

    def __init__(self, coordinator_url: str, *, patience: float = 2.0) -> None:
        """``patience`` is how long an unreachable coordinator is tried, in seconds."""
        self._channel = Channel(coordinator_url)
        self._patience = patience

    @awaitable
    async def jobs_async(self) -> list[str]:
        """The names of all jobs."""
        reply = await self._channel.call(
            "ListJobs", pb.ListJobsRequest(), pb.JobList, patience=self._patience
        )
        return sorted(job.job for job in reply.jobs)

    jobs = blocking(jobs_async)

    @awaitable
    async def status_async(self, job: str) -> JobStatus:
        """A job with all its workers, read page by page."""
        workers = []
        request = pb.StatusRequest(job=job)
        while True:
            page = await self._channel.call(
                "GetStatus", request, pb.JobStatus, patience=self._patience
            )
            workers += [wire.worker_status(w) for w in page.workers]
            if not page.next_rank:
                return wire.job_status(page, workers)
            request.from_rank = page.next_rank

    status = blocking(status_async)

    @awaitable
    async def server_info_async(self) -> pb.ServerInfo:
        """Version, uptime, clock and request metrics of the coordinator."""
        return await self._channel.call(
            "GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo, patience=self._patience
        )

    server_info = blocking(server_info_async)

    @awaitable
    async def events_async(self, job: str = "", after_id: int = 0) -> list[pb.Event]:
        """The journal's events that are kept."""
        request = pb.WatchRequest(job=job, after_id=after_id)
        return [event async for event in self._channel.stream("WatchEvents", request)]

    events = blocking(events_async)

    @awaitable
    async def close_async(self) -> None:
        """Close the connection."""
        await self._channel.close()

    close = blocking(close_async)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
