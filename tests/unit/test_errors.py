"""The error tree as users catch it."""

import builtins
import copy
import pickle

import pytest

from dtruntime import errors
from dtruntime.errors import StrataError, SyncError

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, StrataError)
]


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (errors.ConnectionError, builtins.ConnectionError),
        (errors.StorageError, OSError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointNotFoundError, errors.StorageError),
        (errors.ShardNotFoundError, LookupError),
        (errors.ShardNotFoundError, errors.ShardError),
        (errors.ShardValueError, ValueError),
        (errors.ShardValueError, errors.ShardError),
        (errors.ConfigError, ValueError),
    ],
)
def test_error_can_be_caught_as_its_builtin_relative(
    error: type[StrataError], also: type[Exception]
) -> None:
    assert issubclass(error, StrataError)
    with pytest.raises(also, match="what happened"):
        raise error("what happened")


@pytest.mark.parametrize("error", ALL)
def test_every_error_says_what_it_means(error: type[StrataError]) -> None:
    assert error.__doc__


def test_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    assert all(error.__name__ in errors.__doc__ for error in ALL)


def test_sync_error_carries_the_outcome() -> None:
    error = SyncError(
        "message",
        reason="timeout",
        missing={"worker-1": 7, "worker-2": None},
        missing_count=300,
        generation=4,
    )
    assert str(error) == "message"
    assert (error.reason, error.generation) == ("timeout", 4)
    assert error.missing == {"worker-1": 7, "worker-2": None}
    assert error.missing_count == 300
    assert (error.lost, error.survivors) == ({}, ())
    assert SyncError("m", reason="timeout", missing={"w": 1}).missing_count == 1


@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_sync_error_survives_the_way_between_processes(duplicate: object) -> None:
    error = SyncError(
        "message",
        reason="membership_changed",
        missing={"worker-1": 7},
        missing_count=3,
        lost={"worker-2": "no heartbeat"},
        survivors=(0, 1),
        generation=9,
    )
    again = duplicate(error)  # type: ignore[operator]
    assert type(again) is SyncError
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize("error", [e for e in ALL if e is not SyncError])
def test_other_errors_survive_the_way_between_processes(error: type[StrataError]) -> None:
    again = pickle.loads(pickle.dumps(error("message")))
    assert type(again) is error
    assert str(again) == "message"
