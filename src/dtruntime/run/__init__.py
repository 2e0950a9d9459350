"""Runs: training loops that resume, save, recover and end by themselves."""

from .crew import Crew
from .recovery import Recovery
from .run import Run

__all__ = ["Crew", "Recovery", "Run"]
