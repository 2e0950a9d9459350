"""Whether all workers of a run save into the same place.

A folder may be another one on each machine: a volume that is not mounted, a path with a typing
error, a local disk. Each place has an identity, a file that is made once. Workers compare them when
they come together, and the coordinator's record of the last checkpoint says which place is right.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from .._sync_bridge import io
from ..checkpoint import CheckpointManager
from ..client import TrainingOrchestrator
from ..errors import ConfigError, SyncError
from ..retention import FINISHED_KEY, IDENTITY_KEY, PLACE_KEY
from ..telemetry import EventLog
from ..types import CheckpointInfo
from .crew import Crew, CrewMembership
from .preemption import PreemptionNotices

log = EventLog("run")

_SHOWN = 8
_REMEDY = (
    "Is the volume mounted, and the path right? All workers of a run need the same place: a folder "
    "on a volume that all of them see, or a URL such as s3://bucket/run"
)


@dataclass(frozen=True, slots=True)
class LocationNote:
    """What a worker tells the others of its place."""

    identity: str
    location: str
    host: str
    has_checkpoints: bool
    known: str
    """The identity of the place that the job's last checkpoint is in; empty: nobody knows."""

    def describe(self, rank: int) -> str:
        """For messages."""
        return f"{self.location} (rank {rank} on {self.host})"


class CheckpointLocation:
    """This worker's place, held against that of the others."""

    def __init__(
        self, manager: CheckpointManager, worker: TrainingOrchestrator, notices: PreemptionNotices
    ) -> None:
        self._manager = manager
        self._worker = worker
        self._notices = notices
        self.identity = manager.engine.main.identity()

    def check_record(self) -> None:
        """``ConfigError`` when the job's last checkpoint is elsewhere; before it is a member.

        Whoever began anew here would go over what was trained there.
        """
        latest = self._latest(self._worker.config.registration_seconds)
        if latest is None or _place_of(latest) in ("", self.identity):
            return
        if any(one.checkpoint_id == latest.checkpoint_id for one in self._manager.checkpoints()):
            return  # moved, and the file with its identity left behind
        here = self._manager.engine.main.backend.location()
        there = latest.metadata.get(PLACE_KEY) or latest.path
        if FINISHED_KEY in latest.metadata:
            log.warning("run.begins_elsewhere", place=here, finished=there, step=latest.step)
            return
        raise ConfigError(
            f"{here} on {socket.gethostname()} is another place than that of job "
            f"{self._worker.job!r}, whose last checkpoint, of step {latest.step}, is in "
            f"{there}. {_REMEDY}. If this is meant to be another run, give it another job "
            "(job= or STRATA_JOB)"
        )

    def check(self, crew: Crew, membership: CrewMembership) -> None:
        """Compare places with the crew.

        ``ConfigError`` when this worker has to leave, and ``SyncError`` when others have to.
        """
        if crew.size == 1:
            return
        found = membership.share("place", self.identity.encode(), crew)
        if len(set(found.values())) == 1:
            return
        told = membership.share("places", json.dumps(asdict(self._note())).encode(), crew)
        notes = {rank: LocationNote(**json.loads(note)) for rank, note in sorted(told.items())}
        right = right_location(notes, notes[crew.ranks[0]].known)
        others = {rank: note for rank, note in notes.items() if note.identity != right}
        if not right:
            count = len({note.identity for note in notes.values()})
            raise ConfigError(
                f"the checkpoints of this run would be in {count} different places: "
                f"{_listed(notes)}. {_REMEDY}"
            )
        if crew.rank in others:
            rest = {rank: note for rank, note in notes.items() if rank not in others}
            raise ConfigError(
                f"{others[crew.rank].describe(crew.rank)} is another place than that of the other "
                f"workers, {_listed(rest)}: this worker leaves. {_REMEDY}"
            )
        for rank, note in others.items():
            log.error("run.other_place", rank=rank, host=note.host, place=note.location)
        raise SyncError(
            f"{_listed(others)} is another place than that of the run: a worker with the right one "
            "has to take that rank",
            reason="membership_changed",
            generation=crew.generation,
        )

    def _note(self) -> LocationNote:
        latest = self._latest()
        return LocationNote(
            self.identity,
            self._manager.engine.main.backend.location(),
            socket.gethostname(),
            self._manager.newest_step() is not None,
            "" if latest is None else _place_of(latest),
        )

    def _latest(self, patience: float | None = None) -> CheckpointInfo | None:
        call = self._worker.latest_checkpoint_async(patience=patience)
        return self._notices.wait(io.submit(call))


def right_location(notes: Mapping[int, LocationNote], known: str) -> str:
    """The identity of the place that a run goes on in; nothing when that cannot be told.

    It is where the job's last checkpoint is, else where there are checkpoints at all, else where
    most workers are.
    """
    here = [note.identity for note in notes.values()]
    if known in here:
        return known
    filled = [note.identity for note in notes.values() if note.has_checkpoints]
    (most, count), *others = Counter(filled or here).most_common(2)
    return most if not others or count > others[0][1] else ""


def _place_of(info: CheckpointInfo) -> str:
    return info.metadata.get(IDENTITY_KEY, "")


def _listed(notes: Mapping[int, LocationNote]) -> str:
    shown: Iterable[str] = [note.describe(rank) for rank, note in notes.items()]
    more = f" and {len(notes) - _SHOWN} more" if len(notes) > _SHOWN else ""
    return ", ".join(list(shown)[:_SHOWN]) + more
