"""What follows from a roll call: a crew, a wait, or another roll call."""

from dtruntime.client.orchestrator import Meeting
from dtruntime.run.crew import Formed, Rendezvous, Waits
from dtruntime.run.recovery import Recovery

PATIENT = Recovery(wait_seconds=60)


def roll(world_size: int = 3, recovery: Recovery = PATIENT, now: float = 0.0) -> Rendezvous:
    return Rendezvous(world_size, recovery, now)


def call(*workers: Rendezvous, now: float = 0.0, generation: int = 1, left_out: int = 0) -> Meeting:
    values = {rank: worker.bring(now) for rank, worker in enumerate(workers)}
    return Meeting(values, generation, left_out)


def crew(count: int = 3, recovery: Recovery = PATIENT, world_size: int = 3) -> list[Rendezvous]:
    """Workers that train together since generation 1."""
    workers = [roll(world_size, recovery) for _ in range(count)]
    called = call(*workers)
    assert all(isinstance(worker.conclude(called), Formed) for worker in workers)
    for worker in workers:
        worker.begin(count)
    return workers


def test_all_who_are_wanted_form_a_crew():
    assert roll().conclude(call(roll(), roll(), roll())) == Formed((0, 1, 2), 1, 3)


def test_roll_is_called_again_when_a_live_member_was_not_there():
    workers = [roll(), roll(), roll()]
    assert workers[0].conclude(call(*workers, left_out=1)) is None


def test_loss_is_waited_for_once():
    first, second, _ = crew()
    for worker in (first, second):
        worker.hear({2}, now=100.0)
    assert first.conclude(call(first, second, now=110.0, generation=2)) == Waits(3, 50.0)
    for worker in (first, second):
        worker.hear({2}, now=161.0)
    called = call(first, second, now=161.0, generation=2)
    assert first.conclude(called) == second.conclude(called) == Formed((0, 1), 2, 3)


def test_further_loss_is_waited_for_too():
    first, second, _ = crew()
    first.hear({2}, now=100.0)
    first.hear({1, 2}, now=150.0)
    assert first.conclude(call(first, second, now=150.0, generation=4)) == Waits(3, 60.0)


def test_crew_that_was_not_yet_training_misses_nobody_of_it():
    """A newcomer that is lost while the crew forms was met at the roll call, and that is all."""
    first, second = crew(2, world_size=0)
    newcomer = roll(0)
    called = call(first, second, newcomer, generation=2)
    assert first.conclude(called) == Formed((0, 1, 2), 2, 2)
    assert first.conclude(call(first, second, now=1.0, generation=3)) == Formed((0, 1), 3, 2)


def test_newcomer_learns_which_failures_the_others_have_seen():
    first, second, third = crew()
    called = Meeting({0: first.bring(0, [40, 7]), 1: second.bring(0, [7]), 2: third.bring(0)}, 2, 0)
    concluded = third.conclude(called)
    assert isinstance(concluded, Formed)
    assert concluded.failures == (40, 7)


def test_newcomer_leaves_it_to_the_crew_how_long_to_wait():
    """Its loss was waited for already: nobody waits because one of two has come back."""
    first, _, _ = crew()
    first.hear({1, 2}, now=100.0)
    assert isinstance(first.conclude(call(first, now=200.0, generation=3)), Formed)
    first.begin(1)
    newcomer = roll(now=300.0)
    newcomer.hear({1, 2}, now=300.0)
    called = call(first, newcomer, now=300.0, generation=4)
    assert first.conclude(called) == newcomer.conclude(called) == Formed((0, 1), 4, 3)


def test_newcomer_without_a_crew_waits_for_the_others():
    newcomer = roll(now=300.0)
    newcomer.hear({1, 2}, now=300.0)
    assert newcomer.conclude(call(newcomer, now=300.0)) == Waits(3, 60.0)


def test_fewer_than_the_least_wait_however_long_it_takes():
    recovery = Recovery(wait_seconds=0, min_workers=2)
    first, second = crew(2, recovery, world_size=0)
    first.hear({1}, now=10.0)
    assert first.conclude(call(first, now=10.0, generation=2)) == Waits(2, None)
    assert isinstance(first.conclude(call(first, second, now=99.0, generation=2)), Formed)


def test_elastic_crew_that_went_on_smaller_does_not_miss_anybody():
    recovery = Recovery(wait_seconds=5)
    first, second, _ = crew(3, recovery, world_size=0)
    for worker in (first, second):
        worker.hear({2}, now=10.0)
    called = call(first, second, now=16.0, generation=2)
    assert first.conclude(called) == Formed((0, 1), 2, 3)
    first.begin(2)
    assert first.wanted == 2


def test_loss_in_the_next_crew_is_waited_for_again():
    first, second, _ = crew()
    first.hear({2}, now=10.0)
    assert isinstance(first.conclude(call(first, second, now=100.0, generation=41)), Formed)
    first.begin(2)
    first.hear({2}, now=200.0)
    assert first.conclude(call(first, second, now=200.0, generation=2)) == Waits(3, 60.0)
