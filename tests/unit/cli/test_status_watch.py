"""The picture and the keys of strata status --watch."""

import pytest
from rich.console import Console

from dtruntime.cli.status import (
    SORTS,
    StatusFrame,
    WatchState,
    keys_in,
    sparkline,
    watch_view,
)
from dtruntime.cli.status_report import CoordinatorReport, StatusReport
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.types import (
    BarrierStatus,
    CheckpointInfo,
    JobStatus,
    Membership,
    WorkerState,
    WorkerStatus,
)

COORDINATOR = CoordinatorReport("http://c:50051", "1", "pygrpc-native", 1, 60.0, 1000, 30000, ())


def worker(rank: int, step: int = 10, **changes: object) -> WorkerStatus:
    values: dict[str, object] = {
        "worker_id": f"worker-{rank}",
        "rank": rank,
        "incarnation": rank + 1,
        "membership": Membership.LIVE,
        "state": WorkerState.TRAINING,
        "step": step,
        "epoch": 0,
        "heartbeat_age": 0.1,
    }
    return WorkerStatus(**{**values, **changes})  # type: ignore[arg-type]


def job(*workers: WorkerStatus, name: str = "train", **changes: object) -> JobStatus:
    return JobStatus(name, 1, 0, len(workers), 0, 0, 0, 0, 0, workers, **changes)  # type: ignore[arg-type]


def frame(shown: JobStatus | None, at: float = 0.0, **changes: object) -> StatusFrame:
    names = (shown.job, "zebra") if shown is not None else ()
    event = pb.Event(id=1, at=0, job="train", kind="worker.dead", fields={"worker": "worker-9"})
    values: dict[str, object] = {"jobs": names, "events": (event,) if shown else (), "at": at}
    return StatusFrame(COORDINATOR, shown, **{**values, **changes})  # type: ignore[arg-type]


def drawn(state: WatchState, width: int = 120, height: int | None = 30) -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(watch_view(state, width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("number", [8, 1000])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 12)])
def test_picture_fits_the_terminal(number: int, width: int, height: int) -> None:
    lines = drawn(WatchState(frame(job(*map(worker, range(number))))), width, height)

    assert len(lines) == height
    assert all(len(line) <= width for line in lines)
    assert "quit" in lines[-1] or width < 80
    assert any("worker-0" in line for line in lines)


def test_everything_is_shown_where_nothing_bounds_it() -> None:
    text = "\n".join(drawn(WatchState(frame(job(*map(worker, range(300))))), height=None))

    assert "worker-299" in text
    assert "worker-9 (rank ?) was lost" in text


def test_barrier_names_who_is_missing() -> None:
    barrier = BarrierStatus("epoch-1", 1, 1, 2, 9.0, {"worker-1": 4})
    text = "\n".join(drawn(WatchState(frame(job(worker(0), worker(1), barriers=(barrier,))))))

    assert "epoch-1: 1 of 2 arrived" in text
    assert "worker-1 (step 4)" in text


def test_scrolling_stays_within_the_list() -> None:
    state = WatchState(frame(job(*map(worker, range(100)))), "rank")
    drawn(state)
    page = state.page
    assert 4 <= page < 100

    state.press("up")
    assert state.first == 0
    state.press("page down")
    state.press("down")
    assert state.first == page + 1
    assert not any("worker-0 " in line for line in drawn(state))
    state.press("end")
    assert state.first == 100 - page
    assert any("worker-99 " in line for line in drawn(state))
    state.press("home")
    assert state.first == 0


def test_sorting_goes_through_all_orders() -> None:
    workers = [
        worker(0, step=5),
        worker(1, step=3, heartbeat_age=2.0),
        worker(2, step=4, membership=Membership.DEAD),
    ]
    state = WatchState(frame(job(*workers)))
    first = {}
    for _ in SORTS:
        first[state.sort] = state.rows()[0].worker.rank
        state.press("sort")

    assert state.sort == SORTS[0]
    assert (first["problems"], first["rank"], first["step"], first["heartbeat"]) == (2, 0, 1, 1)


def test_pause_keeps_the_picture_until_it_ends() -> None:
    state = WatchState(frame(job(worker(0, step=1))))
    state.press("pause")
    state.show(frame(job(worker(0, step=2)), at=1.0))
    assert "PAUSED" in drawn(state)[-1]
    assert state.frame.at == 0.0

    state.press("pause")
    state.show(frame(job(worker(0, step=3)), at=2.0))
    assert state.frame.at == 2.0


def test_pace_is_that_of_the_rank_in_the_middle() -> None:
    state = WatchState(frame(job(worker(0, 10), worker(1, 10), worker(2, 10))))
    state.show(frame(job(worker(0, 10), worker(1, 14), worker(2, 90)), at=2.0))

    assert list(state.pace.values) == [2.0]
    assert any("2.00 steps/s" in line for line in drawn(state))


def test_pace_does_not_count_a_replacement_as_progress() -> None:
    state = WatchState(frame(job(worker(0, 10))))
    state.show(frame(job(worker(0, 99, incarnation=7)), at=2.0))

    assert not state.pace.values


def test_pace_between_heartbeats_is_that_of_the_heartbeats() -> None:
    state = WatchState(frame(job(worker(0, 0, heartbeat_age=0.0))))
    for second in range(1, 21):
        heard = second - second % 5
        state.show(frame(job(worker(0, heard * 4, heartbeat_age=second - heard)), at=second))

    assert set(state.pace.values) == {4.0}


def test_pace_ends_when_nobody_takes_steps_any_more() -> None:
    state = WatchState(frame(job(worker(0, 10))))
    state.show(frame(job(worker(0, 14)), at=2.0))
    for at in (3.0, 4.0):
        state.show(frame(job(worker(0, 14, membership=Membership.LEFT)), at=at))

    assert list(state.pace.values) == [2.0, None, None]
    assert any("no steps   highest 2.00" in line for line in drawn(state))


def test_silent_worker_has_no_pace() -> None:
    state = WatchState(frame(job(worker(0, 10, heartbeat_age=0.0))))
    for second in range(1, 16):
        state.show(frame(job(worker(0, 14, heartbeat_age=second - 1)), at=second))

    assert state.pace.values[0] == 4.0
    assert state.pace.values[-1] is None


def test_next_job_waits_for_a_look_at_it() -> None:
    state = WatchState(frame(job(worker(0))))
    state.press("next job")
    assert state.job_name == "zebra"
    state.show(frame(job(worker(0)), at=1.0))
    assert state.frame.at == 0.0

    state.show(frame(job(worker(0), name="zebra"), at=2.0))
    assert state.frame.job is not None
    assert state.frame.job.job == "zebra"


def overview(*names: str, at: float = 0.0) -> StatusFrame:
    report = StatusReport(COORDINATOR, tuple(job(worker(0), name=name) for name in names))
    return StatusFrame(COORDINATOR, None, names, (), at, all_jobs=report)


def test_several_jobs_are_all_shown_until_one_is_asked_for() -> None:
    state = WatchState(overview("train", "zebra"))
    assert state.job_name is None
    text = "\n".join(drawn(state))
    assert "job train" in text
    assert "job zebra" in text
    assert "tab next job" in drawn(state)[-1]

    state.press("next job")
    assert state.job_name == "train"
    state.show(overview("train", "zebra", at=1.0))
    assert state.frame.at == 0.0
    state.show(frame(job(worker(0)), at=2.0))
    assert state.frame.job is not None


def test_all_jobs_come_again_after_the_last() -> None:
    state = WatchState(frame(job(worker(0), name="zebra"), jobs=("train", "zebra")))
    state.press("next job")
    assert state.job_name is None
    state.show(frame(job(worker(0), name="zebra"), at=1.0, jobs=("train", "zebra")))
    assert state.frame.at == 0.0
    state.show(overview("train", "zebra", at=2.0))
    assert "job train" in "\n".join(drawn(state))


def test_last_job_that_is_left_is_shown_in_full() -> None:
    state = WatchState(overview("train", "zebra"))
    state.show(frame(job(worker(0)), at=1.0, jobs=("train",)))
    assert state.job_name == "train"
    assert "workers 1 to 1 of 1" in drawn(state)[-1]


@pytest.mark.parametrize("number", [2, 50])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 12)])
def test_picture_of_all_jobs_fits_the_terminal(number: int, width: int, height: int) -> None:
    lines = drawn(WatchState(overview(*(f"job-{n}" for n in range(number)))), width, height)

    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert "all jobs" in lines[-1]


def test_absent_coordinator_is_said_above_its_last_state() -> None:
    text = "\n".join(drawn(WatchState(frame(job(worker(0)), stale_since=0.0))))

    assert "has not answered for" in text
    assert "worker-0" in text


def test_coordinator_without_jobs_says_how_one_begins() -> None:
    assert any("no jobs yet" in line for line in drawn(WatchState(frame(None))))


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0, 0], "▁▁"), ([0, 7], "▁█"), ([1, 2, 3, 4], "▃▅▆█")]
)
def test_sparkline(values: list[float | None], bars: str) -> None:
    assert sparkline(values, 10) == bars


def test_keys_have_names_also_when_many_come_at_once() -> None:
    assert keys_in(b"s\x1b[A\x1bOB\x1b[6~xq") == ["sort", "up", "down", "page down", "quit"]


def test_newest_checkpoints_are_shown_where_there_is_room() -> None:
    saved = [
        CheckpointInfo(f"c{number}", 100 * number, verified=verdict, will_be_dropped=dropped)
        for number, verdict, dropped in (
            (5, None, False),
            (4, True, False),
            (3, False, False),
            (2, None, True),
            (1, None, True),
        )
    ]
    shown = job(*map(worker, range(64)), checkpoints=tuple(saved), latest_checkpoint=saved[0])
    lines = [line for line in drawn(WatchState(frame(shown)), height=40) if " step " in line[:20]]
    assert [line.split(",")[0].split()[-1] for line in lines] == ["500", "400", "300", "200"]
    assert "verified" not in lines[0]
    assert "verified" in lines[1]
    assert "DAMAGED" in lines[2]
    assert "dropped next" in lines[3]
    small = drawn(WatchState(frame(shown)), height=24)
    assert len([line for line in small if " step " in line[:20]]) == 1
