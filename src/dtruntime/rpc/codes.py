"""Words that have codes on the wire, in both directions."""

from __future__ import annotations

from typing import Any

from ..types import CheckpointCondition, Membership, WorkerState
from .gen import coordinator_pb2 as pb

STATE_CODES: dict[str, Any] = {
    state: pb.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState
}
STATES: dict[int, WorkerState] = {
    pb.WORKER_STATE_UNSPECIFIED: WorkerState.IDLE,
    **{STATE_CODES[state]: state for state in WorkerState},
}

MEMBERSHIP_CODES: dict[str, Any] = {
    membership: pb.Membership.Value(f"MEMBERSHIP_{membership.name}") for membership in Membership
}
MEMBERSHIPS: dict[int, Membership] = {MEMBERSHIP_CODES[one]: one for one in Membership}

CONDITION_CODES: dict[str, Any] = {
    condition: pb.CheckpointCondition.Value(f"CHECKPOINT_CONDITION_{condition.name}")
    for condition in CheckpointCondition
}
CONDITIONS: dict[int, CheckpointCondition] = {
    CONDITION_CODES[condition]: condition for condition in CheckpointCondition
}
