"""What survives a restart, and what keeps the machine from growing without end."""

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
import pytest

from dtruntime.coordinator.state import RECORD_TYPES, Machine
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state import datasets as datasets_module
from dtruntime.coordinator.state import effects as effects_module
from dtruntime.coordinator.state import machine as machine_module
from dtruntime.coordinator.state.barriers import ROUNDS_KEPT
from dtruntime.coordinator.state.datasets import AssignmentCache, Dataset, Datasets
from dtruntime.coordinator.state.effects import JOB_EVENTS_KEPT, Journal
from dtruntime.coordinator.state.machine import WAITS_SLACK
from dtruntime.coordinator.state.records import (
    READ_ON_DEMAND,
    DatasetRecord,
    Event,
    JobRecord,
)
from tests.support.machine_bench import DATASET, JOB, SAMPLES, TIMEOUT, Bench, digest_of, refusal
from tests.support.machine_invariants import durable_rows, snapshot, violations


def eventful() -> Bench:
    """A bench with records of every kind, dead, left, moved and vacant ranks among them."""
    bench = Bench()
    members = [bench.register(world_size=6, rank=r, worker_id=f"n{r}") for r in range(5)]
    bench.beat(*members, epoch=2)
    bench.kill(members[1], among=members)
    bench.leave(members[2])
    moved = bench.register(world_size=6, rank=3, worker_id="n4")
    bench.apply(c.RegisterDataset(JOB, "data", 1000, 10, metadata={"k": "v"}))
    bench.save(members[0], "one", partial=False, metadata={"loader": "x"})
    last = bench.register(world_size=6, rank=5)
    now = bench.roster.generation
    bench.save(members[0], "all", told=now)
    bench.save(moved, "all", told=now)
    bench.begin(moved, 7)
    for member in (members[0], moved, last):
        bench.arrive(member, "b", told=now, ticket=1)
        bench.arrive(member, "x", told=now, ticket=2, payload=bytes([member.rank, 255]))
    bench.request("drain", moved.worker_id, reason="maintenance")
    bench.apply(c.RegisterDataset(JOB, DATASET, SAMPLES, 10))
    bench.claim(members[0], 0)
    bench.claim(members[0], 1, 10, 20)
    bench.commit(members[0], 1, 5, 5)
    bench.apply(c.Rebalance(JOB, DATASET, 0, {0: 50}))
    bench.claim(moved, 2, 10, 20)
    digest = digest_of(range(3))
    bench.apply(
        c.ReportCoverage(JOB, moved.worker_id, moved.incarnation, DATASET, 1, digest, digest, 6)
    )
    bench.register(job="elastic")
    bench.register(job="gone")
    bench.apply(c.RemoveJob("gone", force=True))
    return bench


def test_machine_built_from_the_stored_effects_has_the_same_durable_state() -> None:
    bench = eventful()
    assert {key[0] for key in bench.rows} == set(RECORD_TYPES) - {READ_ON_DEMAND}
    restored = Machine(TIMEOUT)
    assert restored.restore([(*k, r) for k, r in bench.rows.items()], bench.now) == []
    assert durable_rows(restored) == durable_rows(bench.machine) == bench.rows
    assert violations(restored) == []
    assert restored.jobs[JOB].roster.present_ranks() == bench.roster.present_ranks()


def test_records_survive_json_and_any_order_of_rows() -> None:
    bench = eventful()
    rows = [
        (kind, job, key, msgspec.json.decode(msgspec.json.encode(record), type=RECORD_TYPES[kind]))
        for (kind, job, key), record in reversed(bench.rows.items())
    ]
    restored = Machine(TIMEOUT)
    restored.restore(rows, bench.now)
    assert durable_rows(restored) == bench.rows


def test_rows_without_a_job_are_left_out_and_named(bench: Bench) -> None:
    bench.world(1)
    rows = [(*key, record) for key, record in bench.rows.items()]
    orphans = [("worker", "gone", "0", rows[0][3])]
    assert Machine(TIMEOUT).restore([*rows, *orphans], bench.now) == ["worker gone/0"]


def test_restore_of_many_jobs_takes_time_in_proportion_to_their_records() -> None:
    bench = Bench(checked=False)
    for number in range(1000):
        bench.register(job=f"j{number}")
    rows = [(*key, record) for key, record in bench.rows.items()]
    restored = Machine(TIMEOUT)
    restored.restore(rows, bench.now)
    assert len(restored.jobs) == 1000
    assert violations(restored) == []


def test_refused_command_changes_nothing_and_has_no_effects() -> None:
    bench = eventful()
    a = bench.register(job="other", world_size=1)
    before = snapshot(bench.machine)
    commands = [
        c.Register("other", world_size=1),
        c.Register("other", world_size=2),
        c.Register("new", world_size=2, rank=2),
        c.Heartbeat("other", a.worker_id, a.incarnation + 1),
        c.Arrive("other", "nobody", 1, "b", 900, 1.0),
        c.NotifyCheckpoint("other", a.worker_id, a.incarnation, "x", 1, partial=True),
        c.NotifyCheckpoint(JOB, "n0", 1, "one", 2),
        c.RegisterDataset(JOB, "data", 1001, 10),
        c.RegisterDataset("new", "data", 10, 0),
        c.Deregister("other", a.worker_id, 0),
        c.RequestAction("none", "stop"),
        c.RequestAction("other", "dance", "", "", a.worker_id, a.incarnation),
        c.RequestAction("other", "drain", "nobody", "", a.worker_id, a.incarnation),
        c.RequestAction("other", "stop", "", "", a.worker_id, a.incarnation + 1),
        c.CompleteAction("other", "action-000001"),
        c.CompleteAction("other", "action-1"),
    ]
    for command in commands:
        refusal(bench.apply, command)
        assert snapshot(bench.machine) == before
        assert bench.machine.apply(c.Hangup("none", 0), bench.now)[1] == ()


def test_journal_keeps_the_newest_events_and_numbers_them_without_gaps() -> None:
    journal = Journal(length=5)
    for number in range(12):
        journal.append(float(number), "a" if number % 2 else "b", "k", {})
    assert [event.id for event in journal.after(0)] == [8, 9, 10, 11, 12]
    assert [event.id for event in journal.after(10)] == [11, 12]
    assert [event.id for event in journal.after(0, "a")] == [8, 10, 12]
    assert journal.after(12) == []
    assert journal.last_id == 12
    continued = Journal(journal.after(0), length=5)
    assert continued.append(0.0, "a", "k", {})[0].id == 13


def test_journal_of_the_machine_is_bounded() -> None:
    bench = Bench(checked=False)
    for _ in range(JOB_EVENTS_KEPT // 2 + 10):
        bench.leave(bench.register())
    events = bench.machine.journal.after(0)
    assert len(events) == JOB_EVENTS_KEPT
    assert events[-1].id == bench.machine.journal.last_id == events[0].id + JOB_EVENTS_KEPT - 1


def test_flood_of_one_job_leaves_the_history_of_the_others() -> None:
    journal = Journal(length=100, per_job=60)
    quiet = [journal.append(0.0, "quiet", "k", {})[0] for _ in range(10)]
    for number in range(1000):
        journal.append(float(number), "loud", "worker.registered", {})
    assert journal.after(0, "quiet") == quiet
    assert len(journal.after(0, "loud")) == 60
    for number in range(1000):
        journal.append(float(number), f"loud-{number % 3}", "k", {})
    assert journal.after(0, "quiet") == quiet
    assert len(journal.after(0)) <= 100
    lengths = [len(journal.after(0, job)) for job in ("loud", "loud-0", "loud-1", "loud-2")]
    assert max(lengths) - min(lengths) <= 2


def test_flood_of_one_kind_leaves_the_other_events_of_its_job() -> None:
    journal = Journal(length=100, per_job=20)
    saved = journal.append(0.0, "a", "checkpoint.committed", {})[0]
    for number in range(500):
        journal.append(float(number), "a", "worker.registered", {})
        journal.append(float(number), "a", "worker.dead", {})
    kept = journal.after(0)
    assert kept[0] == saved
    assert len(kept) == 20
    assert kept[-1].id == journal.last_id == 1001


def test_longest_history_gives_way_and_of_equal_ones_the_oldest() -> None:
    seed = 20
    print(f"seed {seed}")
    random = Random(seed)
    journal, kept = Journal(length=300, per_job=40), list[Event]()
    for _ in range(5000):
        job = f"job-{int(random.paretovariate(0.6)) % 400}"
        event, forgotten = journal.append(0.0, job, "k", {})
        kept.append(event)
        lengths = Counter(event.job for event in kept)
        longest = min(kept, key=lambda event: (-lengths[event.job], event.id)).job
        gives = job if lengths[job] > 40 else longest if len(kept) > 300 else None
        gone = next((event for event in kept if event.job == gives), None)
        assert forgotten == (() if gone is None else (gone.id,))
        kept = [event for event in kept if event is not gone]
    assert journal.after(0) == kept


def test_who_gives_way_is_found_without_looking_at_every_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    rank = vars(effects_module._Entries)["rank"].fget
    assert rank is not None

    def count(entries: effects_module._Entries) -> tuple[int, int]:
        nonlocal looks
        looks += 1
        return rank(entries)

    journal = Journal(length=4000)
    for number in range(4000):
        journal.append(0.0, f"job-{number // 2}", "k", {})
    monkeypatch.setattr(effects_module._Entries, "rank", property(count))
    for number in range(1000):
        journal.append(0.0, f"name-{number}", "k", {})
    assert looks < 10 * 1000
    assert len(journal._ranks) <= 2 * len(journal._jobs) + effects_module.RANKS_SLACK


def test_what_made_room_is_told_once_also_after_a_restart() -> None:
    journal, stored = Journal(length=10, per_job=10), dict[int, Event]()
    for number in range(50):
        event, forgotten = journal.append(0.0, f"job-{number % 4}", "k", {})
        stored[event.id] = event
        for gone in forgotten:
            del stored[gone]
    assert list(stored.values()) == journal.after(0)
    smaller = Journal(stored.values(), length=4)
    event, forgotten = smaller.append(0.0, "job-1", "k", {})
    left = [*(event for number, event in stored.items() if number not in forgotten), event]
    assert smaller.after(0) == left
    assert len(left) == 4


def test_completed_rounds_are_kept_for_the_newest_barriers(bench: Bench) -> None:
    a = bench.register()
    for number in range(ROUNDS_KEPT + 3):
        bench.arrive(a, f"b{number}", ticket=number + 1)
    kept = [key[2] for key in bench.rows if key[0] == "round"]
    assert len(kept) == ROUNDS_KEPT
    assert kept[0] == "b3"


def test_ended_waits_with_long_timeouts_do_not_pile_up() -> None:
    bench = Bench(checked=False)
    a = bench.register()
    stays = bench.arrive(bench.register(job="other", world_size=2), timeout=50_000.0)
    for number in range(2 * WAITS_SLACK):
        bench.arrive(a, timeout=86_400.0, ticket=number + 1)
        bench.save(a, f"c{number % 7}", timeout=86_400.0)
        held = bench.register(job="third", rank=0, world_size=2)
        bench.arrive(held, told=0, timeout=86_400.0)
    assert len(bench.machine._waits) <= WAITS_SLACK
    assert stays.held
    bench.check()


def test_jobs_are_limited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "JOBS_LIMIT", 2)
    bench.register(job="a")
    bench.register(job="b")
    assert refusal(bench.register, job="c").reason == "too_many_jobs"
    refused = refusal(bench.apply, c.RegisterDataset("c", "data", 10, 1))
    assert refused.reason == "too_many_jobs"
    bench.register(job="a")


def test_job_that_nobody_misses_gives_way_to_a_new_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "JOBS_LIMIT", 5)
    bench.apply(c.RegisterDataset("data", "d", 10, 1))
    saved = bench.register(job="saved")
    bench.save(saved, partial=False)
    bench.leave(saved)
    bench.register(job="live")
    for name in ("older", "newer"):
        bench.now += 1.0
        bench.leave(bench.register(job=name))
    for number in range(4):
        bench.now += 1.0
        bench.leave(bench.register(job=f"name-{number}"))
    assert set(bench.machine.jobs) == {"data", "saved", "live", "name-2", "name-3"}
    forgotten = [event.job for event in bench.events if event.kind == "job.forgotten"]
    assert forgotten == ["older", "newer", "name-0", "name-1"]
    bench.restart()
    assert set(bench.machine.jobs) == {"data", "saved", "live", "name-2", "name-3"}


def test_jobs_that_give_way_are_looked_for_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_module, "JOBS_LIMIT", 400)
    monkeypatch.setattr(machine_module, "JOBS_FORGOTTEN", 40)
    monkeypatch.setattr(machine_module, "JOBS_LOOKED_AT", 40)
    bench, looks = Bench(checked=False), 0
    is_forgettable = vars(machine_module.Job)["is_forgettable"].fget
    assert is_forgettable is not None

    def count(job: machine_module.Job) -> bool:
        nonlocal looks
        looks += 1
        return is_forgettable(job)

    def new_name(number: int) -> int:
        before, bench.now = looks, bench.now + 1.0
        bench.leave(bench.register(job=f"name-{number}"))
        return looks - before

    monkeypatch.setattr(machine_module.Job, "is_forgettable", property(count))
    most = max(new_name(number) for number in range(1000))
    assert most <= 40 + 10
    forgotten = [event.job for event in bench.events if event.kind == "job.forgotten"]
    assert forgotten == [f"name-{number}" for number in range(600)]


def test_refused_registration_forgets_no_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "JOBS_LIMIT", 1)
    bench.leave(bench.register(job="old"))
    assert refusal(bench.register, job="new", world_size=2, rank=2).reason == "invalid"
    assert set(bench.machine.jobs) == {"old"}


def test_elastic_world_is_full_at_the_greatest_number_of_workers(bench: Bench) -> None:
    bench.machine = Machine(TIMEOUT, max_workers=2)
    a, _ = bench.elastic(2)
    refused = refusal(bench.register)
    assert refused.reason == "job_full"
    assert refused.retry_after
    bench.leave(a)
    assert bench.register().rank == 0


def test_dataset_registered_again_is_a_no_op_and_another_one_a_conflict(bench: Bench) -> None:
    first = bench.apply(c.RegisterDataset(JOB, "data", 1000, 300))
    assert first == c.DatasetRegistered("data", 4, created=True)
    bench.restart()
    again = bench.apply(c.RegisterDataset(JOB, "data", 1000, 300))
    assert again == c.DatasetRegistered("data", 4, created=False)
    refused = refusal(bench.apply, c.RegisterDataset(JOB, "data", 1000, 200))
    assert refused.reason == "dataset_conflict"
    assert "shard_size: registered 300, given 200" in str(refused)


def test_dataset_alone_makes_a_job_that_workers_join_later(bench: Bench) -> None:
    bench.apply(c.RegisterDataset(JOB, "data", 1000, 10))
    assert bench.rows["job", JOB, ""] == JobRecord(0, 0, 0, 1, created_at=bench.now)
    bench.restart()
    assert bench.register(world_size=2).incarnation == 1


def shards_for(
    datasets: Datasets, dataset_id: str, rank: int, epoch: int, world_hint: int = 0
) -> list[int]:
    dataset, view = datasets.shared(dataset_id, rank, world_hint)
    return [int(shard) for shard in dataset.order(rank, epoch, view)]


def test_shards_follow_the_membership(bench: Bench) -> None:
    bench.apply(c.RegisterDataset(JOB, "data", 1000, 10))
    datasets = bench.job.datasets
    assert len(shards_for(datasets, "data", 0, 0, world_hint=4)) == 25
    a, b = bench.world(2)
    bench.beat(a, b)
    before = shards_for(datasets, "data", 0, 0)
    assert len(before) == 50
    bench.leave(b)
    assert len(shards_for(datasets, "data", 0, 0)) == 100
    assert refusal(shards_for, datasets, "data", 1, 0).reason == "unknown_rank"
    bench.register()
    assert shards_for(datasets, "data", 0, 0) == before


@pytest.mark.parametrize(("samples", "size"), [(10, 0), (0, 1), (10**12, 1)])
def test_impossible_datasets_are_invalid(bench: Bench, samples: int, size: int) -> None:
    refused = refusal(bench.apply, c.RegisterDataset(JOB, "data", samples, size))
    assert refused.reason == "invalid"
    assert JOB not in bench.machine.jobs


def test_datasets_are_limited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets_module, "DATASETS_LIMIT", 1)
    bench.apply(c.RegisterDataset(JOB, "one", 10, 1))
    refused = refusal(bench.apply, c.RegisterDataset(JOB, "two", 10, 1))
    assert refused.reason == "too_many_datasets"


def test_dealing_is_kept_for_a_bounded_number_of_shards() -> None:
    dealt = AssignmentCache(limit=10_000)
    datasets = [
        Dataset(DatasetRecord(f"d-{n}", "", "", 4000, 1, shuffle=True, seed=n), cache=dealt)
        for n in range(5)
    ]
    first = datasets[0].owners((4, frozenset())).tolist()
    for dataset in datasets:
        dataset.owners((4, frozenset()))
        assert dealt.shards <= 10_000
    assert len(dealt) == 2
    assert not datasets[0]._table._recent, "the one asked for least recently gave way"
    assert datasets[0].owners((4, frozenset())).tolist() == first, "and is dealt the same again"


def test_orders_of_many_epochs_are_not_all_kept() -> None:
    dataset = Dataset(DatasetRecord("d", "", "", 1000, 1, shuffle=True, seed=0))
    view = (1, frozenset[int]())
    first = dataset.order(0, 0, view).tolist()
    for epoch in range(100):
        dataset.order(0, epoch, view)
        assert sum(map(len, dataset._orders.values())) <= 3000
    assert dataset.order(0, 0, view).tolist() == first


def allocated(make: Callable[[], object]) -> int:
    """How many bytes are kept of what is made."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept is not None
    return size


def test_ranks_that_nobody_holds_take_no_memory() -> None:
    def world() -> Bench:
        bench = Bench(checked=False)
        bench.register(world_size=65_536)
        return bench

    def barriers() -> Bench:
        bench = Bench(checked=False)
        member = bench.register(world_size=65_536)
        for number in range(100):
            bench.arrive(member, f"b-{number}")
        assert len(bench.job.barriers.open) == 100
        return bench

    allocated(world)  # what is made once
    assert allocated(world) < 60_000
    assert allocated(barriers) < 100 * 20_000
