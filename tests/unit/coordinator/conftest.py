import pytest

from tests.unit.coordinator.bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
