"""Membership of a job: ranks, incarnations and generations."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict

import msgspec

from ...types import Membership
from .commands import Lost, Pulse, Refused, Register, Registered
from .effects import Outbox
from .members import Member, MemberLosses, RankSet, Slots
from .records import ActionRecord, JobRecord, RemovedRecord, WorkerRecord, copied

HOLES_KEPT = 4096
"""A longer list of absent ranks is not cached."""
SUPERSEDED_KEPT = 1024
MAX_WORKERS = 65_536
RETRY_SECONDS = 1.0
"""When to retry after a refusal that holds only until ghosts are declared dead."""
SILENT = "no heartbeat for"
"""The reason of a death that was inferred from silence begins with this."""
SILENT_HINT = (
    "the process or its machine is gone, or code that holds the interpreter lock ran for that "
    "long: then raise heartbeat_timeout_ms of the coordinator"
)
_STILL_ALIVE = (
    "; this process lives, so it was stopped, cut off from the coordinator, or code that holds the "
    "interpreter lock ran for that long: then raise the coordinator's heartbeat_timeout_ms"
)
_AGAIN = "stop this process, or call register() again to join as a new member"


class Roster:
    """The members of one job.

    A slot is *vacant* (``None``), or holds a member that is live, dead or has left.
    In a fixed world vacant slots are expected and count as present.
    """

    def __init__(
        self, job: str, record: JobRecord | None = None, max_workers: int = MAX_WORKERS
    ) -> None:
        start = record or JobRecord(
            world_size=0, generation=0, loss_generation=0, next_incarnation=1
        )
        self.job = job
        self._max_workers = max_workers
        self.world_size = start.world_size
        self.generation = start.generation
        self.next_incarnation = start.next_incarnation
        self.attempt = start.attempt
        self.epoch = start.epoch
        self.completed_epochs = start.completed_epochs
        self.attempts_begun = start.attempts_begun
        self.actions_requested = start.actions_requested
        self.created_at = start.created_at
        """When the job first appeared; 0: unknown."""
        self.actions: tuple[ActionRecord, ...] = ()
        """The pending actions that heartbeat replies carry."""
        self.slots = Slots(self.world_size)
        self.by_id: dict[str, Member] = {}
        self.live_count = 0
        self.losses = MemberLosses(start.loss_generation, start.next_incarnation, start.lost_at)
        self._oldest: list[tuple[int, Member]] = []
        self._gone: list[tuple[int, int, Member]] = []
        self._by_session: dict[str, Member] = {}
        self._by_machine: dict[str, dict[int, Member]] = {}
        """The live members of each machine, by incarnation."""
        self._ended_sessions: OrderedDict[str, str] = OrderedDict()
        self._free: list[int] = []
        """A heap of ranks that became free."""
        self._vacant_from = 0
        """No lower rank is vacant, but for those in the heap."""
        self._superseded: OrderedDict[str, str] = OrderedDict()
        self._epochs: Counter[int] = Counter()
        self._view: tuple[int, frozenset[int]] | None = None
        self._present: RankSet | None = None
        self._pulse: Pulse | None = None
        self._dead: int | None = None

    # Queries

    @property
    def dead_count(self) -> int:
        """How many ranks have lost their holder."""
        if self._dead is None:
            held = self.slots.held()
            self._dead = sum(m.record.membership == Membership.DEAD for m in held)
        return self._dead

    def record(self) -> JobRecord:
        """The durable part of this roster, without its members."""
        return JobRecord(
            world_size=self.world_size,
            generation=self.generation,
            loss_generation=self.losses.newest_generation,
            next_incarnation=self.next_incarnation,
            attempt=self.attempt,
            epoch=self.epoch,
            completed_epochs=self.completed_epochs,
            attempts_begun=self.attempts_begun,
            actions_requested=self.actions_requested,
            lost_at=tuple(self.losses.times),
            created_at=self.created_at,
        )

    def pulse(self) -> Pulse:
        """The answer to a heartbeat."""
        if self._pulse is None:
            lost = self.losses.newest_generation
            self._pulse = Pulse(self.generation, self.live_count, self.actions, lost)
        return self._pulse

    def is_present(self, rank: int) -> bool:
        """Whether a rank takes part: live, or expected in a fixed world."""
        if rank >= len(self.slots):
            return False
        member = self.slots[rank]
        return self.world_size > 0 if member is None else member.live

    def present_ranks(self) -> RankSet:
        """The ranks that take part; do not modify."""
        if self._present is None:
            held = self.slots.held()
            if self.world_size:
                everybody = RankSet.below(len(self.slots))
                self._present = everybody.difference(m.rank for m in held if not m.live)
            else:
                self._present = RankSet(m.rank for m in held if m.live)
        return self._present

    def vacant_ranks(self) -> RankSet:
        """The ranks of a fixed world that are expected and held by nobody."""
        if not self.world_size:
            return RankSet()
        return RankSet.below(len(self.slots)).difference(m.rank for m in self.slots.held())

    def view(self) -> tuple[int, frozenset[int]]:
        """Slots and holes for shard assignment; slots after the last present one do not count."""
        if self._view is not None:
            return self._view
        present = self.present_ranks()
        count = present.highest() + 1
        view = count, frozenset(RankSet.below(count).difference(present))
        if len(view[1]) <= HOLES_KEPT:
            self._view = view
        return view

    def on_machine(self, machine: str) -> list[Member]:
        """The live members that registered on a machine."""
        return list(self._by_machine.get(machine, {}).values()) if machine else []

    def silent_for(self, member: Member) -> list[Member]:
        """Live members that have not been heard from since ``member`` registered, by rank."""
        return [m for m in self.slots.held() if m.live and not member.knew(m)]

    def find(self, worker_id: str, incarnation: int) -> Member:
        """The live member that a call names, or a refusal that explains what happened to it."""
        member = self.by_id.get(worker_id)
        if member is not None and member.live and member.incarnation == incarnation:
            return member
        raise self._refusal(worker_id, incarnation, member)

    def refusal(self, member: Member) -> Refused:
        """The refusal for a former member."""
        return self._refusal(member.worker_id, member.incarnation, self.by_id.get(member.worker_id))

    def losses_since(
        self, member: Member, generation: int, until: int | None = None
    ) -> tuple[Lost, ...]:
        """Losses since ``generation`` that concern ``member``; 0 checks nothing."""
        if not generation:
            return ()
        return tuple(self.losses.since(generation, member.incarnation, until))

    # Changes

    def begin(self, now: float, removed: RemovedRecord | None) -> None:
        """Start a new job; its numbers count on from those of removed jobs."""
        self.created_at = now
        if removed is not None:
            self.next_incarnation = removed.next_incarnation
            self.attempts_begun = removed.attempts_begun
            self.actions_requested = removed.actions_requested

    def show_actions(self, actions: tuple[ActionRecord, ...]) -> None:
        """Send these actions with heartbeat replies."""
        self.actions = actions
        self._pulse = None

    def hear(self, member: Member, now: float) -> None:
        """A member showed that it is alive."""
        member.last_seen = now
        member.heard = self.next_incarnation

    def register(self, c: Register, out: Outbox) -> tuple[Registered, list[Lost]]:
        """Register a worker; also returns the losses of the members it replaces."""
        member = self._by_session.get(c.session) if c.session else None
        if member is not None:
            self.hear(member, out.now)
            return self._registered(member), []
        self._check_attempt(c)
        new_world = c.attempt > self.attempt or self.live_count == 0
        self._check_world_size(c, c.world_size if new_world else self.world_size)
        if new_world:
            displaced = [m for m in self.slots.held() if m.live]
        else:
            displaced = self._displaced_by(c, self._choose_rank(c))
        self._check_session(c, displaced)
        reason = f"replaced by {c.worker_id or 'a newcomer'}"
        lost = [self._remove(member, Membership.DEAD, reason, out) for member in displaced]
        if new_world:
            self._begin_world(c, out)
        else:
            self.losses.times.extend(out.now for _ in lost)
        self._skip_lost_numbers(c)
        return self._registered(self._admit(c, self._choose_rank(c), out)), lost

    def lose(self, member: Member, how: Membership, reason: str, out: Outbox) -> Lost:
        """A member died or left."""
        loss = self._remove(member, how, reason, out)
        if how == Membership.DEAD:
            self.losses.times.append(out.now)
        self._reopen_ranks(out)
        out.put(self.job, self.record())
        return loss

    def see_epoch(self, member: Member, epoch: int, out: Outbox) -> None:
        """A member entered another epoch."""
        self._count_epoch(member, -1)
        member.epoch = epoch
        self._count_epoch(member, 1)
        current, completed = max(self._epochs), min(self._epochs)
        if self._epochs.total() < self.live_count:
            completed = min(completed, self.completed_epochs)
        if (current, completed) == (self.epoch, self.completed_epochs):
            return
        if completed > self.completed_epochs:
            out.emit(self.job, "epoch.completed", epoch=completed - 1)
        self.epoch, self.completed_epochs = current, completed
        out.put(self.job, self.record())

    def restore(self, record: WorkerRecord, now: float) -> Member:
        """Restore a stored member."""
        live = record.membership == Membership.LIVE
        heard = self.next_incarnation if live else record.last_heard
        member = Member(record, heard, self.job, now)
        self.slots.grow(member.rank + 1)
        self.slots[member.rank] = member
        namesake = self.by_id.get(member.worker_id)
        if namesake is None or namesake.incarnation < member.incarnation:
            self.by_id[member.worker_id] = member
        if member.live:
            self.live_count += 1
            heapq.heappush(self._oldest, (member.incarnation, member))
            if record.session:
                self._by_session[record.session] = member
            if record.machine:
                here = self._by_machine.setdefault(record.machine, {})
                here[member.incarnation] = member
        else:
            self._retire_member(member)
        self._changed()
        return member

    # Registration, step by step

    def _check_attempt(self, c: Register) -> None:
        if c.attempt < self.attempt and self.live_count:
            raise Refused(
                "superseded",
                f"this process belongs to restart {c.attempt} of job {self.job!r}, which is at "
                f"restart {self.attempt}: stop this process",
                RETRY_SECONDS,
            )

    def _check_world_size(self, c: Register, size: int) -> None:
        if c.world_size not in (0, size):
            running = f"world_size={size}" if size else "an elastic world"
            raise Refused(
                "world_size_conflict",
                f"job {self.job!r} runs with {running} and {self.live_count} live workers, but "
                f"this worker asked for world_size={c.world_size}: use the same size, wait for the "
                "others to end, or choose another job",
                RETRY_SECONDS,
            )
        if size and c.rank is not None and c.rank >= size:
            raise Refused("invalid", f"rank {c.rank} does not exist in a world of {size} workers")

    def _check_session(self, c: Register, displaced: list[Member]) -> None:
        """A session that was declared dead may return, but must not displace anybody."""
        ended = self._ended_sessions.get(c.session) if c.session else None
        if ended == Membership.LEFT or (ended and displaced):
            raise Refused(
                "superseded", f"this registration in job {self.job!r} has ended ({ended}): {_AGAIN}"
            )

    def _choose_rank(self, c: Register) -> int:
        if c.rank is not None:
            return c.rank
        member = self.by_id.get(c.worker_id) if c.worker_id else None
        if member is not None:
            return member.rank
        free = self._lowest_free()
        if free is not None:
            return free
        if not self.world_size and len(self.slots) < self._max_workers:
            return len(self.slots)
        raise Refused(
            "job_full",
            f"all {len(self.slots)} ranks of job {self.job!r} are held by live workers: wait until "
            "one leaves or is declared dead, or start fewer workers",
            RETRY_SECONDS,
        )

    def _displaced_by(self, c: Register, rank: int) -> list[Member]:
        holder = self.slots[rank] if rank < len(self.slots) else None
        namesake = self.by_id.get(c.worker_id) if c.worker_id else None
        both = [m for m in (holder, namesake) if m is not None and m.live]
        return both[:1] if len(both) == 2 and both[0] is both[1] else both

    def _begin_world(self, c: Register, out: Outbox) -> None:
        """Start over without members, in the size that the first newcomer asks for."""
        for member in self.slots.held():
            self._drop_id(member, "")
            out.delete(self.job, member.record)
        self.world_size = c.world_size
        self.attempt = c.attempt
        self.slots = Slots(c.world_size)
        self._free, self._vacant_from = [], 0
        self._gone.clear()
        if self.world_size:
            self.generation += 1
        self._changed()

    def _skip_lost_numbers(self, c: Register) -> None:
        """Reuse no number that a newcomer knows from a lost state."""
        self.next_incarnation = max(self.next_incarnation, c.previous_incarnation + 1)
        self.attempts_begun = max(self.attempts_begun, c.previous_attempts)
        if c.previous_generation:
            self.generation = max(self.generation, c.previous_generation + 1)
            self.losses.forget_state(c.previous_generation + 1)
            self._changed()

    def _admit(self, c: Register, rank: int, out: Outbox) -> Member:
        self.slots.grow(rank + 1)
        before = self.slots[rank]
        worker_id = c.worker_id or self._free_id(rank)
        if before is not None:
            self._drop_id(before, worker_id)
        if not (self.world_size and before is None):
            self.generation += 1
        record = copied(
            c,
            WorkerRecord,
            worker_id=worker_id,
            rank=rank,
            incarnation=self.next_incarnation,
            membership=Membership.LIVE,
            registered_at=out.now,
        )
        self.next_incarnation += 1
        member = self.restore(record, out.now)
        self._reopen_ranks(out)
        out.put(self.job, record)
        out.put(self.job, self.record())
        out.emit(
            self.job,
            "worker.registered",
            worker=worker_id,
            rank=rank,
            incarnation=record.incarnation,
            generation=self.generation,
        )
        return member

    def _free_id(self, rank: int) -> str:
        name, suffix = f"worker-{rank}", 1
        while (taken := self.by_id.get(name)) is not None and taken.live:
            suffix += 1
            name = f"worker-{rank}.{suffix}"
        return name

    def _registered(self, member: Member) -> Registered:
        return Registered(
            self.job,
            member.worker_id,
            member.rank,
            member.incarnation,
            self.generation,
            self.world_size,
            self.live_count,
        )

    # Loss, step by step

    def _remove(self, member: Member, how: Membership, reason: str, out: Outbox) -> Lost:
        self.generation += 1
        loss = Lost(
            self.generation,
            member.worker_id,
            member.rank,
            reason,
            member.incarnation,
            member.heard,
        )
        self.losses.add(loss)
        member.live = False
        member.record = msgspec.structs.replace(
            member.record,
            membership=how,
            detail=reason,
            last_heard=member.heard,
            heard_at=member.last_seen,
            report=member.last_report,
        )
        self._retire_member(member)
        self.live_count -= 1
        self._count_epoch(member, -1)
        self._by_session.pop(member.record.session, None)
        self._leave_machine(member)
        heapq.heappush(self._free, member.rank)
        if max(len(self._free), len(self._oldest), len(self._gone)) > 2 * len(self.slots) + 64:
            self._compact()
        self._changed()
        out.put(self.job, member.record)
        more: dict[str, object] = {}
        if how == Membership.DEAD:
            more["silent_seconds"] = round(max(0.0, out.now - member.last_seen), 3)
        if reason.startswith(SILENT):
            more["hint"] = SILENT_HINT
        out.emit(
            self.job,
            "worker.left" if how == Membership.LEFT else "worker.dead",
            worker=member.worker_id,
            rank=member.rank,
            incarnation=member.incarnation,
            generation=self.generation,
            reason=reason,
            **more,
        )
        return loss

    def _leave_machine(self, member: Member) -> None:
        here = self._by_machine.get(member.record.machine)
        if here is not None:
            here.pop(member.incarnation, None)
            if not here:
                del self._by_machine[member.record.machine]

    def _retire_member(self, member: Member) -> None:
        if self.world_size:
            heapq.heappush(self._gone, (member.heard, member.incarnation, member))
        if member.record.session:
            self._ended_sessions[member.record.session] = member.record.membership
            if len(self._ended_sessions) > SUPERSEDED_KEPT:
                self._ended_sessions.popitem(last=False)

    def _reopen_ranks(self, out: Outbox) -> None:
        """In a fixed world, expect again the ranks whose lost holders no live member knew.

        If the oldest live member did not know one, nobody did.
        """
        while self._oldest and not self._oldest[0][1].live:
            heapq.heappop(self._oldest)
        while self._oldest and self._gone and self._gone[0][0] <= self._oldest[0][0]:
            member = heapq.heappop(self._gone)[2]
            if self.slots[member.rank] is member:
                self.slots[member.rank] = None
                self._drop_id(member, "")
                self._changed()
                out.delete(self.job, member.record)

    def _drop_id(self, member: Member, successor: str) -> None:
        """Forget the name of a member that no longer holds a rank."""
        if self.by_id.get(member.worker_id) is not member:
            return
        del self.by_id[member.worker_id]
        if member.worker_id != successor:
            self._superseded[member.worker_id] = successor
            if len(self._superseded) > SUPERSEDED_KEPT:
                self._superseded.popitem(last=False)

    def _refusal(self, worker_id: str, incarnation: int, known: Member | None) -> Refused:
        if known is None and not 0 < incarnation < self.next_incarnation:
            return Refused(
                "unknown_worker",
                f"worker {worker_id!r} of job {self.job!r} is not a member: {_AGAIN}",
            )
        if known is None:
            successor = self._superseded.get(worker_id)
            what = f"was replaced{f' by {successor!r}' if successor else ''}"
        elif known.incarnation != incarnation:
            what = (
                f"was registered again as incarnation {known.incarnation} by process "
                f"{known.record.process or '?'}; this call carries incarnation {incarnation}"
            )
        else:
            left = known.record.membership == Membership.LEFT
            why = known.record.detail + _STILL_ALIVE * known.record.detail.startswith(SILENT)
            what = f"{'has left' if left else 'was declared dead'} ({why})"
        return Refused("superseded", f"worker {worker_id!r} of job {self.job!r} {what}: {_AGAIN}")

    # Bookkeeping

    def _is_free(self, rank: int) -> bool:
        if rank >= len(self.slots):
            return False
        member = self.slots[rank]
        return member is None or not member.live

    def _lowest_free(self) -> int | None:
        while self._free and not self._is_free(self._free[0]):
            heapq.heappop(self._free)
        while self._vacant_from < len(self.slots) and not self._is_free(self._vacant_from):
            self._vacant_from += 1
        lowest = min(self._free[0] if self._free else self._vacant_from, self._vacant_from)
        return lowest if lowest < len(self.slots) else None

    def _compact(self) -> None:
        """Rebuild the heaps without outdated entries."""
        held = self.slots.held()
        self._free = [member.rank for member in held if not member.live]
        self._vacant_from = 0
        self._oldest = sorted((m.incarnation, m) for m in held if m.live)
        if self.world_size:
            self._gone = sorted((m.heard, m.incarnation, m) for m in held if not m.live)

    def _count_epoch(self, member: Member, change: int) -> None:
        if member.epoch is None:
            return
        self._epochs[member.epoch] += change
        if self._epochs[member.epoch] <= 0:
            del self._epochs[member.epoch]

    def _changed(self) -> None:
        self._view = None
        self._present = None
        self._pulse = None
        self._dead = None
