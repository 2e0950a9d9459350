"""What is asked of a running job, as its members see it."""

from __future__ import annotations

import contextlib

from .._sync_bridge import awaitable, blocking
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..types import Action, check_id
from .member import Member, StateLostError


class ActionCalls(Member):
    """A member's calls about actions."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """What is asked of the job and not done yet, as the last heartbeat said."""
        return self._actions

    @awaitable
    async def request_action_async(self, kind: str, worker_id: str = "", reason: str = "") -> str:
        """Ask something of the whole job; returns the action's id.

        ``"checkpoint"``: save at the next step that all can agree on. ``"stop"``: save, then end
        the run. ``"drain"``: save, then let the worker that is named leave; this one, if none is.
        All members hear of it with their next heartbeat. While the same is pending, its id is
        returned again. Raises `StrataError` when no such worker is live.
        """
        identity = self.identity
        request = messages.action_request(identity.job, kind, worker_id, reason)
        if kind == "drain" and not worker_id:
            request.worker_id = identity.worker_id
        request.requested_by = identity.worker_id
        request.incarnation = identity.incarnation
        return (await self.call("RequestAction", request, pb.Action)).action_id

    request_action = blocking(request_action_async)

    @awaitable
    async def complete_action_async(self, action_id: str, outcome: str = "") -> None:
        """Say that an action is done; any member may, also several, and the first is recorded."""
        identity = self.identity
        if action_id in self._actions_lost:
            return
        request = pb.ActionCompletion(
            job=identity.job,
            action_id=check_id("action", action_id),
            outcome=outcome,
            completed_by=identity.worker_id,
            incarnation=identity.incarnation,
        )
        with contextlib.suppress(StateLostError):
            await self.call("CompleteAction", request, pb.ActionCompleted, repeat=False)

    complete_action = blocking(complete_action_async)
