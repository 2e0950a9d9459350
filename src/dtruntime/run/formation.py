"""How the workers of a run come together and get into the same state."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ..client import TrainingOrchestrator
from ..errors import (
    CheckpointAbortedError,
    CheckpointDamagedError,
    ConnectionError,
    StrataError,
    SyncError,
)
from ..telemetry import EventLog
from ..types import VALUE_BYTES, CheckpointInfo, WorkerState
from .crew import Crew, CrewMembership
from .recovery import Recovery
from .run_checkpoints import CheckpointLocation, RunCheckpoints
from .streams import Stream

if TYPE_CHECKING:
    from .pytorch.gradients import Gradients
    from .pytorch.process_group import ProcessGroup

log = EventLog("run")

_DAMAGED = b"damaged "


class Formation:
    """Forms crews, each of which begins with the newest good checkpoint."""

    def __init__(
        self,
        membership: CrewMembership,
        worker: TrainingOrchestrator | None,
        stream: Stream,
        saves: RunCheckpoints,
        places: CheckpointLocation | None,
        group: ProcessGroup | None,
        gradients: Gradients | None,
    ) -> None:
        self._membership = membership
        self._worker = worker
        self._stream = stream
        self._saves = saves
        self._places = places
        self._group = group
        self._gradients = gradients
        self._crew: Crew | None = None
        if worker is not None and group is not None:
            worker.on_heartbeat(self._heard)

    def assemble(self) -> Crew:
        """Form a crew and put everybody into the same state."""
        while True:
            crew = self._membership.assemble()
            try:
                self._agree_on_state(crew)
            except SyncError as exc:
                log.warning("run.assembling_again", reason=str(exc))
                self.break_up()
                continue
            self._membership.begin(crew)
            self._crew = crew
            self._heard()  # what was told before there was somebody to wake
            return crew

    def break_up(self) -> None:
        """Stop reading, end collectives, and give up saves that others will not complete."""
        if self._group is not None:
            self._group.interrupt()
        self.disband()
        self._saves.drain(self._abandon)

    def disband(self) -> None:
        """Stop reading, and leave the process group."""
        self._crew = None
        if self._gradients is not None:
            self._gradients.end()
        if self._group is not None:
            self._group.leave()
        self._stream.close()

    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew is gone."""
        return self._membership.has_lost(crew)

    def _heard(self) -> None:
        """Wake a training loop that waits for somebody who is gone; mostly on the I/O thread."""
        crew = self._crew
        if crew is not None and self._group is not None and self._membership.has_lost(crew):
            self._group.interrupt()

    def _agree_on_state(self, crew: Crew) -> None:
        if self._gradients is not None:
            self._gradients.check(crew.size)
        if self._places is not None:
            self._places.check(crew, self._membership)
        self._stream.open(crew)
        latest = self._restore(crew)
        if latest is None:
            self._begin_from_nothing(crew)
        if self._group is not None and crew.size > 1:
            self._form_group(crew, self._group)
        if self._gradients is not None:
            self._gradients.begin(crew)

    def _form_group(self, crew: Crew, group: ProcessGroup) -> None:
        """Make a process group, which all have or nobody.

        One that is gone leaves some ranks with a group and others without. So each says what became
        of it, and this fails in all when a worker is lost before.
        """
        offers = self._membership.share("address", group.offer(crew), crew)
        forming, reason = group.form(crew, offers), ""
        try:
            self._membership.wait_with(crew, forming, group.timeout_seconds)
        except StrataError:
            raise
        except (RuntimeError, OSError, ValueError) as exc:
            reason = f"{type(exc).__name__}: {exc}"
            log.warning("run.group_not_formed", reason=reason)
        told = self._membership.share("formed", reason.encode()[:VALUE_BYTES], crew)
        if failed := {rank: why.decode(errors="replace") for rank, why in told.items() if why}:
            raise StrataError(
                f"torch's process group could not be formed, and no worker was lost; by rank: "
                f"{failed}. Workers have to reach each other over TCP: look at firewalls, and name "
                "the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            )
        group.settle()

    def _restore(self, crew: Crew) -> CheckpointInfo | None:
        """Restore the newest checkpoint that is good on all ranks; ``None`` when there is none."""
        damaged: set[str] = set()
        while True:
            candidates = (i for i in self._saves.all() if i.checkpoint_id not in damaged)
            latest = next(candidates, None)
            if latest is None and damaged:
                raise StrataError(
                    f"every checkpoint is damaged ({', '.join(sorted(damaged))}): 'strata "
                    "checkpoints verify' says where; to start afresh, use another folder"
                )
            answer = b"none" if latest is None else self._try(crew, latest)
            answers = set(self._membership.share("restored", answer, crew).values())
            if answers == {answer} and not answer.startswith(_DAMAGED):
                return latest
            bad = [a.removeprefix(_DAMAGED).decode() for a in answers if a.startswith(_DAMAGED)]
            damaged.update(bad)

    def _try(self, crew: Crew, info: CheckpointInfo) -> bytes:
        try:
            self._saves.restore(crew, info)
        except CheckpointDamagedError as exc:
            log.error("run.checkpoint_damaged", checkpoint=info.checkpoint_id, reason=str(exc))
            return _DAMAGED + info.checkpoint_id.encode()
        return info.checkpoint_id.encode()

    def _begin_from_nothing(self, crew: Crew) -> None:
        """Save the state before the first step, and let everybody begin with the first rank's."""
        try:
            self._saves.save(crew, 0).wait()
        except CheckpointAbortedError as exc:
            raise SyncError(str(exc), reason="membership_changed") from exc
        self._membership.share("begun", b"", crew)
        latest = self._saves.latest()
        assert latest is not None
        self._saves.share(crew, latest)

    def _abandon(self) -> None:
        worker = self._worker
        if worker is not None and worker.is_registered:
            try:
                worker.abandon_checkpoints()
            except (SyncError, ConnectionError) as exc:
                log.info("run.not_abandoned", reason=str(exc))


LOOK_SECONDS = 0.1
BRIEF = 240


def brief(error: BaseException) -> str:
    """An error in a log: libraries add pages of advice to what went wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= BRIEF else text[:BRIEF] + '...'}"


class LossDetector:
    """What this worker is told about those that were lost."""

    def __init__(
        self, worker: TrainingOrchestrator | None, recovery: Recovery, *, makes_group: bool
    ) -> None:
        """``makes_group``: the run makes torch's process group, and can make it anew."""
        self._worker = worker
        self._recovery = recovery
        self._makes_group = makes_group

    def explain(self, error: Exception, step: int, crew: Crew, formation: Formation) -> bool:
        """Whether a worker was lost, so that an error is its consequence; waits to be told."""
        worker = self._worker
        if worker is None or self._has_foreign_group():
            return False
        if crew.size == 1 and worker.is_registered:
            return False
        seconds = self._recovery.detects_within(worker.heartbeat_timeout_seconds)
        wait = f"up to {seconds:g} s, in case a worker was lost"
        log.warning("run.step_failed", step=step, error=brief(error), waits=wait)
        worker.report(state=WorkerState.RECOVERING)
        deadline = time.monotonic() + seconds
        while not formation.has_lost(crew):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
            try:
                worker.beat()
            except (SyncError, ConnectionError) as exc:
                log.info("run.not_told", reason=str(exc))
        return True

    def check_group(self) -> None:
        """Raise when only a restart of all processes can help."""
        worker = self._worker
        if worker is not None and self._has_foreign_group():
            raise SyncError(
                "a worker was lost, left or came, and only a restart of all workers can mend a "
                "process group that the run did not make: this process ends, so that its launcher "
                "restarts all of them; the run then resumes from its last checkpoint",
                reason="membership_changed",
                generation=worker.generation,
            )

    def _has_foreign_group(self) -> bool:
        """Whether the process has a process group of torch that is not the run's."""
        if self._makes_group or "torch.distributed" not in sys.modules:
            return False
        from .pytorch.process_group import is_initialized

        return is_initialized()
