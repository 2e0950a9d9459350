import pytest

from dtruntime.cli.doctor_checks import required_packages, within


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("1.72.1", ">=1.72.1,<2", True),
        ("1.72.0", ">=1.72.1,<2", False),
        ("1.100", "<2,>=1.72.1", True),
        ("2.0.0", ">=1.72.1,<2", False),
        ("2", ">=2.0,<3", True),
        ("6.33.6.post1", ">=6.31.1,<8", True),
        ("3.0.0rc1", ">=3", True),
        ("1.0", "", True),
    ],
)
def test_version_is_compared_by_numbers(version: str, bounds: str, expected: bool) -> None:
    assert within(version, bounds) is expected


def test_required_packages_are_those_of_the_distribution_without_extras() -> None:
    required = required_packages()

    assert required["grpcio"] in (">=1.72.1,<2", "<2,>=1.72.1")
    assert {"msgspec", "numpy", "obstore", "protobuf", "psutil", "pyarrow", "rich"} <= set(required)
    assert not {"jax", "pytest", "torch", "uvloop"} & set(required)
