"""What a worker is told when it is not, or not any more, a member."""

from __future__ import annotations

from ...types import Membership
from .commands import Refused, Register
from .records import WorkerRecord

RETRY_SECONDS = 1.0
"""When to ask again after a refusal that ends when ghosts are declared dead."""

SILENT = "no heartbeat for"
"""With this the reason of a death begins that was only inferred."""
SILENT_HINT = (
    "the process or its machine is gone, or code that holds the interpreter lock ran for that "
    "long: then raise heartbeat_timeout_ms of the coordinator"
)

_AGAIN = "stop this process, or call register() again to join as a new member"


def lower_attempt(c: Register, attempt: int) -> Refused:
    """The launcher has restarted the group since."""
    return Refused(
        "superseded",
        f"this process belongs to restart {c.attempt} of job {c.job!r}, which is at restart "
        f"{attempt}: stop this process",
        retry_after=RETRY_SECONDS,
    )


def other_world_size(c: Register, size: int, live: int) -> Refused:
    """The job runs in another size."""
    running = f"world_size={size}" if size else "an elastic world"
    return Refused(
        "world_size_conflict",
        f"job {c.job!r} runs with {running} and {live} live workers, but this worker asked for "
        f"world_size={c.world_size}: use the same size, wait for the others to end, or choose "
        "another job",
        retry_after=RETRY_SECONDS,
    )


def ended_session(c: Register, how: str) -> Refused:
    """A registration that was over is repeated."""
    return Refused(
        "superseded",
        f"this registration in job {c.job!r} has ended ({how}): {_AGAIN}",
    )


def job_full(c: Register, size: int) -> Refused:
    """Nobody can be given a rank."""
    return Refused(
        "job_full",
        f"all {size} ranks of job {c.job!r} are held by live workers: wait until one leaves or is "
        "declared dead, or start fewer workers",
        retry_after=RETRY_SECONDS,
    )


def stranger(job: str, worker_id: str) -> Refused:
    """Nobody was ever given this identity."""
    return Refused(
        "unknown_worker", f"worker {worker_id!r} of job {job!r} is not a member: {_AGAIN}"
    )


def replaced(job: str, worker_id: str, successor: str | None) -> Refused:
    """Another worker holds the rank, or a new world has begun."""
    by = f" by {successor!r}" if successor else ""
    return Refused("superseded", f"worker {worker_id!r} of job {job!r} was replaced{by}: {_AGAIN}")


def registered_again(job: str, known: WorkerRecord, incarnation: int) -> Refused:
    """Another process has taken the name."""
    return Refused(
        "superseded",
        f"worker {known.worker_id!r} of job {job!r} was registered again as incarnation "
        f"{known.incarnation} by process {known.process or '?'}; this call carries incarnation "
        f"{incarnation}: {_AGAIN}",
    )


def gone(job: str, known: WorkerRecord) -> Refused:
    """The caller itself has left or was declared dead."""
    word = "has left" if known.membership == Membership.LEFT else "was declared dead"
    why = known.detail
    if why.startswith(SILENT):
        why += (
            "; this process lives, so it was stopped, cut off from the coordinator, or code that "
            "holds the interpreter lock ran for that long: then raise the coordinator's "
            "heartbeat_timeout_ms"
        )
    return Refused(
        "superseded", f"worker {known.worker_id!r} of job {job!r} {word} ({why}): {_AGAIN}"
    )
