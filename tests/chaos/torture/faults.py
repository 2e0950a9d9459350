"""What is done to a run, by kind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtruntime.client.observer import Observer
from dtruntime.errors import StrataError

from .crew import Worker
from .forming import FORMING
from .plan import Fault

if TYPE_CHECKING:
    from .rounds import Round


@dataclass(eq=False)
class Outage:
    """A fault, and when the run had got over it."""

    kind: str
    at: float
    crew: int
    """The crew that was hit."""
    over_at: float | None = None
    """When its cause was gone; None while it lasts. What comes with another crew needs none."""
    needs_crew: bool = False
    """Whether training goes on with another crew only."""
    replacement: Worker | None = None
    victim: Worker | None = None
    seconds: float | None = None
    """Until training went on; None: it did not before the end."""
    after_seconds: float | None = None
    """What of that came after its cause was gone, where that can be said."""
    startup: float | None = None
    """What the replacement's own start took of that."""
    is_simple: bool = False
    """Whether one worker was killed and replaced at once, and nothing else happened."""

    def heal(self, entry_at: float, crew: int) -> bool:
        """Whether a step shows that it is over."""
        if self.needs_crew:
            return crew > self.crew and entry_at > self.at
        return self.over_at is not None and entry_at > self.over_at


def apply(fault: Fault, round_: Round) -> None:
    """Do it."""
    _KINDS[fault.kind](fault, round_)


def _victims(fault: Fault, round_: Round, count: int) -> list[Worker]:
    found = round_.crew.victims
    first = int(fault.draw * len(found))
    return (found[first:] + found[:first])[:count]


def _kill(fault: Fault, round_: Round, count: int) -> None:
    victims = _victims(fault, round_, count)
    if not victims:
        return
    outage = round_.open_outage(fault.kind, needs_crew=True)
    outage.victim = victims[0]
    outage.is_simple = fault.kind == "kill one" and fault.restart_seconds == 0
    for worker in victims:
        round_.crew.kill(worker, fault.restart_seconds)


def kill_one(fault: Fault, round_: Round) -> None:
    _kill(fault, round_, 1)


def kill_some(fault: Fault, round_: Round) -> None:
    _kill(fault, round_, 2)


def kill_all(fault: Fault, round_: Round) -> None:
    _kill(fault, round_, round_.plan.world)


def kill_in_forming(fault: Fault, round_: Round) -> None:
    """Kill one, and whoever comes first to a point of the forming that follows."""
    _kill(fault, round_, 1)
    round_.crew.die_at(FORMING[int(fault.draw * len(FORMING))], fault.restart_seconds)


def pause(fault: Fault, round_: Round) -> None:
    """Shorter than the heartbeat timeout: nobody should be lost."""
    for worker in _victims(fault, round_, 1):
        outage = round_.open_outage(fault.kind)
        _stop(worker, fault.seconds, round_, outage)


def ghost(fault: Fault, round_: Round) -> None:
    """Longer than the timeout: another one takes its place, or it comes back itself."""
    for worker in _victims(fault, round_, 1):
        outage = round_.open_outage(fault.kind, needs_crew=True)
        if fault.draw < 0.7:
            round_.crew.replace(worker, fault.restart_seconds)
        _stop(worker, fault.seconds, round_, outage)


def _stop(worker: Worker, seconds: float, round_: Round, outage: Outage) -> None:
    worker.is_paused = True
    worker.send(signal.SIGSTOP)

    def resume() -> None:
        worker.send(signal.SIGCONT)
        worker.is_paused = False
        outage.over_at = time.monotonic()

    round_.later(seconds, resume)


def preempt(fault: Fault, round_: Round) -> None:
    _preempt(fault, round_, 1)


def preempt_all(fault: Fault, round_: Round) -> None:
    _preempt(fault, round_, round_.plan.world)


def _preempt(fault: Fault, round_: Round, count: int) -> None:
    for number, worker in enumerate(_victims(fault, round_, count)):
        if not number:
            round_.open_outage(fault.kind, needs_crew=True)
        # Before it listens, and after it was told once, SIGTERM just ends it.
        worker.was_killed |= worker.was_told or worker.process.pid not in round_.traces.up
        worker.was_told = True
        worker.restart_seconds = fault.restart_seconds
        worker.send(signal.SIGTERM)


def kill_coordinator(fault: Fault, round_: Round) -> None:
    _kill_coordinator(fault, round_)


def kill_coordinator_and_one(fault: Fault, round_: Round) -> None:
    for worker in _victims(fault, round_, 1):
        round_.open_outage(fault.kind, needs_crew=True)
        round_.crew.kill(worker, fault.restart_seconds)
    _kill_coordinator(fault, round_)


def _kill_coordinator(fault: Fault, round_: Round) -> None:
    if round_.coordinator_is_away:
        return
    outage = round_.open_outage("kill coordinator")
    round_.coordinator_is_away = True
    round_.coordinator.kill()

    def start() -> None:
        round_.coordinator.start()
        round_.coordinator_is_away = False
        outage.over_at = time.monotonic()

    round_.later(fault.seconds, lambda: round_.in_background(start))


def pause_coordinator(fault: Fault, round_: Round) -> None:
    if round_.coordinator_is_away:
        return
    outage = round_.open_outage(fault.kind)
    round_.coordinator_is_away = True
    round_.coordinator.send_signal(signal.SIGSTOP)

    def resume() -> None:
        round_.coordinator.send_signal(signal.SIGCONT)
        round_.coordinator_is_away = False
        outage.over_at = time.monotonic()

    round_.later(fault.seconds, resume)


def cut(fault: Fault, round_: Round) -> None:
    outage = round_.open_outage(fault.kind)
    round_.network("cut")
    outage.over_at = time.monotonic()


def _network(command: str) -> Callable[[Fault, Round], None]:
    def do(fault: Fault, round_: Round) -> None:
        outage = round_.open_outage(fault.kind)
        round_.network(command.format(min(0.3, fault.draw)))

        def heal() -> None:
            round_.network("heal")
            outage.over_at = time.monotonic()

        round_.later(fault.seconds, heal)

    return do


def request_checkpoint(fault: Fault, round_: Round) -> None:
    def ask() -> None:
        try:
            with Observer(round_.coordinator.url) as observer:
                observer.request_action(round_.job, "checkpoint", "", "chaos")
        except StrataError:
            round_.count("request refused")

    round_.in_background(ask)


def fill_disk(fault: Fault, round_: Round) -> None:
    assert round_.disk is not None
    round_.storage_failed = True
    round_.disk.fill()
    round_.later(fault.seconds, round_.disk.free)


def break_s3(fault: Fault, round_: Round) -> None:
    round_.storage_failed = True
    rate = 1.0 if fault.draw < 0.15 else 0.1 + 0.5 * fault.draw
    round_.network(f"s3 {rate:.2f}")
    round_.later(fault.seconds, lambda: round_.network("s3 0"))


_KINDS: dict[str, Callable[[Fault, Round], None]] = {
    "kill one": kill_one,
    "kill some": kill_some,
    "kill all": kill_all,
    "kill in forming": kill_in_forming,
    "pause": pause,
    "ghost": ghost,
    "preempt": preempt,
    "preempt all": preempt_all,
    "kill coordinator": kill_coordinator,
    "kill coordinator and one": kill_coordinator_and_one,
    "pause coordinator": pause_coordinator,
    "cut": cut,
    "refuse": _network("refuse"),
    "delay": _network("delay {:.2f}"),
    "silence": _network("silence"),
    "request checkpoint": request_checkpoint,
    "fill disk": fill_disk,
    "break s3": break_s3,
}
