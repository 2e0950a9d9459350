"""`Observer`: a coordinator and its jobs, seen and operated from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from .._sync_bridge import awaitable, blocking
from ..rpc import messages
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..types import Action, CheckpointCondition, CheckpointInfo, JobStatus, check_id

R = TypeVar("R", bound=Message)


class Observer:
    """A client of one coordinator that is a member of no job."""

    def __init__(self, coordinator_url: str, *, patience: float = 2.0) -> None:
        """``patience`` is how many seconds an unreachable coordinator is tried."""
        self._channel = Channel(coordinator_url)
        self._patience = patience

    async def _call(self, method: str, request: Any, reply: type[R]) -> R:
        return await self._channel.call(method, request, reply, patience=self._patience)

    # Jobs

    @awaitable
    async def jobs_async(self) -> list[str]:
        """The names of all jobs."""
        return [job.job for job in await self.job_summaries_async()]

    jobs = blocking(jobs_async)

    @awaitable
    async def job_summaries_async(self) -> list[pb.JobSummary]:
        """A short summary of each job, by name."""
        reply = await self._call("ListJobs", pb.ListJobsRequest(), pb.JobList)
        return sorted(reply.jobs, key=lambda job: job.job)

    job_summaries = blocking(job_summaries_async)

    @awaitable
    async def status_async(self, job: str) -> JobStatus:
        """A job with all its workers, read page by page."""
        workers = []
        request = pb.StatusRequest(job=job)
        while True:
            page = await self._call("GetStatus", request, pb.JobStatus)
            workers += [messages.worker_status(w) for w in page.workers]
            if not page.next_rank:
                return messages.job_status(page, workers)
            request.from_rank = page.next_rank

    status = blocking(status_async)

    @awaitable
    async def recent_losses_async(self, job: str, seconds: float) -> int:
        """How many members a job lost in the last ``seconds``, counted up to 64."""
        page = await self._call("GetStatus", pb.StatusRequest(job=job, limit=1), pb.JobStatus)
        return messages.job_status(page, []).recent_losses(seconds)

    recent_losses = blocking(recent_losses_async)

    @awaitable
    async def remove_job_async(self, job: str, *, force: bool = False) -> pb.JobRemoved:
        """Forget a job; `StrataError` while it has live workers, unless ``force``.

        Stored checkpoints and data stay where they are.
        """
        request = pb.RemoveJobRequest(job=check_id("job", job), force=force)
        return await self._call("RemoveJob", request, pb.JobRemoved)

    remove_job = blocking(remove_job_async)

    @awaitable
    async def remove_dataset_async(
        self, job: str, dataset_id: str, *, force: bool = False
    ) -> pb.DatasetRemoved:
        """Forget a dataset and what was consumed of it; its files stay."""
        request = pb.RemoveDatasetRequest(
            job=job, dataset_id=check_id("dataset", dataset_id), force=force
        )
        return await self._call("RemoveDataset", request, pb.DatasetRemoved)

    remove_dataset = blocking(remove_dataset_async)

    # Actions

    @awaitable
    async def request_action_async(
        self, job: str, kind: str, worker_id: str = "", reason: str = ""
    ) -> str:
        """Request an action, as `TrainingOrchestrator.request_action` does."""
        request = messages.action_request(job, kind, worker_id, reason)
        return (await self._call("RequestAction", request, pb.Action)).action_id

    request_action = blocking(request_action_async)

    @awaitable
    async def complete_action_async(self, job: str, action_id: str, outcome: str = "") -> None:
        """Complete an action; does nothing if it is already over."""
        request = pb.ActionCompletion(
            job=job, action_id=check_id("action", action_id), outcome=outcome
        )
        await self._call("CompleteAction", request, pb.ActionCompleted)

    complete_action = blocking(complete_action_async)

    @awaitable
    async def actions_async(self, job: str) -> tuple[Action, ...]:
        """The job's pending actions."""
        reply = await self._call("ListActions", pb.JobRequest(job=job), pb.ActionList)
        return tuple(messages.action(action) for action in reply.actions)

    actions = blocking(actions_async)

    # Checkpoints

    @awaitable
    async def checkpoints_async(self, job: str) -> list[CheckpointInfo]:
        """The committed checkpoints of a job that are not known to be deleted, oldest first."""
        reply = await self._call("ListCheckpoints", pb.JobRequest(job=job), pb.CheckpointList)
        return [messages.checkpoint(one) for one in reply.checkpoints]

    checkpoints = blocking(checkpoints_async)

    @awaitable
    async def report_checkpoints_async(
        self,
        job: str,
        checkpoint_ids: Sequence[str],
        condition: CheckpointCondition,
        detail: str = "",
    ) -> int:
        """Report the condition of checkpoints, as `TrainingOrchestrator.report_checkpoints`."""
        request = messages.checkpoint_report(job, checkpoint_ids, condition, "", detail)
        return (await self._call("ReportCheckpoints", request, pb.CheckpointsReported)).known

    report_checkpoints = blocking(report_checkpoints_async)

    # The coordinator

    @awaitable
    async def server_info_async(self) -> pb.ServerInfo:
        """Version, uptime, clock and request metrics of the coordinator."""
        return await self._call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo)

    server_info = blocking(server_info_async)

    @awaitable
    async def events_async(self, job: str = "", after_id: int = 0) -> list[pb.Event]:
        """The events that the journal has kept."""
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

    def __exit__(self, *_: object) -> None:
        self.close()
