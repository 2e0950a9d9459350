"""Ways to break the ledger of an epoch, for tests that the simulation notices each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.epochs import epochs
from dtruntime.coordinator.state.epochs.ledger import Ledger
from dtruntime.coordinator.state.records import ReaderRecord, TakenBack

Patch = Callable[..., None]


def _after_cut(change: Callable[[Ledger, list[ReaderRecord], dict[int, int]], None]) -> Any:
    """A bug that changes what a cut has decided; it gets the claims by slot of before."""
    cut = Ledger.cut

    def broken(self: Ledger, view: Any, weights: Any, lost: list[ReaderRecord]) -> int:
        claims_before = {r.slot: self.taken(r, self.current) for r in self.readers.values()}
        returned = cut(self, view, weights, lost)
        change(self, lost, claims_before)
        return returned

    return lambda patch: patch(Ledger, "cut", broken)


def _lost_keep_claims(ledger: Ledger, lost: list[ReaderRecord], before: dict[int, int]) -> None:
    gone = {reader.slot for reader in lost}
    taken = [before[s] if s in gone else t for s, t in enumerate(ledger.segments[-2].taken)]
    ledger.segments[-2] = replace(ledger.segments[-2], taken=tuple(taken))


def _lost_keep_nothing(ledger: Ledger, lost: list[ReaderRecord], before: dict[int, int]) -> None:
    gone = {reader.slot for reader in lost}
    taken = [0 if s in gone else t for s, t in enumerate(ledger.segments[-2].taken)]
    ledger.segments[-2] = replace(ledger.segments[-2], taken=tuple(taken))


def _live_keep_commits(ledger: Ledger, lost: list[ReaderRecord], before: dict[int, int]) -> None:
    taken = list(ledger.segments[-2].taken)
    for reader in ledger.readers.values():
        here = reader.committed_segment == ledger.current - 1
        taken[reader.slot] = reader.committed_position if here else 0
    ledger.segments[-2] = replace(ledger.segments[-2], taken=tuple(taken))


def _nothing_taken_back(ledger: Ledger, *_: Any) -> None:
    ledger.segments[-1] = replace(ledger.segments[-1], taken_back=())


def _commits_taken_back(ledger: Ledger, *_: Any) -> None:
    back = tuple(TakenBack(b.segment, b.slot, 0, b.stop) for b in ledger.segments[-1].taken_back)
    ledger.segments[-1] = replace(ledger.segments[-1], taken_back=back)


def _forget_sums(ledger: Ledger, *_: Any) -> None:
    ledger.record = replace(ledger.record, count=0, digest=b"")


def claims_go_back(patch: Patch) -> None:
    with_claim = Ledger.with_claim

    def broken(ledger: Ledger, command: c.Claim, member: Any, now: float) -> ReaderRecord:
        reader = with_claim(ledger, command, member, now)
        return replace(reader, claim=command.upto)

    patch(Ledger, "with_claim", broken)


def commits_go_back(patch: Patch) -> None:
    with_commit = Ledger.with_commit

    def broken(ledger: Ledger, reader: ReaderRecord, command: c.Commit, now: float) -> Any:
        if (command.segment, command.position) < (
            reader.committed_segment,
            reader.committed_position,
        ):
            start = replace(reader, committed_segment=1, committed_position=0, count=0, digest=b"")
            reader = start if command.segment == 1 else reader
        return with_commit(ledger, reader, command, now)

    patch(Ledger, "with_commit", broken)


def old_segments_are_granted(patch: Patch) -> None:
    claim = epochs.Epochs.claim

    def broken(self: epochs.Epochs, command: c.Claim, member: Any, out: Any) -> Any:
        reply = claim(self, command, member, out)
        if isinstance(reply, c.Moved) and command.segment:
            return c.Granted(reply.generation, reply.slot)
        return reply

    patch(epochs.Epochs, "claim", broken)


def replacements_go_unseen(patch: Patch) -> None:
    def broken(ledger: Ledger, roster: Any) -> bool:
        return bool(roster.live_count and ledger.view != roster.view())

    patch(epochs, "is_stale", broken)


def newcomers_go_unseen(patch: Patch) -> None:
    def broken(ledger: Ledger, roster: Any) -> bool:
        return bool(roster.live_count and epochs.lost_readers(ledger, roster))

    patch(epochs, "is_stale", broken)


def claimed_is_finished(patch: Patch) -> None:
    def broken(self: Ledger, reader: ReaderRecord) -> bool:
        return reader.segment == self.current and reader.claim == reader.length

    patch(Ledger, "has_finished", broken)


def older_segments_are_finished(patch: Patch) -> None:
    uncommitted = Ledger.uncommitted

    def broken(self: Ledger, reader: ReaderRecord) -> Any:
        return (b for b in uncommitted(self, reader) if b.segment == self.current)

    patch(Ledger, "uncommitted", broken)


def segments_are_replaced(patch: Patch) -> None:
    cut = Ledger.cut

    def broken(self: Ledger, view: Any, weights: Any, lost: list[ReaderRecord]) -> int:
        if self.claimed or lost:
            return cut(self, view, weights, lost)
        self.segments[-1] = replace(
            self.segments[-1], slot_count=view[0], dead=tuple(sorted(view[1])), weights=weights
        )
        return 0

    patch(Ledger, "cut", broken)


def offers_are_commits(patch: Patch) -> None:
    after_claim = epochs.Epochs._after_claim

    def broken(self: epochs.Epochs, ledger: Ledger, reader: Any, c_: c.Claim, *rest: Any) -> Any:
        offer = ledger.with_offer(reader, c_, rest[-1].now)
        if offer is not None:
            ledger.keep(offer)
            rest[-1].put(self._roster.job, offer)
            reader = offer
        return after_claim(self, ledger, reader, c_, *rest)

    patch(epochs.Epochs, "_after_claim", broken)


def offers_outlive_calls(patch: Patch) -> None:
    hang_up = epochs.Epochs.hang_up

    def broken(self: epochs.Epochs, call: int) -> None:
        ledger = self._calls.get(call)
        offers = {} if ledger is None else dict(ledger.offers)
        hang_up(self, call)
        if ledger is not None and not ledger.record.complete:
            ledger.offers.update(offers)

    patch(epochs.Epochs, "hang_up", broken)


LEDGER_BUGS: dict[str, Callable[[Patch], None]] = {
    "the lost keep what they claimed": _after_cut(_lost_keep_claims),
    "the lost keep nothing": _after_cut(_lost_keep_nothing),
    "the live keep what they committed": _after_cut(_live_keep_commits),
    "nothing is taken back": _after_cut(_nothing_taken_back),
    "commits are taken back": _after_cut(_commits_taken_back),
    "sums are forgotten": _after_cut(_forget_sums),
    "claims go back": claims_go_back,
    "commits go back": commits_go_back,
    "old segments are granted": old_segments_are_granted,
    "replacements go unseen": replacements_go_unseen,
    "newcomers go unseen": newcomers_go_unseen,
    "claimed is finished": claimed_is_finished,
    "older segments are finished": older_segments_are_finished,
    "segments are replaced in place": segments_are_replaced,
    "offers are commits": offers_are_commits,
    "offers outlive their calls": offers_outlive_calls,
    "waits outlive the segment": lambda patch: patch(
        epochs.Epochs, "membership_changed", lambda *_: None
    ),
    "nobody is told of the end": lambda patch: patch(
        epochs.Epochs, "_release_all", lambda *_: None
    ),
}
