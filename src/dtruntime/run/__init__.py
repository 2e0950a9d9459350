"""Runs: training loops that resume, save, recover and end by themselves.

The *crew* are the ranks that train together; a *roll call* decides who they are; *formation* puts
them into the same state; the *step gate* makes all do something after the same step; a *stream*
gives batches. Read ``run`` first, then ``loop`` and ``formation``.
"""

from .crew import Crew
from .recovery import Recovery
from .run import Run
from .run_checkpoints import load_tracked

__all__ = ["Crew", "Recovery", "Run", "load_tracked"]
