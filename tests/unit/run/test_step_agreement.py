"""The gate of a training loop: agreeing on a step without a message per step."""

import random
import threading
import time

import pytest

from dtruntime.run.step_agreement import StepGate
from dtruntime.types import Action

SAVE = Action("a-1", "checkpoint")


def test_action_is_due_after_the_step_agreed_on_and_never_again():
    gate = StepGate()
    gate.reset(10)
    passed, era = gate.close()
    assert passed == 10
    gate.open(SAVE, 12, era)
    assert gate.pass_step() == []
    assert gate.pass_step() == [SAVE]
    assert gate.pass_step() == []
    assert gate.step == 13


def test_nobody_passes_while_it_is_closed():
    gate = StepGate()
    _, era = gate.close()
    passed = threading.Event()

    def pass_a_step() -> None:
        gate.pass_step()
        passed.set()

    loop = threading.Thread(target=pass_a_step)
    loop.start()
    assert not passed.wait(0.05)
    gate.open(SAVE, None, era)
    assert passed.wait(60)
    loop.join()


def test_what_was_agreed_on_before_a_rollback_is_void():
    gate = StepGate()
    _, era = gate.close()
    gate.reset(0)
    gate.open(SAVE, 1, era)
    assert gate.pass_step() == []
    assert not gate.knows(SAVE)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_in_lockstep_agree_whenever_they_hear_of_it(seed):
    """Ranks wait for each other in every step, hear of the action at random times, and all act
    after the same step: nobody has passed it, and nobody waits for ever."""
    rng = random.Random(seed)
    ranks = 4
    gates = [StepGate() for _ in range(ranks)]
    collective = threading.Barrier(ranks, timeout=60)
    together = threading.Barrier(ranks, timeout=60)
    steps: list[int] = []
    lock = threading.Lock()
    values: list[int] = [0] * ranks
    delays = [rng.random() * 0.02 for _ in range(ranks)]

    def train(rank: int) -> None:
        left = 100_000
        while left:
            left -= 1
            collective.wait()
            if gates[rank].pass_step():
                with lock:
                    steps.append(gates[rank].step)
                left = 20  # in which nobody acts again

    def hear(rank: int) -> None:
        time.sleep(delays[rank])
        passed, era = gates[rank].close()
        values[rank] = passed
        together.wait()
        gates[rank].open(SAVE, max(values) + 1, era)

    threads = [threading.Thread(target=f, args=(r,)) for r in range(ranks) for f in (train, hear)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(steps) == ranks, f"seed {seed}: {steps}"
    assert len(set(steps)) == 1, f"seed {seed}: {steps}"
