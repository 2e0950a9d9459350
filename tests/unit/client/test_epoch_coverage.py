"""Digests from the coordinator, held against the samples of a dataset."""

from typing import Any

import numpy as np
import pytest

from dtruntime.client.loaders import coverage_of
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.sharding import coverage_digest
from dtruntime.sharding.coverage_digest import _STRETCH as CHUNK
from dtruntime.sharding.coverage_digest import whole
from dtruntime.types import EpochCoverage

TOTAL = 3200


def epoch(samples: np.ndarray, **fields: Any) -> EpochCoverage:
    digest = coverage_digest.Digest(TOTAL)
    digest.add(samples)
    message = pb.Coverage(
        epoch=1, digest=digest.to_bytes(), complete=True, **{"expected": TOTAL, **fields}
    )
    (found,) = coverage_of(TOTAL, [message])
    return found


def test_digest_of_all_samples_is_that_of_the_parts_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    total = CHUNK + 5
    assert whole(total, lambda done, of: told.append((done, of))) == coverage_digest.whole(total)
    assert told == [(CHUNK, total), (total, total)]


def test_nothing_is_counted_when_no_epoch_is_known() -> None:
    told: list[int] = []
    assert coverage_of(TOTAL, [], lambda done, of: told.append(done)) == []
    assert not told


@pytest.mark.parametrize(
    ("samples", "fields", "expected"),
    [
        (np.arange(TOTAL), {}, (TOTAL, 0, 0)),
        (np.arange(TOTAL)[::-1].copy(), {}, (TOTAL, 0, 0)),
        (np.arange(3000), {"dropped": 200}, (3000, 0, 0)),
        (np.arange(3000), {"assumed": 200}, (3000, 0, 0)),
        (np.arange(3000), {"expected": 3000}, (3000, 0, 0)),
        (np.arange(3000), {"dropped": 150}, (3000, 50, 0)),
        (np.arange(3000), {}, (3000, 200, 0)),
        (np.append(np.arange(TOTAL), [7, 8]), {}, (TOTAL, 0, 2)),
        (np.append(np.arange(TOTAL - 1), 3150), {}, (TOTAL - 1, 1, 1)),
    ],
)
def test_verdict(
    samples: np.ndarray, fields: dict[str, int], expected: tuple[int, int, int]
) -> None:
    found = epoch(samples, **fields)
    assert (found.covered, found.missing, found.repeated) == expected
    assert bool(found.suspect) == bool(found.missing or found.repeated)
    assert found.exact == (expected[1:] == (0, 0) and not fields.get("assumed"))


def test_epoch_that_is_not_complete_is_not_exact() -> None:
    assert not EpochCoverage(0, 10, 10, 0, 0).exact
    assert EpochCoverage(0, 10, 10, 0, 0, complete=True).exact
