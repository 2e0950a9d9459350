"""What holds in every state of the machine, as code: for tests, simulations and post-mortems.

`violations` looks at one state. `durable_rows` says what the store has to hold for it,
`snapshot` is all of it, for comparing two states. Promises across time are written down
in ``docs/state-machine.md`` and checked by the tests named there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from dtruntime.coordinator.state.barriers import (
    OPEN_LIMIT,
    ROUNDS_KEPT,
    VALUES_KEPT,
    Barriers,
    Round,
)
from dtruntime.coordinator.state.checkpoints.attempts import (
    ATTEMPTS_KEPT,
    PENDING_LIMIT,
    RANKS_KEPT,
    Attempt,
    attempt_id,
)
from dtruntime.coordinator.state.checkpoints.commits import Checkpoints
from dtruntime.coordinator.state.checkpoints.history import CHECKPOINTS_KEPT
from dtruntime.coordinator.state.epochs.epochs import (
    EPOCHS_KEPT,
    SEGMENT_SLOTS_LIMIT,
    SEGMENTS_LIMIT,
    is_stale,
)
from dtruntime.coordinator.state.epochs.ledger import Ledger
from dtruntime.coordinator.state.machine import JOBS_LIMIT, Job, Machine
from dtruntime.coordinator.state.members import LOSSES_KEPT, TIMES_KEPT, Member
from dtruntime.coordinator.state.operator_requests import ACTIONS_LIMIT, action_id
from dtruntime.coordinator.state.records import AskRecord, ReaderRecord, Record, TakenBack, place_of
from dtruntime.coordinator.state.roster import Roster
from dtruntime.types import Membership

Rows = dict[tuple[str, str, str], Record]


def violations(machine: Machine) -> list[str]:
    """What is wrong in this state; empty when all invariants hold."""
    found = list(_machine(machine))
    for job in machine.jobs.values():
        for part in (_roster, _losses, _barriers, _checkpoints, _epochs, _actions, _speeds):
            found.extend(f"job {job.name}: {problem}" for problem in part(job))
    return found


def durable_rows(machine: Machine) -> Rows:
    """What the store holds, by (kind, job, key), when it has taken every effect so far."""
    rows: Rows = {}
    if machine.removed is not None:
        rows["removed", "", ""] = machine.removed
    for name, job in machine.jobs.items():
        for record in _records(job):
            kind, key = place_of(record)
            rows[kind, name, key] = record
    return rows


def _records(job: Job) -> Iterator[Record]:
    yield job.roster.record()
    yield from (member.record for member in job.roster.slots if member is not None)
    yield from job.datasets.records()
    yield from job.checkpoints.committed.values()
    for pending in job.checkpoints.pending.values():
        yield from (pending.record, *pending.parts.values())
    for attempt in job.checkpoints.attempts:
        yield attempt.record
        key = attempt.record.checkpoint_id
        yield from (AskRecord(key, who, ticket) for who, ticket in attempt.tickets.items())
    yield from job.barriers.completed.values()
    yield from job.actions.pending.values()
    for ledger in job.epochs:
        yield from (ledger.record, *ledger.segments, *ledger.readers.values())
    for attempts in job.coverages.attempts.values():
        for covered in attempts.values():
            yield from (covered.record, *covered.shares.values())


def snapshot(machine: Machine) -> dict[str, Any]:
    """Everything that can influence a later answer, durable and soft."""
    state: dict[str, Any] = {"rows": durable_rows(machine), "events": machine.journal.last_id}
    for name, job in machine.jobs.items():
        members = [m for m in job.roster.slots if m is not None]
        state[f"members of {name}"] = [
            (m.incarnation, m.last_seen, m.heard, m.epoch, m.pulse) for m in members
        ]
        state[f"stragglers of {name}"] = set(job.stragglers.slow)
        state[f"rounds of {name}"] = {
            key: (round_.number, set(round_.expected), _arrivals(round_), dict(round_.payloads))
            for key, round_ in job.barriers.open.items()
        }
        state[f"calls of {name}"] = job.held_calls
        state[f"given up in {name}"] = {
            key for key, pending in job.checkpoints.pending.items() if pending.given_up
        }
    return state


def _arrivals(round_: Round) -> dict[int, dict[int, int]]:
    return {rank: dict(arrival.calls) for rank, arrival in round_.arrived.items()}


def _machine(machine: Machine) -> Iterator[str]:
    if len(machine.jobs) > JOBS_LIMIT:
        yield f"{len(machine.jobs)} jobs"
    watched: dict[int, float] = {}
    for deadline, _, member, _ in machine._watch:
        watched[id(member)] = min(deadline, watched.get(id(member), deadline))
    waits = {call for _, call, _ in machine._waits}
    calls: list[int] = []
    for job in machine.jobs.values():
        calls += job.barriers.held_calls
        calls += job.checkpoints.waiting.held_calls
        calls += job.epochs.held_calls
        for holder in job.roster.slots:
            if holder is None or not holder.live:
                continue
            if watched.get(id(holder), float("inf")) > machine.deadline(holder):
                yield f"nobody watches over {holder.worker_id} of {job.name}"
    yield from (f"call {call} is held twice" for call in _repeated(calls))
    yield from (f"call {call} has no end" for call in calls if call not in waits)


def _repeated(values: Sequence[Hashable]) -> list[Hashable]:
    if len(set(values)) == len(values):
        return []
    return [value for value, count in Counter(values).items() if count > 1]


def _roster(job: Job) -> Iterator[str]:
    roster = job.roster
    members = [member for member in roster.slots if member is not None]
    live = [member for member in members if member.live]
    if roster.world_size and len(roster.slots) != roster.world_size:
        yield f"{len(roster.slots)} slots in a world of {roster.world_size}"
    if not roster.world_size and len(roster.slots) and roster.slots[len(roster.slots) - 1] is None:
        yield "the last slot of an elastic world was never held"
    if roster.live_count != len(live):
        yield f"live_count is {roster.live_count}, not {len(live)}"
    if not 0 <= roster.losses.newest_generation <= roster.generation:
        yield f"loss at {roster.losses.newest_generation} after generation {roster.generation}"
    for rank, member in enumerate(roster.slots):
        if member is not None:
            yield from _member(roster, rank, member)
    held_once: dict[str, Sequence[Hashable]] = {
        "incarnation": [m.incarnation for m in members],
        "worker id": [m.record.worker_id for m in live],
        "session": [m.record.session for m in live if m.record.session],
    }
    for what, values in held_once.items():
        yield from (f"{what} {value} is held twice" for value in _repeated(values))
    yield from _roster_indexes(roster, members, live)


def _member(roster: Roster, rank: int, member: Member) -> Iterator[str]:
    who = f"{member.worker_id} ({member.incarnation})"
    if member.rank != rank or member.record.rank != rank:
        yield f"{who} sits in slot {rank} with rank {member.rank}"
    if member.incarnation != member.record.incarnation:
        yield f"{who} is stored as incarnation {member.record.incarnation}"
    if not 0 < member.incarnation < member.heard <= roster.next_incarnation:
        yield f"{who} was heard at {member.heard}, the next one is {roster.next_incarnation}"
    if member.live != (member.record.membership == Membership.LIVE):
        yield f"{who} is stored as {member.record.membership}, live is {member.live}"
    if not member.live and member.record.last_heard != member.heard:
        yield f"{who} is stored as heard at {member.record.last_heard}, not {member.heard}"
    if member.live and roster.by_id.get(member.worker_id) is not member:
        yield f"{who} is live and not found by its id"


def _roster_indexes(roster: Roster, members: list[Member], live: list[Member]) -> Iterator[str]:
    held = {id(member) for member in members}
    for worker_id, member in roster.by_id.items():
        if id(member) not in held or member.worker_id != worker_id:
            yield f"id {worker_id} leads to a member without a slot"
    if roster._by_session != {m.record.session: m for m in live if m.record.session}:
        yield "sessions do not lead to the live members"
    by_machine: dict[str, dict[int, Member]] = {}
    for member in live:
        if member.record.machine:
            by_machine.setdefault(member.record.machine, {})[member.incarnation] = member
    if roster._by_machine != by_machine:
        yield "machines do not lead to the live members"
    free = set(roster._free)
    for rank, holder in enumerate(roster.slots):
        given_out = rank in free or rank >= roster._vacant_from
        if (holder is None or not holder.live) and not given_out:
            yield f"rank {rank} is free and would not be given out"
    epochs = [m.epoch for m in live if m.epoch is not None]
    if sorted(epochs) != sorted(roster._epochs.elements()):
        yield f"epochs are counted as {dict(roster._epochs)}, not {sorted(epochs)}"
    yield from _caches(roster)
    oldest = min(live, key=lambda m: m.incarnation, default=None)
    if roster.world_size and oldest is not None:
        for member in members:
            if not member.live and not oldest.knew(member):
                yield f"rank {member.rank} is not expected, and no live member knows why"


def _caches(roster: Roster) -> Iterator[str]:
    kept, present, pulse = roster.view(), roster.present_ranks(), roster.pulse()
    roster._view = roster._present = None
    if present != roster.present_ranks():
        yield f"the kept ranks {present} should be {roster.present_ranks()}"
    if kept != roster.view():
        yield f"the kept view {kept} should be {roster.view()}"
    current = roster.generation, roster.live_count, roster.actions
    if (pulse.generation, pulse.live_workers, pulse.actions) != current:
        yield f"the kept pulse {pulse} is out of date"


def _losses(job: Job) -> Iterator[str]:
    losses = job.roster.losses
    generations = [loss.generation for loss in losses._kept]
    if len(generations) > LOSSES_KEPT:
        yield f"{len(generations)} losses are kept"
    if generations != sorted(set(generations)):
        yield "losses are out of order"
    newest = generations[-1] if generations else losses._forgotten_generation
    if newest != losses.newest_generation:
        yield f"the newest loss is {newest}, not {losses.newest_generation}"
    if len(losses.times) > TIMES_KEPT:
        yield f"the times of {len(losses.times)} losses are kept"


def _actions(job: Job) -> Iterator[str]:
    pending, roster = job.actions.pending, job.roster
    if len(pending) > ACTIONS_LIMIT:
        yield f"{len(pending)} actions are pending"
    if tuple(pending.values()) != roster.actions:
        yield f"heartbeats tell of {roster.actions}, but pending are {list(pending)}"
    numbers = [action.number for action in pending.values()]
    if numbers != sorted(set(numbers)) or max(numbers, default=0) > roster.actions_requested:
        yield f"actions are numbered {numbers} of {roster.actions_requested}"
    for key, action in pending.items():
        if key != action_id(action.number):
            yield f"action {action.number} is called {key}"
        holder = roster.by_id.get(action.worker_id)
        concerned = holder is not None and holder.live and holder.incarnation == action.incarnation
        if action.incarnation and not concerned:
            yield f"action {key} concerns {action.worker_id}, which is gone"
    for what in _repeated([(a.kind, a.worker_id) for a in pending.values()]):
        yield f"{what} is pending twice"


def _speeds(job: Job) -> Iterator[str]:
    for incarnation, member in job.stragglers.slow.items():
        if member.incarnation != incarnation or not (member.pulse and member.pulse.step_seconds):
            yield f"{member.worker_id} is slow and has reported nothing"


def _barriers(job: Job) -> Iterator[str]:
    barriers = job.barriers
    if len(barriers.open) > OPEN_LIMIT or len(barriers.completed) > ROUNDS_KEPT:
        yield f"{len(barriers.open)} open and {len(barriers.completed)} completed rounds"
    calls: set[int] = set()
    for barrier_id, round_ in barriers.open.items():
        yield from _round(job.roster, barriers, barrier_id, round_)
        for arrival in round_.arrived.values():
            calls.update(arrival.calls)
    if calls != barriers.held_calls:
        yield f"calls {calls} wait, but {barriers.held_calls} are held"
    values = [r.values or {} for r in barriers.completed.values()]
    kept = sum(len(value) for one in values for value in one.values())
    if kept != barriers._values_kept or (kept > VALUES_KEPT and len(values) > 1):
        yield f"{kept} bytes of values are kept, counted as {barriers._values_kept}"
    sequences = [record.sequence for record in barriers.completed.values()]
    if sequences != sorted(set(sequences)):
        yield f"completed rounds are kept in the order {sequences}"
    for record in barriers.completed.values():
        if record.values is not None and len(record.values) != record.participants:
            yield f"round {record.round} of {record.barrier_id} has values of {list(record.values)}"
        if any(who >= job.roster.next_incarnation for who in record.tickets):
            yield f"round {record.round} of {record.barrier_id} has a participant of the future"


def _round(roster: Roster, barriers: Barriers, barrier_id: str, round_: Round) -> Iterator[str]:
    name = f"round {round_.number} of {barrier_id}"
    before = barriers.completed.get(barrier_id)
    if round_.barrier_id != barrier_id or round_.number != (before.round + 1 if before else 1):
        yield f"{name} is kept under {barrier_id} after {before}"
    arrived = set(round_.arrived)
    if not arrived:
        yield f"{name} is open and nobody waits"
    if not arrived < set(round_.expected):
        yield f"{name} is open: arrived {sorted(arrived)} of {sorted(round_.expected)}"
    waiting = {call for arrival in round_.arrived.values() for call in arrival.calls}
    if not round_.payloads.keys() <= waiting:
        yield f"{name} has payloads of calls that do not wait"
    if round_.ranks and not set(round_.expected) <= set(round_.ranks):
        yield f"{name} of ranks {round_.ranks} expects {sorted(round_.expected)}"
    absent = [rank for rank in round_.expected if not roster.is_present(rank)]
    if absent:
        yield f"{name} waits for ranks {absent}, which cannot come"
    if not set(round_.expected).issuperset(barriers.awaited_vacancies(round_)):
        yield f"{name} does not wait for the vacant ranks {roster.vacant_ranks()}"
    for rank, arrival in round_.arrived.items():
        if roster.slots[rank] is not arrival.member or not arrival.member.live:
            yield f"{name} counts {arrival.member.worker_id}, which does not hold rank {rank}"
        if not arrival.calls:
            yield f"{name} counts {arrival.member.worker_id}, which has no call"


def _checkpoints(job: Job) -> Iterator[str]:
    checkpoints = job.checkpoints
    records = list(checkpoints.committed.values())
    if len(records) > CHECKPOINTS_KEPT or len(checkpoints.pending) > PENDING_LIMIT:
        yield f"{len(records)} committed and {len(checkpoints.pending)} pending checkpoints"
    sequences = [record.sequence for record in records]
    if sequences != sorted(set(sequences)):
        yield "commits are out of order"
    present = [record for record in records if not record.removed_at]
    if len(present) != checkpoints.history.present:
        yield f"{checkpoints.history.present} checkpoints are counted, {len(present)} are there"
    for record in records:
        if (record.verified is None) != (record.verified_at == 0.0):
            yield f"{record.checkpoint_id} was verified at {record.verified_at}: {record.verified}"
    latest = max(present, key=lambda r: r.sequence, default=None)
    if latest is not checkpoints.latest:
        yield f"the latest checkpoint is {latest}, not {checkpoints.latest}"
    both = checkpoints.committed.keys() & checkpoints.pending.keys()
    if both:
        yield f"checkpoints {sorted(both)} are committed and pending"
    yield from _pending(job.roster, checkpoints)
    yield from _attempts(job.roster, checkpoints)


def _attempts(roster: Roster, checkpoints: Checkpoints) -> Iterator[str]:
    attempts = list(checkpoints.attempts)
    ranks = sum(len(attempt.record.ranks) for attempt in attempts)
    if len(attempts) > ATTEMPTS_KEPT or (ranks > RANKS_KEPT and len(attempts) > 1):
        yield f"{len(attempts)} attempts of {ranks} ranks are kept"
    numbers = [attempt.record.number for attempt in attempts]
    if numbers != sorted(set(numbers)) or max(numbers, default=0) > roster.attempts_begun:
        yield f"attempts are numbered {numbers} of {roster.attempts_begun}"
    open_steps: set[int] = set()
    for attempt in attempts:
        yield from _attempt(attempt, checkpoints)
        if attempt.record.checkpoint_id in checkpoints.pending:
            if attempt.record.step in open_steps:
                yield f"two attempts at step {attempt.record.step} are open"
            open_steps.add(attempt.record.step)
    yield from _passed(checkpoints)


def _passed(checkpoints: Checkpoints) -> Iterator[str]:
    """Attempts that wait for a member that has sent its part of a later one."""
    attempts = [a for a in checkpoints.attempts if a.record.checkpoint_id in checkpoints.pending]
    for early in attempts:
        pending = checkpoints.pending[early.record.checkpoint_id]
        awaited = pending.record.expected.keys() - pending.parts.keys()
        for late in attempts:
            if late is early:
                continue
            senders = checkpoints.pending[late.record.checkpoint_id].parts.keys()
            for who in awaited & senders:
                if checkpoints.attempts.begun_before(early, late, who):
                    yield f"{early.record.checkpoint_id} waits for {who}, which went past it"


def _attempt(attempt: Attempt, checkpoints: Checkpoints) -> Iterator[str]:
    record = attempt.record
    key = record.checkpoint_id
    pending = checkpoints.pending.get(key)
    if key != attempt_id(record.step, record.number):
        yield f"attempt {record.number} at step {record.step} is called {key}"
    if record.ended and (pending or key in checkpoints.committed):
        yield f"attempt {key} has ended and goes on"
    forgetful = len(checkpoints.committed) >= CHECKPOINTS_KEPT
    if not (record.ended or pending or key in checkpoints.committed or forgetful):
        yield f"attempt {key} is neither open, committed nor ended"
    if pending is None:
        return
    expected = pending.record.expected
    if tuple(expected.values()) != record.ranks or pending.record.step != record.step:
        yield f"attempt {key} differs from the checkpoint that is pending"
    if not attempt.tickets.keys() <= expected.keys():
        yield f"attempt {key} was asked for by {attempt.tickets}, and expects {expected}"


def _pending(roster: Roster, checkpoints: Checkpoints) -> Iterator[str]:
    live = {m.incarnation: m.rank for m in roster.slots if m is not None and m.live}
    calls: set[int] = set()
    for key, pending in checkpoints.pending.items():
        calls |= pending.calls.keys()
        expected, parts = pending.record.expected, pending.parts
        if not parts.keys() < expected.keys():
            yield f"checkpoint {key} is pending with parts {sorted(parts)} of {sorted(expected)}"
        gone = [who for who in expected if who not in parts and live.get(who) != expected[who]]
        if gone:
            yield f"checkpoint {key} waits for {gone}, which cannot send a part"
        for who, part in parts.items():
            if (part.incarnation, part.checkpoint_id, part.step) != (who, key, pending.record.step):
                yield f"checkpoint {key} keeps a part of {part.checkpoint_id} from {who}"
    if calls != checkpoints.waiting.held_calls:
        yield f"calls {calls} wait for a commit, but {checkpoints.waiting.held_calls} are held"


def _epochs(job: Job) -> Iterator[str]:
    epochs, roster = job.epochs, job.roster
    calls: set[int] = set()
    sequences = [ledger.record.sequence for ledger in epochs]
    if len(set(sequences)) < len(sequences):
        yield f"ledgers are numbered {sequences}"
    for dataset_id, kept in epochs.ledgers.items():
        if len(kept) > EPOCHS_KEPT:
            yield f"{len(kept)} epochs of {dataset_id} are kept"
        for epoch, ledger in kept.items():
            calls.update(ledger.calls)
            if (ledger.record.dataset_id, ledger.record.epoch) != (dataset_id, epoch):
                yield f"{ledger.name} is kept as {dataset_id}, {epoch}"
            found = (
                _complete_ledger(ledger) if ledger.record.complete else _open_ledger(ledger, roster)
            )
            yield from (f"{ledger.name}: {problem}" for problem in found)
    if calls != epochs.held_calls:
        yield f"calls {calls} wait in ledgers, but {epochs.held_calls} are held"


def _complete_ledger(ledger: Ledger) -> Iterator[str]:
    if ledger.segments or ledger.readers or ledger.calls or ledger.finished or ledger.offers:
        yield "is complete, and keeps more than its sum"


def _open_ledger(ledger: Ledger, roster: Roster) -> Iterator[str]:
    yield from _segments(ledger)
    by_slot: dict[int, ReaderRecord] = {}
    for reader in ledger.readers.values():
        if reader.slot in by_slot:
            yield f"slot {reader.slot} has two readers"
        by_slot[reader.slot] = reader
        yield from _reader(ledger, reader)
    finished = {slot for slot, reader in by_slot.items() if ledger.has_finished(reader)}
    if finished != ledger.finished:
        yield f"slots {finished} have finished, not {ledger.finished}"
    yield from _offers(ledger)
    if not ledger.unfinished():
        yield "is open, and everybody has finished"
    yield from _balance(ledger)
    yield from _calls(ledger, roster)


def _segments(ledger: Ledger) -> Iterator[str]:
    count = len(ledger.segments)
    slots = sum(segment.slot_count for segment in ledger.segments)
    if count > SEGMENTS_LIMIT or slots > max(SEGMENT_SLOTS_LIMIT, ledger.segments[0].slot_count):
        yield f"has {count} segments of {slots} slots"
    if [segment.number for segment in ledger.segments] != list(range(1, ledger.current + 1)):
        yield f"has {count} segments, numbered up to {ledger.current}"
    for segment in ledger.segments:
        name = f"segment {segment.number}"
        ended = segment.number < ledger.current
        if len(segment.taken) != (segment.slot_count if ended else 0):
            yield f"{name} says of {len(segment.taken)} slots what they took"
        if ended and any(segment.taken[slot] for slot in segment.dead):
            yield f"dead slots took samples in {name}"
        if not set(segment.dead) < set(range(segment.slot_count)):
            yield f"{name} has {segment.slot_count} slots, dead ones {segment.dead}"
        if segment.weights and (len(segment.weights), min(segment.weights) > 0) != (
            segment.slot_count,
            True,
        ):
            yield f"{name} has weights {segment.weights}"
    yield from _taken_back(ledger)


def _taken_back(ledger: Ledger) -> Iterator[str]:
    seen: dict[tuple[int, int], TakenBack] = {}
    for segment in ledger.segments:
        for back in segment.taken_back:
            if back.segment >= segment.number - 1 or not 0 <= back.start < back.stop:
                yield f"{back} is taken back when segment {segment.number} begins"
            elif back.stop > ledger.segments[back.segment - 1].taken[back.slot]:
                yield f"{back} was never taken"
            if (back.segment, back.slot) in seen:
                yield f"{back} is taken back twice"
            seen[back.segment, back.slot] = back


def _reader(ledger: Ledger, reader: ReaderRecord) -> Iterator[str]:
    name = f"reader {reader.incarnation}"
    if not reader.claim <= reader.length <= ledger.record.samples:
        yield f"{name} claims {reader.claim} of {reader.length}"
    count, dead = ledger.view
    if reader.slot >= count or reader.slot in dead:
        yield f"{name} reads in slot {reader.slot} of {count}, dead are {dead}"
    elif not reader.committed_segment <= ledger.current or not reader.segment <= ledger.current:
        yield f"{name} is in segment {reader.segment} and commits in {reader.committed_segment}"
    elif reader.committed_position > ledger.taken(reader, reader.committed_segment):
        yield f"{name} has committed more than it took"


def _balance(ledger: Ledger) -> Iterator[str]:
    """Every sample that was taken is committed, in the hands of a reader, or taken back."""
    taken = sum(sum(segment.taken) for segment in ledger.segments)
    back = sum(b.stop - b.start for segment in ledger.segments for b in segment.taken_back)
    current = sum(ledger.taken(r, ledger.current) for r in ledger.readers.values())
    held = ledger.record.count
    for reader in ledger.readers.values():
        held += reader.count + sum(b.stop - b.start for b in ledger.uncommitted(reader))
    if not taken - back + current == held == ledger.claimed:
        yield f"{taken} - {back} + {current} samples were taken, {held} are held"
    if ledger.claimed > ledger.record.samples:
        yield f"{ledger.claimed} of {ledger.record.samples} samples are claimed"
    committed = ledger.record.count + sum(r.count for r in ledger.readers.values())
    digest = ledger.digest()
    if digest.count != committed:
        yield f"the digest is of {digest.count} samples, {committed} are committed"


def _offers(ledger: Ledger) -> Iterator[str]:
    for incarnation, (call, reader) in ledger.offers.items():
        if call not in ledger.calls or ledger.calls[call].member.incarnation != incarnation:
            yield f"reader {incarnation} offers to finish, and does not wait"
        if reader.slot in ledger.finished or not ledger.has_finished(reader):
            yield f"reader {incarnation} offers what is not all that it took"


def _calls(ledger: Ledger, roster: Roster) -> Iterator[str]:
    for call, (member, _) in ledger.calls.items():
        if not member.live or roster.slots[member.rank] is not member:
            yield f"call {call} of {member.worker_id} is held, which is no member"
        if member.rank not in ledger.finished and member.incarnation not in ledger.offers:
            yield f"call {call} of {member.worker_id} is held, which has not finished"
    ledger.generation = -1
    if ledger.calls and is_stale(ledger, roster):
        yield "somebody waits in a segment of other members"
