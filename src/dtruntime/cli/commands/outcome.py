"""``strata outcome``: the exit status that a launcher should end with."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ...client import Observer
from ...display import plain
from ...errors import StrataError
from ...retention import FINISHED_KEY
from ...types import JobStatus, Membership, WorkerStatus
from ..invocation import add_url, coordinator_url, log_only_when_asked, whole_between
from .jobs import one_job

FINISHED = "finished"
"""The reason that a worker gives when it leaves a run that has finished."""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "outcome",
        help="say with which exit status a launcher should end",
        description="After all workers have ended: exit with 0 when the run finished although "
        "workers were lost, otherwise with the status that was given. Also with that status when "
        "the coordinator cannot be reached or does not know the job.",
    )
    add_url(parser)
    parser.add_argument("--job", help="the job (default: STRATA_JOB, else the only one)")
    parser.add_argument(
        "--status",
        type=whole_between(0, 255),
        required=True,
        help="the worst exit status of the workers, such as that of srun",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look at what became of the run, and say so."""
    log_only_when_asked()
    status = int(options.status)
    url = coordinator_url(options)
    try:
        with Observer(url) as observer:
            seen = observer.status(one_job(observer, url, options.job))
    except StrataError as exc:
        print(f"strata: how the run ended is not known: {plain(str(exc))}", file=sys.stderr)
        return status
    print(plain(_line(seen, status)))
    return status_of(seen, status)


def status_of(job: JobStatus, status: int) -> int:
    """0 when the run finished and the loss of workers explains the status, otherwise the status.

    A worker that has failed after the run, while it exported the model for example, is not
    explained by a loss: to the coordinator it is one that has finished.
    """
    return 0 if has_finished(job) and (lost_workers(job) or job.loss_ages) else status


def has_finished(job: JobStatus) -> bool:
    """Whether the run has saved its end, and somebody left because of that."""
    latest = job.latest_checkpoint
    if latest is None or FINISHED_KEY not in latest.metadata:
        return False
    return any(w.membership is Membership.LEFT and w.detail == FINISHED for w in job.workers)


def lost_workers(job: JobStatus) -> list[WorkerStatus]:
    """Those that did not come to the end: dead, failed, or silent since all have ended."""
    expected = [w for w in job.workers if w.membership is not Membership.EXPECTED]
    return [w for w in expected if w.membership is not Membership.LEFT or w.detail != FINISHED]


def _line(job: JobStatus, status: int) -> str:
    latest = job.latest_checkpoint
    saved = "nothing was saved" if latest is None else f"the last save is of step {latest.step}"
    if not has_finished(job):
        return f"job {job.job} has not finished: {saved}; exit status {status}"
    reasons = ", ".join(f"{w.worker_id} ({w.detail or w.membership})" for w in lost_workers(job))
    lost = f"; without {reasons}" if reasons else ""
    return f"job {job.job} has finished: {saved}{lost}; exit status {status_of(job, status)}"
