"""How a member records checkpoints, alone or together with all others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from .._sync_bridge import awaitable, blocking
from ..errors import CheckpointAbortedError, StorageError
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..types import CheckpointCondition, CheckpointInfo, check_id, check_whole
from .member import Member, StateLostError, hold_seconds
from .worker_config import WorkerConfig

SAVES_SECONDS = 600.0
"""How long a member that leaves waits for its saves to be committed."""
REPORT_SECONDS = 2.0
"""How long a coordinator that is away is tried when it is told what became of a checkpoint."""


COMMITS_KEPT = 64
"""So many commits of one writer are told again to a coordinator that has lost its state."""

_ATTEMPT = re.compile(r"step-\d+-(\d+)")


class CommitCalls(Member):
    """A member's calls about checkpoints."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._commits_told: deque[pb.CheckpointInfo] = deque(maxlen=COMMITS_KEPT)

    def expect_commit(self, save: concurrent.futures.Future[Any]) -> None:
        """Do not leave before a save has ended that is to be committed through this member."""
        self._under_way.add(save)
        save.add_done_callback(self._under_way.discard)

    async def _let_saves_end(self) -> None:
        """Wait for saves under way, on the I/O thread."""
        saves = [asyncio.wrap_future(save) for save in list(self._under_way)]
        if saves:
            done, _ = await asyncio.wait(saves, timeout=SAVES_SECONDS)
            for save in done:
                save.exception()  # whoever has the handle is told

    @awaitable
    async def begin_checkpoint_async(self, step: int, *, ranks: Sequence[int] | None = None) -> str:
        """The id under which all members save this step together.

        Every member calls this once for each save, before it writes, and then gives the id to
        `commit_checkpoint` with ``partial=True``. The members of one attempt get the same id,
        and no other attempt ever does: saving a step again, after a rollback or a failure, is
        another attempt. A member sends its parts in the order in which it began. An attempt ends
        when a member is lost before its part is stored, begins the step again, or goes past it:
        by sending its part of a later one, or by beginning a later one without having asked for
        it. `commit_checkpoint` then raises `CheckpointAbortedError`.

        ``ranks`` says who saves together; by default all members that are live. All of them have
        to give the same.
        """
        identity = self.identity
        request = pb.BeginCheckpointRequest(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            step=check_whole("step", step),
            ranks=ranks,
        )
        reply = await self._begin(request)
        self._seen = max(self._seen, reply.generation)
        if number := _ATTEMPT.fullmatch(reply.checkpoint_id):
            self._attempts_known = max(self._attempts_known, int(number[1]))
        return reply.checkpoint_id

    begin_checkpoint = blocking(begin_checkpoint_async)

    async def _begin(self, request: pb.BeginCheckpointRequest) -> pb.BeginCheckpointResponse:
        """Begin a save, under a ticket of the state that the coordinator has."""
        while True:
            request.ticket = next(self._saves)
            with contextlib.suppress(StateLostError):
                return await self.call(
                    "BeginCheckpoint", request, pb.BeginCheckpointResponse, repeat=False
                )

    @awaitable
    async def abandon_checkpoints_async(self) -> int:
        """End what is being saved together with this worker; returns how many saves that were.

        For a worker that goes back to an earlier step: the others need not wait for it.
        """
        identity = self.identity
        request = pb.AbandonRequest(
            job=identity.job, worker_id=identity.worker_id, incarnation=identity.incarnation
        )
        reply = await self.call("AbandonCheckpoints", request, pb.Abandoned)
        return reply.count

    abandon_checkpoints = blocking(abandon_checkpoints_async)

    @awaitable
    async def commit_checkpoint_async(
        self,
        /,
        checkpoint_id: str,
        step: int,
        *,
        epoch: int = 0,
        path: str = "",
        size_bytes: int = 0,
        is_full: bool = True,
        partial: bool = False,
        timeout_ms: int = 600_000,
        **metadata: object,
    ) -> None:
        """Record a checkpoint that is safely stored, so that recovery finds it.

        ``partial`` means that every member writes its own part: the call returns when all
        have. Raises `CheckpointAbortedError` when that will never be, and `StorageError` when it
        is not so within ``timeout_ms``.
        """
        hold = hold_seconds(timeout_ms)
        identity = self.identity
        request = pb.CheckpointInfo(
            checkpoint_id=check_id("checkpoint", checkpoint_id),
            worker_id=identity.worker_id,
            step=check_whole("step", step),
            epoch=check_whole("epoch", epoch),
            path=path,
            size_bytes=check_whole("size_bytes", size_bytes),
            is_full=is_full,
            metadata={key: str(value) for key, value in metadata.items()},
            job=identity.job,
            incarnation=identity.incarnation,
            generation=self._told,
            partial=partial,
        )
        reply = await self._notify(request, hold)
        if reply.status == pb.CHECKPOINT_STATUS_ABORTED:
            raise CheckpointAbortedError(
                f"checkpoint {checkpoint_id!r} was not committed: {reply.detail}"
            )
        if reply.status == pb.CHECKPOINT_STATUS_PENDING:
            raise StorageError(
                f"checkpoint {checkpoint_id!r} was not committed within {timeout_ms} ms: ranks "
                f"{list(reply.missing_ranks)} have not stored their part"
            )
        if not partial:
            self._commits_told.append(request)

    commit_checkpoint = blocking(commit_checkpoint_async)

    async def _notify(self, request: pb.CheckpointInfo, hold: float) -> pb.CheckpointResponse:
        """Send a commit; behind the earlier ones if the coordinator has lost these."""
        try:
            return await self.call(
                "NotifyCheckpoint", request, pb.CheckpointResponse, hold=hold, repeat=False
            )
        except StateLostError as exc:
            if request.partial:
                error = CheckpointAbortedError(
                    f"checkpoint {request.checkpoint_id!r} was not committed: {exc}"
                )
                error.may_be_committed = True
                raise error from exc
        await self._tell_commits()
        return await self.call("NotifyCheckpoint", request, pb.CheckpointResponse, hold=hold)

    @awaitable
    async def report_checkpoints_async(
        self,
        checkpoint_ids: Sequence[str],
        condition: CheckpointCondition,
        *,
        path: str = "",
        detail: str = "",
    ) -> int:
        """Say what became of committed checkpoints; returns how many of them are known.

        The coordinator cannot see where they are stored, and shows what it was told last. ``path``
        stands for one whose id cannot be read: the path that it was committed with. A coordinator
        that is away is tried for two seconds only.
        """
        identity = self.identity
        if condition is CheckpointCondition.REMOVED:
            gone = set(checkpoint_ids)
            kept = [told for told in self._commits_told if told.checkpoint_id not in gone]
            self._commits_told = deque(kept, COMMITS_KEPT)
        request = messages.checkpoint_report(identity.job, checkpoint_ids, condition, path, detail)
        request.reported_by, request.incarnation = identity.worker_id, identity.incarnation
        reply = await self.call(
            "ReportCheckpoints", request, pb.CheckpointsReported, patience=REPORT_SECONDS
        )
        return reply.known

    report_checkpoints = blocking(report_checkpoints_async, brief=True)

    async def _tell_commits(self) -> None:
        """Record again what this worker has recorded alone."""
        for request in list(self._commits_told):
            await self.call("NotifyCheckpoint", request, pb.CheckpointResponse)

    @awaitable
    async def latest_checkpoint_async(
        self, *, patience: float | None = None
    ) -> CheckpointInfo | None:
        """The checkpoint of this job that was committed last and not deleted, or ``None``.

        This worker need not be registered. ``patience`` is how long a coordinator that is away is
        tried, in seconds.
        """
        request = pb.RecoveryRequest(job=self.job, worker_id=self.worker_id)
        reply = await self.call("GetLatestCheckpoint", request, pb.RecoveryInfo, patience=patience)
        return messages.checkpoint(reply.checkpoint) if reply.found else None

    latest_checkpoint = blocking(latest_checkpoint_async, brief=True)
