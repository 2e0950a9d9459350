"""What the HTTP API says of checkpoints that retention will drop."""

from dtruntime.coordinator.state.checkpoints.history import (
    RetentionForecast,
    users_metadata,
    written_bytes,
)
from dtruntime.coordinator.state.records import CheckpointRecord
from dtruntime.retention import PLACE_KEY, RETENTION_KEY, WRITTEN_KEY, Retention


def record(number: int, policy: Retention | None = None, place: str = "/c") -> CheckpointRecord:
    told = {} if policy is None else {RETENTION_KEY: policy.to_json(), PLACE_KEY: place}
    return CheckpointRecord(
        checkpoint_id=f"c-{number}",
        step=number * 10,
        epoch=0,
        path="",
        size_bytes=1,
        is_full=True,
        worker_id="worker-0",
        committed_at=0.0,
        metadata={**told, "mine": "yes"},
        sequence=number,
    )


def fates(records: list[CheckpointRecord]) -> list[bool | None]:
    found = RetentionForecast(records)
    return [found.will_be_dropped(one) for one in records]


def test_next_commit_drops_the_oldest_that_is_kept() -> None:
    policy = Retention(keep_count=3)
    assert fates([record(n, policy) for n in (1, 2, 3)]) == [True, False, False]
    assert fates([record(n, policy) for n in (1, 2)]) == [False, False]


def test_every_nth_step_is_kept() -> None:
    policy = Retention(keep_count=1, keep_every=20)
    assert fates([record(n, policy) for n in (1, 2, 3)]) == [True, False, True]


def test_newest_writer_decides() -> None:
    records = [record(1, Retention(1)), record(2, Retention(1)), record(3, Retention(None))]
    assert fates(records) == [False, False, False]


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert fates([]) == []
    assert fates([record(1), record(2)]) == [None, None]
    assert fates([record(1, Retention(1)), record(2)]) == [None, None]
    assert fates([record(1, Retention(1), "/other"), record(2, Retention(1))]) == [None, True]
    assert fates([record(n, Retention(1, keep_best=1)) for n in (1, 2)]) == [None, None]


def test_nonsense_from_the_wire_is_no_policy() -> None:
    for text in ("", "[]", "{", '{"keep_count": 0}', '{"other": 1}', '"x"', "null"):
        assert Retention.from_json(text) is None


def test_what_writers_tell_is_not_the_users_metadata() -> None:
    one = record(1, Retention())
    assert users_metadata(one.metadata) == {"mine": "yes"}
    assert written_bytes(one) is None
    for told, expected in (("123", 123), ("-1", None), ("9" * 30, None), ("٣", None)):
        one.metadata[WRITTEN_KEY] = told
        assert written_bytes(one) == expected
