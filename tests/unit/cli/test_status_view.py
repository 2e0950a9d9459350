import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from dtruntime.cli.status_report import (
    CoordinatorReport,
    Severity,
    StatusReport,
    rows_of,
    status_view,
)
from dtruntime.types import (
    Action,
    BarrierStatus,
    GpuUsage,
    JobStatus,
    Membership,
    ResourceUsage,
    WorkerState,
    WorkerStatus,
)

COORDINATOR = CoordinatorReport("http://host:50051", "1.2.3", "grpc.aio", 4, 90.0, 1000, 30_000, ())


def worker(rank: int, **changes: object) -> WorkerStatus:
    given: dict[str, object] = {
        "worker_id": f"worker-{rank}",
        "rank": rank,
        "incarnation": rank + 1,
        "membership": Membership.LIVE,
        "state": WorkerState.TRAINING,
        "step": 1000 + rank,
        "epoch": 2,
        "heartbeat_age": 0.4,
        "hostname": f"node-{rank // 8:04d}",
        "process": f"{4000 + rank}@node",
        "resources": ResourceUsage(50.0, 10**9, 10**11, (GpuUsage(0, 90.0, 3 * 10**9, 4 * 10**9),)),
    }
    return WorkerStatus(**{**given, **changes})  # type: ignore[arg-type]


def job(
    workers: list[WorkerStatus], name: str = "resnet", barriers: tuple[BarrierStatus, ...] = ()
) -> JobStatus:
    dead = sum(w.membership is Membership.DEAD for w in workers)
    return JobStatus(
        name, 3, len(workers), len(workers) - dead, dead, 2, 2, 1, 0, tuple(workers), barriers
    )


def shown(report: StatusReport, width: int = 120, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(status_view(report, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def ranks_in(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r" +(\d+)  worker-\d+ ", line))]


def test_workers_with_a_problem_come_first_and_those_that_left_last() -> None:
    barrier = BarrierStatus("sync", 1, 4, 6, 60.0, {"worker-4": 1004})
    status = job(
        [
            worker(0, membership=Membership.LEFT),
            worker(1),
            worker(2, membership=Membership.EXPECTED, incarnation=0),
            worker(3, heartbeat_age=20.0),
            worker(4),
            worker(5, membership=Membership.DEAD, detail="no heartbeat for 30.1 s"),
        ],
        barriers=(barrier,),
    )

    rows = rows_of(status, heartbeat_timeout=30.0)

    assert [(row.worker.rank, row.severity) for row in rows] == [
        (5, Severity.DEAD),
        (3, Severity.SILENT),
        (4, Severity.AWAITED),
        (2, Severity.EXPECTED),
        (1, Severity.FINE),
        (0, Severity.LEFT),
    ]
    assert rows[0].note == "no heartbeat for 30.1 s"
    assert "dead in 10.0 s" in rows[1].note


def test_barrier_that_has_just_opened_makes_nobody_a_problem() -> None:
    barrier = BarrierStatus("sync", 1, 1, 2, 0.2, {"worker-1": 1001})

    rows = rows_of(job([worker(0), worker(1)], barriers=(barrier,)), heartbeat_timeout=30.0)

    assert not any(row.is_problem for row in rows)


@pytest.mark.parametrize("height", [12, 24, 50])
def test_thousands_of_workers_are_cut_to_the_terminal_with_a_count(height: int) -> None:
    workers = [worker(rank) for rank in range(5000)]
    workers[4321] = worker(4321, membership=Membership.DEAD, detail="no heartbeat for 30.1 s")

    lines = shown(StatusReport(COORDINATOR, (job(workers),)), height=height)

    assert len(lines) < height
    ranks = ranks_in(lines)
    assert ranks[0] == 4321
    assert ranks[1:] == list(range(len(ranks) - 1))
    assert f"{5000 - len(ranks):,} workers not shown, all without a problem" in lines[-1]


def test_problems_that_do_not_fit_are_counted() -> None:
    workers = [worker(r, membership=Membership.DEAD) for r in range(50)]

    lines = shown(StatusReport(COORDINATOR, (job(workers),)), height=20)

    hidden = 50 - len(ranks_in(lines))
    assert f"{hidden} workers not shown, {hidden} of them with a problem" in lines[-1]


def test_nothing_is_cut_where_there_is_no_terminal() -> None:
    lines = shown(StatusReport(COORDINATOR, (job([worker(r) for r in range(300)]),)))

    assert ranks_in(lines) == list(range(300))


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (20, "rank state"),
        (40, "rank worker state step epoch"),
        (60, "rank worker state step epoch heartbeat note"),
        (80, "rank worker state step epoch heartbeat CPU memory note"),
        (200, "rank worker state step epoch heartbeat CPU memory GPUs host process note"),
    ],
)
def test_lines_fit_the_width_with_the_columns_that_matter_most(width: int, columns: str) -> None:
    status = job([worker(0), worker(1, membership=Membership.DEAD, detail="silence")])

    lines = shown(StatusReport(COORDINATOR, (status,)), width=width)

    assert max(len(line) for line in lines) <= width
    (heading,) = [line for line in lines if line.startswith("  rank")]
    assert heading.split() == columns.split()


def test_barrier_line_names_the_first_and_counts_the_rest() -> None:
    missing = {f"worker-{rank}": 7 for rank in range(20)}
    barrier = BarrierStatus("sync", 1, 480, 500, 2.5, {**missing, "worker-0": None})
    status = job([worker(0)], barriers=(barrier,))

    text = "\n".join(shown(StatusReport(COORDINATOR, (status,)), width=200))

    assert "sync: 480 of 500 arrived, open for 2.5 s; missing worker-0 (no step), " in text
    assert "worker-5 (step 7) and 14 more" in text


def test_more_jobs_than_fit_get_one_line_each_the_troubled_ones_first() -> None:
    jobs = [job([worker(0), worker(1)], f"job-{n:02d}") for n in range(30)]
    jobs[17] = job([worker(0), worker(1, membership=Membership.DEAD)], "job-17")

    lines = shown(StatusReport(COORDINATOR, tuple(jobs)), height=20)

    assert len(lines) < 20
    assert lines[3].startswith("job-17")
    assert "jobs not shown; see one with its workers: strata status --job NAME" in lines[-1]


def test_slow_worker_is_a_problem_with_its_step_time_and_what_is_usual() -> None:
    slow = worker(1, step_seconds=0.4, slowness=3.97, is_straggler=True)
    status = job([worker(0, step_seconds=0.1, slowness=1.0), slow, worker(2)])
    lines = shown(StatusReport(COORDINATOR, (status,)), width=200)
    assert ranks_in(lines) == [1, 0, 2]
    assert "slow: 4.0 × the median" in "\n".join(lines)
    assert "400 ms" in "\n".join(lines)
    assert rows_of(status, 30.0)[0].severity is Severity.SLOW


def test_what_is_asked_and_recent_losses_are_told_of_the_job() -> None:
    asked = Action("action-000001", "drain", "worker-2", "maintenance", 1.0)
    status = replace(job([worker(0)]), actions=(asked,), loss_ages=(5.0, 7200.0))
    text = "\n".join(shown(StatusReport(COORDINATOR, (status,)), width=200))
    for part in ("drain worker-2", "an operator", "maintenance", "1 lost in the last hour"):
        assert part in text
