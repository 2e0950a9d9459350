"""A run's checkpoints: everything that it needs to go on, in one commit and in one place.

A folder may be another one on each machine: a volume that is not mounted, a typo, a local disk. So
each place has an identity, a file that is made once. Workers compare them when they form a crew,
and the coordinator's record of the last checkpoint says which place is right.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from .._sync_bridge import io
from ..checkpoint import CheckpointManager
from ..checkpoint.save.handle import SaveHandle
from ..client import TrainingOrchestrator
from ..errors import (
    CheckpointAbortedError,
    CheckpointNotFoundError,
    ConfigError,
    ConnectionError,
    StorageError,
    StrataError,
    SyncError,
)
from ..retention import FINISHED_KEY, IDENTITY_KEY, PLACE_KEY
from ..telemetry import EventLog
from ..types import CheckpointCondition, CheckpointInfo
from .crew import Crew, CrewMembership
from .preemption import PreemptionNotices
from .streams import Stream
from .tracked_state import OBJECTS, Tracked, capture_rng, restore_rng, seed_rng

if TYPE_CHECKING:
    from .pytorch.sharded_models import ShardedStates

log = EventLog("run")

FAILED_SAVES = 3
"""After this many failed saves in a row training ends: it would be for nothing."""
DRAIN_SECONDS = 0.5
RANKS_READ = 128
"""Of more ranks, a rank reads only its own part and the first one: coverage then counts what was
consumed before by the position alone."""
DISTRIBUTED = "dcp"
"""The kind of parts that checkpoints of sharded models have."""
_GIVEN_UP = "this worker leaves and has given up saving"
_SHOWN = 8
_REMEDY = (
    "Is the volume mounted, and the path right? All workers of a run need the same place: a folder "
    "on a volume that all of them see, or a URL such as s3://bucket/run"
)

R = TypeVar("R")


class CrewCommits:
    """Commits checkpoints of the current crew alone; newcomers take part in the next one's."""

    def __init__(self, worker: TrainingOrchestrator) -> None:
        self._worker = worker
        self._calls: set[Future[Any]] = set()
        self._given_up = False
        self.ranks: tuple[int, ...] | None = None
        """The ranks of the crew."""
        self.place = ""
        """The identity of the place that is saved into."""

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._worker.rank

    def begin_checkpoint(self, step: int) -> str:
        """Agree with the crew on an id."""
        try:
            return self._call(self._begin(step))
        except CancelledError:
            raise CheckpointAbortedError(f"step {step} was not saved: {_GIVEN_UP}") from None

    async def _begin(self, step: int) -> str:
        worker, generation = self._worker, self._worker.generation
        checkpoint_id = await worker.begin_checkpoint_async(step, ranks=self.ranks)
        if worker.generation > generation:
            # Learn who was lost since: a commit does not count if its writer does not know.
            with suppress(ConnectionError):
                await worker.heartbeat()
        return checkpoint_id

    def commit_checkpoint(self, checkpoint_id: str, step: int, **options: Any) -> None:
        """Record a part, and wait for those of the others."""
        if self.place:
            options[IDENTITY_KEY] = self.place
        try:
            self._call(self._worker.commit_checkpoint_async(checkpoint_id, step, **options))
        except CancelledError:
            # Not an abort: the others may yet commit it, with this part.
            raise StorageError(f"step {step} may not be committed: {_GIVEN_UP}") from None

    def latest_checkpoint(self) -> CheckpointInfo | None:
        """The checkpoint that was recorded last."""
        try:
            return self._call(self._worker.latest_checkpoint_async())
        except CancelledError:
            raise StorageError(f"the last checkpoint is not known: {_GIVEN_UP}") from None

    def report_checkpoints(
        self, checkpoint_ids: list[str], condition: CheckpointCondition, **options: str
    ) -> int:
        """Report the condition of checkpoints."""
        return self._worker.report_checkpoints(checkpoint_ids, condition, **options)

    def give_up(self) -> None:
        """Cancel all calls, also future ones: they may wait for a coordinator, or for others."""
        self._given_up = True
        for call in list(self._calls):
            call.cancel()

    def _call(self, call: Coroutine[Any, Any, R]) -> R:
        future = io.submit(call)
        self._calls.add(future)
        try:
            if self._given_up:
                future.cancel()
            return future.result()
        finally:
            self._calls.discard(future)


class RunCheckpoints:
    """Saves and restores a run.

    The crew's first rank saves what is the same on all ranks, and every rank its random numbers and
    its position in the data. Of sharded models every rank saves its share.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        commits: CrewCommits | None,
        tracked: Tracked,
        stream: Stream,
        seed: int,
    ) -> None:
        self._manager = manager
        self._commits = commits
        self._tracked = tracked
        self._stream = stream
        self._seed = seed
        self._under_way: list[SaveHandle] = []
        self._failed = 0
        self._committed = -1
        self._given_up = self._has_warned = False
        self.last_step = -1
        """The step that was last saved, perhaps still under way, or restored."""
        self.last_time = time.monotonic()
        """When that was."""

    def warn_of_others(self) -> None:
        """Warn, once, of other runs that save here without a coordinator."""
        if self._commits is not None or self._has_warned:
            return
        others = self._manager.other_writers()
        self._has_warned = bool(others)
        if others:
            log.warning(
                "run.not_alone",
                place=self._manager.engine.main.backend.location(),
                processes=", ".join(others[:8]),
                remedy="other processes save into the same folder, and without a coordinator each "
                "of them reads all data and saves over the others: start one (strata coordinator) "
                "and set COORDINATOR_URL, or give each run its own folder",
            )

    # Saving

    def save(
        self,
        crew: Crew,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        is_full: bool = True,
        finished: bool = False,
    ) -> SaveHandle:
        """Begin to save; returns when training may go on."""
        self.warn_of_others()
        if self._commits is not None:
            self._commits.ranks = crew.ranks
        own = {"data": self._stream.state(), "rng": capture_rng()}
        options: dict[str, Any] = {
            "is_full": is_full,
            "metrics": metrics,
            "metadata": {FINISHED_KEY: "yes"} if finished else {},
        }
        if self._tracked.is_sharded:
            handle = self._sharded.save(crew, own, step, self._stream.epoch, **options)
        else:
            state: dict[str, Any] = {"own": own}
            if crew.leads:
                state["shared"] = self._tracked.capture()
            handle = self._manager.save(state, step, self._stream.epoch, **options)
        # `check` looks at it: the next save must not raise what became of this one.
        handle.looked_at = True
        self._under_way.append(handle)
        self.last_step, self.last_time = step, time.monotonic()
        return handle

    def check(self, tolerated: int = FAILED_SAVES - 1) -> None:
        """Look at saves that have ended; raises if more than ``tolerated`` in a row failed."""
        ended = [handle for handle in self._under_way if handle.done]
        self._under_way = [handle for handle in self._under_way if not handle.done]
        for handle in ended:
            try:
                handle.wait()
                self._failed = 0
                self._committed = max(self._committed, handle.step)
            except CheckpointAbortedError as exc:
                log.warning("run.save_aborted", step=handle.step, reason=str(exc))
            except StorageError as exc:
                self._failed += 1
                log.error("run.save_failed", step=handle.step, reason=str(exc))
                if self._failed > tolerated:
                    raise

    @property
    def committed_step(self) -> int:
        """The newest step that is known to be committed, or -1."""
        ended = [handle for handle in self._under_way if handle.done]
        good = [handle.step for handle in ended if handle.future.exception() is None]
        return max([self._committed, *good])

    def wait(self, handle: SaveHandle, check: Callable[[], None]) -> None:
        """Wait until a save is committed, and keep calling ``check``, which may raise."""
        while True:
            try:
                handle.wait(DRAIN_SECONDS)
                return
            except TimeoutError:
                if handle.done:
                    raise
            check()

    def give_up(self) -> None:
        """End what waits for the coordinator, or for other workers, in saves under way."""
        self._given_up = True
        if self._commits is not None:
            self._commits.give_up()

    def drain(self, abandon: Callable[[], None]) -> None:
        """Wait for all saves to end; ``abandon`` gives up those that others will not complete."""
        while self._under_way:
            if not self._given_up:
                abandon()
            handle = self._under_way[0]
            try:
                handle.wait(DRAIN_SECONDS)
                self._committed = max(self._committed, handle.step)
            except TimeoutError:
                continue
            except StorageError as exc:
                log.info("run.save_given_up", step=handle.step, reason=str(exc))
            self._under_way.pop(0)

    # Restoring

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint."""
        return self._manager.latest()

    def finished(self) -> CheckpointInfo | None:
        """The newest checkpoint, if the run finished with it."""
        latest = self.latest()
        return latest if latest is not None and latest.metadata.get(FINISHED_KEY) else None

    def all(self) -> list[CheckpointInfo]:
        """All checkpoints, the newest first."""
        return self._manager.checkpoints()[::-1]

    def restore(self, crew: Crew, info: CheckpointInfo) -> None:
        """Put everything into the state of a checkpoint, for a crew of any size."""
        if self._is_distributed(info):
            own = self._sharded.own(self._sharded.restore(info.step), crew.index, RANKS_READ)
        else:
            own = self._restore_whole(crew, info)
        self._stream.restore([part and part["data"] for part in own], crew.index)
        if crew.index < len(own):
            restore_rng(own[crew.index]["rng"])
        else:
            seed_rng(self._seed, info.step, crew.index)
        self.last_step, self.last_time = info.step, time.monotonic()
        self._committed = info.step
        self._manager.policy.saved(info.step)

    def share(self, crew: Crew, info: CheckpointInfo) -> None:
        """Take over from the first rank what is the same on all."""
        if self._is_distributed(info):
            self._sharded.restore(info.step)
        elif not crew.leads:
            first = self._load(info.step, self._manager.ranks(info.step)[0], ["shared"])
            self._tracked.restore(first["shared"])

    def _restore_whole(self, crew: Crew, info: CheckpointInfo) -> list[Any]:
        """Restore what the first rank saved for all; returns what the ranks saved of their own."""
        if self._tracked.is_sharded:
            raise ValueError(
                f"the checkpoint of step {info.step} was saved by a run whose model was not "
                "sharded, and cannot be loaded into one that is: start with another folder for "
                "checkpoints, or load the weights yourself before the model is sharded"
            )
        ranks = self._manager.ranks(info.step)
        own: list[Any] = [None] * len(ranks)
        for index, rank in enumerate(ranks):
            if len(ranks) <= RANKS_READ or index in (0, crew.index):
                part = self._load(info.step, rank, ["own"] if index else ["own", "shared"])
                own[index] = part["own"]
                if not index:
                    self._tracked.restore(part["shared"])
        return own

    @cached_property
    def _sharded(self) -> ShardedStates:
        from .pytorch.sharded_models import ShardedStates

        return ShardedStates(self._manager, self._tracked)

    def _is_distributed(self, info: CheckpointInfo) -> bool:
        return self._manager.engine.has_kind(info.step, DISTRIBUTED)

    def _load(self, step: int, rank: int, keys: list[str]) -> Any:
        return self._manager.load_state(step, rank=rank, keys=keys, map_location="cpu")


def load_tracked(
    checkpoints: str | os.PathLike[str],
    *names: str,
    step: int | None = None,
    map_location: Any = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """The saved states of the objects that a `Run` tracks, by name; without names, of all.

    ::

        model.load_state_dict(load_tracked("checkpoints", "model")["model"])

    ``checkpoints`` is what the run was given; ``step`` chooses another checkpoint than the newest.
    ``options`` go to `CheckpointManager`.
    """
    with CheckpointManager(checkpoints, **options) as manager:
        latest = manager.latest()
        if latest is None:
            raise CheckpointNotFoundError(f"there is no checkpoint in {os.fspath(checkpoints)}")
        step = latest.step if step is None else step
        if manager.engine.has_kind(step, DISTRIBUTED):
            raise StrataError(
                f"the checkpoint of step {step} is of a sharded model: load it with "
                "dtruntime.checkpoint.dcp.load_sharded, into a model of any number of ranks"
            )
        rank = manager.ranks(step)[0]
        keys = [f"shared/{OBJECTS}/{name}" for name in names] or [f"shared/{OBJECTS}"]
        states = manager.load_state(step, rank=rank, keys=keys, map_location=map_location)
    if not names:
        whole: dict[str, Any] = states[keys[0]]
        return whole
    return {name: states[key] for name, key in zip(names, keys, strict=True)}


@dataclass(frozen=True, slots=True)
class LocationNote:
    """What a worker tells the others about its place."""

    identity: str
    location: str
    host: str
    has_checkpoints: bool
    known: str
    """The identity of the place of the job's last checkpoint; empty: not known."""


class CheckpointLocation:
    """This worker's place, compared with that of the others."""

    def __init__(
        self, manager: CheckpointManager, worker: TrainingOrchestrator, notices: PreemptionNotices
    ) -> None:
        self._manager = manager
        self._worker = worker
        self._notices = notices
        self.identity = manager.engine.main.identity()

    def check_record(self) -> None:
        """``ConfigError`` if the job's last checkpoint is elsewhere; called before registration.

        Starting over here would overwrite what was trained there.
        """
        latest = self._latest(self._worker.config.registration_seconds)
        if latest is None or latest.metadata.get(IDENTITY_KEY, "") in ("", self.identity):
            return
        if any(one.checkpoint_id == latest.checkpoint_id for one in self._manager.checkpoints()):
            return  # moved, without the file that has its identity
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

        ``ConfigError`` if this worker has to leave, and ``SyncError`` if others have to.
        """
        if crew.size == 1:
            return
        identities = membership.share("place", self.identity.encode(), crew)
        if len(set(identities.values())) == 1:
            return
        values = membership.share("places", json.dumps(asdict(self._note())).encode(), crew)
        notes = {rank: LocationNote(**json.loads(note)) for rank, note in sorted(values.items())}
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
                f"{_listed({crew.rank: others[crew.rank]})} is another place than that of the "
                f"other workers, {_listed(rest)}: this worker leaves. {_REMEDY}"
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
            "" if latest is None else latest.metadata.get(IDENTITY_KEY, ""),
        )

    def _latest(self, patience: float | None = None) -> CheckpointInfo | None:
        call = self._worker.latest_checkpoint_async(patience=patience)
        return self._notices.wait(io.submit(call))


def right_location(notes: Mapping[int, LocationNote], known: str) -> str:
    """The identity of the place that a run goes on in; empty if that cannot be decided.

    It is where the job's last checkpoint is, else where there are checkpoints at all, else where
    most workers are.
    """
    here = [note.identity for note in notes.values()]
    if known in here:
        return known
    filled = [note.identity for note in notes.values() if note.has_checkpoints]
    (most, count), *others = Counter(filled or here).most_common(2)
    return most if not others or count > others[0][1] else ""


def _listed(notes: Mapping[int, LocationNote]) -> str:
    places = [f"{note.location} (rank {rank} on {note.host})" for rank, note in notes.items()]
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return ", ".join(places[:_SHOWN]) + more
