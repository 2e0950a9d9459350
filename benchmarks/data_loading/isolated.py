"""A measurement in a process of its own, and what several of them come to."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class ProcessFailed(Exception):
    """A measuring process failed; the message is its last line."""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of repeated measurements."""

    median: float
    best: float
    worst: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The median and the extremes."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))


def call(python: Path, module: str, *arguments: object, seconds: float = 600) -> dict[str, Any]:
    """Run a module and return the JSON in the last line that it prints."""
    done = subprocess.run(
        [python, "-W", "ignore", "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        raise ProcessFailed(done.stderr.strip().rpartition("\n")[2][:300])
    answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return answer


def environment() -> dict[str, str]:
    """What a measuring process finds its modules with."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}


@contextmanager
def traced_peak() -> Iterator[Callable[[], int]]:
    """Follow what is allocated; the function says how many bytes there were at most."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
