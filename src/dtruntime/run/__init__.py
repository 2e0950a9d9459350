"""Runs: training loops that resume, save, recover and end by themselves."""

from .crew import Crew
from .recovery import Recovery
from .results import load_tracked
from .run import Run

__all__ = ["Crew", "Recovery", "Run", "load_tracked"]
