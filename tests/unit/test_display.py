import pytest

from dtruntime.display import count, duration, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 µs"),
        (0.0000123, "12.3 µs"),
        (0.00012, "120 µs"),
        (0.00099999, "1.0 ms"),
        (0.0018, "1.8 ms"),
        (0.123, "123 ms"),
        (0.99999, "1.0 s"),
        (4.24, "4.2 s"),
        (59.94, "59.9 s"),
        (60.0, "1 m 00 s"),
        (192.9, "3 m 12 s"),
        (3600.0, "1 h 00 m"),
        (7500.0, "2 h 05 m"),
        (86400 * 3 + 3600 * 4, "3 d 4 h"),
        (-0.25, "-250 ms"),
    ],
)
def test_duration_is_short_and_has_its_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_count_and_size_read_like_prose() -> None:
    assert count(1, "barrier") == "1 barrier"
    assert count(0, "worker") == "0 workers"
    assert count(12_345, "worker") == "12,345 workers"
    assert size(159_532) == "159.5 kB"
