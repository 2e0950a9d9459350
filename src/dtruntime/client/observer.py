"""Looking at a coordinator, and asking something of jobs, without being a member."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from .._sync_bridge import awaitable, blocking
from ..rpc import messages
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..types import Action, CheckpointCondition, CheckpointInfo, JobStatus, check_id


class Observer:
    """What somebody outside of all jobs sees of one coordinator, and may ask of them."""

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
            workers += [messages.worker_status(w) for w in page.workers]
            if not page.next_rank:
                return messages.job_status(page, workers)
            request.from_rank = page.next_rank

    status = blocking(status_async)

    @awaitable
    async def recent_losses_async(self, job: str, seconds: float) -> int:
        """How many members a job lost in the last ``seconds``, counted up to 64."""
        page = await self._channel.call(
            "GetStatus", pb.StatusRequest(job=job, limit=1), pb.JobStatus, patience=self._patience
        )
        return messages.job_status(page, []).recent_losses(seconds)

    recent_losses = blocking(recent_losses_async)

    @awaitable
    async def request_action_async(
        self, job: str, kind: str, worker_id: str = "", reason: str = ""
    ) -> str:
        """Ask something of a job, as `TrainingOrchestrator.request_action` does."""
        reply = await self._channel.call(
            "RequestAction",
            messages.action_request(job, kind, worker_id, reason),
            pb.Action,
            patience=self._patience,
        )
        return reply.action_id

    request_action = blocking(request_action_async)

    @awaitable
    async def complete_action_async(self, job: str, action_id: str, outcome: str = "") -> None:
        """End an action; one that is over is left alone."""
        request = pb.ActionCompletion(
            job=job, action_id=check_id("action", action_id), outcome=outcome
        )
        await self._channel.call(
            "CompleteAction", request, pb.ActionCompleted, patience=self._patience
        )

    complete_action = blocking(complete_action_async)

    @awaitable
    async def actions_async(self, job: str) -> tuple[Action, ...]:
        """What is asked of a job and not done yet."""
        reply = await self._channel.call(
            "ListActions", pb.JobRequest(job=job), pb.ActionList, patience=self._patience
        )
        return tuple(messages.action(action) for action in reply.actions)

    actions = blocking(actions_async)

    @awaitable
    async def checkpoints_async(self, job: str) -> list[CheckpointInfo]:
        """The committed checkpoints of a job that are not known to be deleted, oldest first."""
        reply = await self._channel.call(
            "ListCheckpoints", pb.JobRequest(job=job), pb.CheckpointList, patience=self._patience
        )
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
        """Say what became of checkpoints, as `TrainingOrchestrator.report_checkpoints` does."""
        reply = await self._channel.call(
            "ReportCheckpoints",
            messages.checkpoint_report(job, checkpoint_ids, condition, "", detail),
            pb.CheckpointsReported,
            patience=self._patience,
        )
        return reply.known

    report_checkpoints = blocking(report_checkpoints_async)

    @awaitable
    async def remove_job_async(self, job: str, *, force: bool = False) -> pb.JobRemoved:
        """Forget a job; `StrataError` while workers are live, unless ``force``.

        Stored checkpoints and data stay where they are.
        """
        request = pb.RemoveJobRequest(job=check_id("job", job), force=force)
        return await self._channel.call(
            "RemoveJob", request, pb.JobRemoved, patience=self._patience
        )

    remove_job = blocking(remove_job_async)

    @awaitable
    async def remove_dataset_async(
        self, job: str, dataset_id: str, *, force: bool = False
    ) -> pb.DatasetRemoved:
        """Forget a dataset and what was consumed of it; its files stay."""
        request = pb.RemoveDatasetRequest(
            job=job, dataset_id=check_id("dataset", dataset_id), force=force
        )
        return await self._channel.call(
            "RemoveDataset", request, pb.DatasetRemoved, patience=self._patience
        )

    remove_dataset = blocking(remove_dataset_async)

    @awaitable
    async def job_summaries_async(self) -> list[pb.JobSummary]:
        """All jobs in a few words each, by name."""
        reply = await self._channel.call(
            "ListJobs", pb.ListJobsRequest(), pb.JobList, patience=self._patience
        )
        return sorted(reply.jobs, key=lambda job: job.job)

    job_summaries = blocking(job_summaries_async)

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
