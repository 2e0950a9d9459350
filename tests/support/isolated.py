"""Tests that need a process of their own.

JAX starts threads when it is first used, and a process with threads cannot be forked safely: its
tests would endanger all others that fork. They are in files named ``*_cases.py``, which pytest does
not collect by itself.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def run_cases(file: Path, timeout: float = 240) -> None:
    """Run all tests of a file in another process; fails with its report."""
    if find_spec("jax") is None:
        pytest.skip("needs jax")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
