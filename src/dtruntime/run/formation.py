"""Formation: how the workers of a crew get into the same state before they train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
from ..types import VALUE_BYTES, CheckpointInfo
from .crew import Crew, CrewMembership, has_lost
from .run_checkpoints import CheckpointLocation, RunCheckpoints
from .streams import Stream

if TYPE_CHECKING:
    from .pytorch.gradients import Gradients
    from .pytorch.process_group import ProcessGroup

log = EventLog("run")

_DAMAGED = b"damaged "


@dataclass(slots=True)
class Formation:
    """Forms crews, each of which begins with the newest good checkpoint."""

    membership: CrewMembership
    worker: TrainingOrchestrator | None
    stream: Stream
    saves: RunCheckpoints
    location: CheckpointLocation | None
    group: ProcessGroup | None
    gradients: Gradients | None

    def __post_init__(self) -> None:
        if self.worker is not None and self.group is not None:
            self.worker.on_heartbeat(partial(interrupt_after_loss, self.worker, self.group))

    def assemble(self) -> Crew:
        """Form a crew, and put all its workers into the same state."""
        while True:
            crew = self.membership.assemble()
            try:
                self._agree_on_state(crew)
            except SyncError as exc:
                log.warning("run.assembling_again", reason=str(exc))
                self.break_up()
                continue
            self.membership.begin(crew)
            if self.group is not None and self.worker is not None:
                self.group.crew = crew
                interrupt_after_loss(self.worker, self.group)  # one heard of since
            return crew

    def break_up(self) -> None:
        """Stop reading, end collectives, and give up saves that others will not complete."""
        if self.group is not None:
            self.group.interrupt()
        self.disband()
        self.saves.drain(self._abandon)

    def disband(self) -> None:
        """Stop reading, and leave the process group."""
        if self.gradients is not None:
            self.gradients.end()
        if self.group is not None:
            self.group.leave()
        self.stream.close()

    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew is gone."""
        return self.membership.has_lost(crew)

    def _agree_on_state(self, crew: Crew) -> None:
        if self.gradients is not None:
            self.gradients.check(crew.size)
        if self.location is not None:
            self.location.check(crew, self.membership)
        self.stream.open(crew)
        if self._restore(crew) is None:
            self._start_from_scratch(crew)
        if self.group is not None and crew.size > 1:
            self._form_group(crew, self.group)
        if self.gradients is not None:
            self.gradients.begin(crew)

    def _form_group(self, crew: Crew, group: ProcessGroup) -> None:
        """Make a process group, on all ranks or on none.

        A worker that dies meanwhile leaves some ranks with a group and others without. So each
        tells the others what became of its group, and this fails on all ranks if one was lost.
        """
        offers = self.membership.share("address", group.offer(crew), crew)
        forming, reason = group.form(crew, offers), ""
        try:
            self.membership.wait_with(crew, forming, group.timeout_seconds)
        except StrataError:
            raise
        except (RuntimeError, OSError, ValueError) as exc:
            reason = f"{type(exc).__name__}: {exc}"
            log.warning("run.group_not_formed", reason=reason)
        reasons = self.membership.share("formed", reason.encode()[:VALUE_BYTES], crew)
        if failed := {rank: why.decode(errors="replace") for rank, why in reasons.items() if why}:
            raise StrataError(
                f"torch's process group could not be formed, and no worker was lost; by rank: "
                f"{failed}. Workers have to reach each other over TCP: look at firewalls, and name "
                "the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            )
        group.settle()

    def _restore(self, crew: Crew) -> CheckpointInfo | None:
        """Restore the newest checkpoint that every rank can read; None if there is none."""
        damaged: set[str] = set()
        while True:
            candidates = (i for i in self.saves.all() if i.checkpoint_id not in damaged)
            latest = next(candidates, None)
            if latest is None and damaged:
                raise StrataError(
                    f"every checkpoint is damaged ({', '.join(sorted(damaged))}): 'strata "
                    "checkpoints verify' says where; to start afresh, use another folder"
                )
            answer = b"none" if latest is None else self._try(crew, latest)
            answers = set(self.membership.share("restored", answer, crew).values())
            if answers == {answer} and not answer.startswith(_DAMAGED):
                return latest
            bad = [a.removeprefix(_DAMAGED).decode() for a in answers if a.startswith(_DAMAGED)]
            damaged.update(bad)

    def _try(self, crew: Crew, info: CheckpointInfo) -> bytes:
        try:
            self.saves.restore(crew, info)
        except CheckpointDamagedError as exc:
            log.error("run.checkpoint_damaged", checkpoint=info.checkpoint_id, reason=str(exc))
            return _DAMAGED + info.checkpoint_id.encode()
        return info.checkpoint_id.encode()

    def _start_from_scratch(self, crew: Crew) -> None:
        """Save the state before the first step, and start everybody with the first rank's."""
        try:
            self.saves.save(crew, 0).wait()
        except CheckpointAbortedError as exc:
            raise SyncError(str(exc), reason="membership_changed") from exc
        self.membership.share("begun", b"", crew)
        latest = self.saves.latest()
        assert latest is not None
        self.saves.share(crew, latest)

    def _abandon(self) -> None:
        worker = self.worker
        if worker is not None and worker.is_registered:
            try:
                worker.abandon_checkpoints()
            except (SyncError, ConnectionError) as exc:
                log.info("run.not_abandoned", reason=str(exc))


def interrupt_after_loss(worker: TrainingOrchestrator, group: ProcessGroup) -> None:
    """End the collectives of a crew that has lost a worker; after heartbeats, on the I/O thread."""
    if group.crew is not None and has_lost(worker, group.crew):
        group.interrupt()
