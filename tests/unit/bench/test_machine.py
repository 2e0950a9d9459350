"""Where it was measured."""

import os

import numpy
import pytest

from dtruntime import __version__
from dtruntime.bench.report import describe, is_busy


def test_machine_is_this_one() -> None:
    machine = describe()

    assert machine.cores == os.cpu_count()
    assert 1 <= machine.usable_cores <= machine.cores
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.strata == __version__
    assert machine.packages["numpy"] == numpy.__version__
    assert machine.busy == is_busy(machine.load_average, machine.cores)


@pytest.mark.parametrize(
    ("load", "cores", "busy"),
    [([1.1, 0, 0], 2, True), ([0.9, 9, 9], 2, False), ([1.1, 0, 0], 8, False), ([], 2, False)],
)
def test_machine_is_busy_when_others_use_more_than_half_of_it(
    load: list[float], cores: int, busy: bool
) -> None:
    assert is_busy(load, cores) == busy
