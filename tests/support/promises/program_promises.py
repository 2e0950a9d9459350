"""What programs do and are told, and whether it fits together."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.records import CheckpointRecord, RoundRecord
from tests.support.promises.promise_model import JobModel, demand

Key = tuple[str, int, int]
"""Job, incarnation and ticket of a barrier call."""


class Programs:
    """The view of the programs that call barriers and save checkpoints."""

    def __init__(self, jobs: dict[str, JobModel]) -> None:
        self._jobs = jobs
        self.entered_at: dict[Key, str] = {}
        """The barrier that a call was made at."""
        self.outcomes: dict[Key, Any] = {}
        self.payloads: dict[Key, bytes | None] = {}
        self._last_round: dict[tuple[str, int, str], int] = {}
        self._part_writers: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._part_passes: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.aborted_parts: dict[tuple[str, str], int] = defaultdict(int)

    def entered(self, command: c.Arrive) -> None:
        """A program reaches a barrier."""
        self.payloads[command.job, command.incarnation, command.ticket] = command.payload
        self.entered_at[command.job, command.incarnation, command.ticket] = command.barrier_id

    def came_out(self, command: c.Arrive, outcome: Any) -> None:
        """A program is told the outcome of a barrier."""
        key = command.job, command.incarnation, command.ticket
        self.outcomes[key] = outcome
        model = self._jobs[command.job]
        if not isinstance(outcome, c.Passed):
            demand(key[1:] not in model.stored_counted, "counted, and told otherwise", key, outcome)
        elif not model.was_unlearned(command):
            self._check_passed(model, command, outcome)

    def _check_passed(self, model: JobModel, command: c.Arrive, outcome: c.Passed) -> None:
        record = model.stored_rounds.get((command.barrier_id, outcome.round))
        demand(record is not None, "passed a round that is not stored", command, outcome)
        assert record is not None
        demand(
            (record.generation, record.participants) == (outcome.generation, outcome.participants),
            "told of another round",
            record,
            outcome,
        )
        demand(record.values == outcome.values, "told of other values", record, outcome)
        self._check_values(command, outcome, record)
        ticket = record.tickets.get(command.incarnation)
        demand(ticket == command.ticket, "passed without being counted", command, record)
        mine = command.job, command.incarnation, command.barrier_id
        demand(outcome.round > self._last_round.get(mine, 0), "rounds do not rise", mine, outcome)
        self._last_round[mine] = outcome.round

    def _check_values(self, command: c.Arrive, outcome: c.Passed, record: RoundRecord) -> None:
        """What comes round is what the participants brought."""
        brought = [self.payloads[command.job, *pair] for pair in record.tickets.items()]
        if all(payload is None for payload in brought):
            demand(outcome.values is None, "values of a round in which nobody brought any", record)
            return
        values = sorted((outcome.values or {}).values())
        wanted = sorted(payload or b"" for payload in brought)
        demand(values == wanted, "values that were not brought", record, wanted)

    def unlearn_rounds(self, job: str, barrier_id: str, last: int) -> None:
        """Rounds after ``last`` were lost with the coordinator's power."""
        for who in [k for k in self._last_round if k[0] == job and k[2] == barrier_id]:
            self._last_round[who] = min(self._last_round[who], last)

    # Checkpoints

    def part_size(self, job: str, checkpoint_id: str, incarnation: int, round_: int = 0) -> int:
        """A size in bytes that shows in the sum which parts were committed.

        ``round_`` says at which pass through a step the part was made.
        """
        writers = self._part_writers[job, checkpoint_id]
        writers.append(incarnation)
        self._part_passes[job, checkpoint_id].append(round_)
        return 1 << len(writers) - 1

    def writers(self, job: str, record: CheckpointRecord) -> list[int]:
        """The incarnations whose parts are in a commit."""
        bits = enumerate(self._part_writers[job, record.checkpoint_id])
        return [who for n, who in bits if record.size_bytes >> n & 1]

    def passes(self, job: str, record: CheckpointRecord) -> set[int]:
        """The passes through the step at which the parts of a commit were made."""
        bits = enumerate(self._part_passes[job, record.checkpoint_id])
        return {at for n, at in bits if record.size_bytes >> n & 1}

    def saved(self, command: c.NotifyCheckpoint, outcome: Any) -> None:
        """A program is told the outcome of a save."""
        record = self._jobs[command.job].stored_commits.get(command.checkpoint_id)
        if isinstance(outcome, c.Committed):
            demand(record, "told of a commit that is not stored", command)
            assert record is not None
            theirs = not command.partial or command.incarnation in self.writers(command.job, record)
            demand(theirs, "told of a commit without a part of its own", command, record)
        elif isinstance(outcome, c.Aborted):
            included = record and record.size_bytes & command.size_bytes
            demand(not included, "told of an abort, and committed", command, record)
            self.aborted_parts[command.job, command.checkpoint_id] |= command.size_bytes
