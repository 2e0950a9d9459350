"""What holds of every ledger in every state of the machine; part of `invariants`."""

from __future__ import annotations

from collections.abc import Iterator

from ..coordinator.state.epochs.epochs import (
    EPOCHS_KEPT,
    SEGMENT_SLOTS_LIMIT,
    SEGMENTS_LIMIT,
    Epochs,
    is_stale,
)
from ..coordinator.state.epochs.ledger import Ledger
from ..coordinator.state.records import ReaderRecord, TakenBack
from ..coordinator.state.roster import Roster


def problems(epochs: Epochs, roster: Roster) -> Iterator[str]:
    """What is wrong with the ledgers of a job."""
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
            found = _complete(ledger) if ledger.record.complete else _open(ledger, roster)
            yield from (f"{ledger.name}: {problem}" for problem in found)
    if calls != epochs.held_calls:
        yield f"calls {calls} wait in ledgers, but {epochs.held_calls} are held"


def _complete(ledger: Ledger) -> Iterator[str]:
    if ledger.segments or ledger.readers or ledger.calls or ledger.finished or ledger.offers:
        yield "is complete, and keeps more than its sum"


def _open(ledger: Ledger, roster: Roster) -> Iterator[str]:
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
