import pytest

from tests.support.machine_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
