"""A measurement in a process of its own, and what several of them come to."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
from collections.abc import Iterable
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
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        raise ProcessFailed(done.stderr.strip().rpartition("\n")[2][:300])
    answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return answer


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
