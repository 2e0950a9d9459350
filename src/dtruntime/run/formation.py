"""Formation: how the workers of a crew get into the same state before they train."""

from __future__ import annotations

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


class Formation:
    """Forms crews, each of which begins with the newest good checkpoint."""

    def __init__(
        self,
        membership: CrewMembership,
        worker: TrainingOrchestrator | None,
        stream: Stream,
        saves: RunCheckpoints,
        location: CheckpointLocation | None,
        group: ProcessGroup | None,
        gradients: Gradients | None,
    ) -> None:
        self._membership = membership
        self._worker = worker
        self._stream = stream
        self._saves = saves
        self._location = location
        self._group = group
        self._gradients = gradients
        if worker is not None and group is not None:
            worker.on_heartbeat(partial(interrupt_after_loss, worker, group))

    def assemble(self) -> Crew:
        """Form a crew, and put all its workers into the same state."""
        while True:
            crew = self._membership.assemble()
            try:
                self._agree_on_state(crew)
            except SyncError as exc:
                log.warning("run.assembling_again", reason=str(exc))
                self.break_up()
                continue
            self._membership.begin(crew)
            if self._group is not None and self._worker is not None:
                self._group.crew = crew
                interrupt_after_loss(self._worker, self._group)  # one heard of since
            return crew

    def break_up(self) -> None:
        """Stop reading, end collectives, and give up saves that others will not complete."""
        if self._group is not None:
            self._group.interrupt()
        self.disband()
        self._saves.drain(self._abandon)

    def disband(self) -> None:
        """Stop reading, and leave the process group."""
        if self._gradients is not None:
            self._gradients.end()
        if self._group is not None:
            self._group.leave()
        self._stream.close()

    def has_lost(self, crew: Crew) -> bool:
        """Whether one of a crew is gone."""
        return self._membership.has_lost(crew)

    def _agree_on_state(self, crew: Crew) -> None:
        if self._gradients is not None:
            self._gradients.check(crew.size)
        if self._location is not None:
            self._location.check(crew, self._membership)
        self._stream.open(crew)
        if self._restore(crew) is None:
            self._start_from_scratch(crew)
        if self._group is not None and crew.size > 1:
            self._form_group(crew, self._group)
        if self._gradients is not None:
            self._gradients.begin(crew)

    def _form_group(self, crew: Crew, group: ProcessGroup) -> None:
        """Make a process group, on all ranks or on none.

        A worker that dies meanwhile leaves some ranks with a group and others without. So each
        tells the others what became of its group, and this fails on all ranks if one was lost.
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
        reasons = self._membership.share("formed", reason.encode()[:VALUE_BYTES], crew)
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

    def _start_from_scratch(self, crew: Crew) -> None:
        """Save the state before the first step, and start everybody with the first rank's."""
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


def interrupt_after_loss(worker: TrainingOrchestrator, group: ProcessGroup) -> None:
    """End the collectives of a crew that has lost a worker; after heartbeats, on the I/O thread."""
    if group.crew is not None and has_lost(worker, group.crew):
        group.interrupt()
