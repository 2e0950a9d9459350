"""Deaths of workers while they come together, at exact points.

The torture leaves a file, and the worker that comes first to the point that it names takes it away
and dies. The points are where workers meet: at the roll call, and when they compare what each has
restored; before a worker comes there, and after all have.
"""

import os
import signal
from pathlib import Path
from typing import Any

from dtruntime import TrainingOrchestrator

FORMING = ("before assemble", "after assemble", "before restored", "after restored")
MARK = "die"


def die_where_told(folder: Path) -> None:
    """Look for the file at all of these points, from now on."""
    meet = TrainingOrchestrator.meet_async

    async def watched(self: TrainingOrchestrator, name: str, *args: Any, **options: Any) -> Any:
        point = name.rpartition(":")[2]
        _die(folder, f"before {point}")
        met = await meet(self, name, *args, **options)
        _die(folder, f"after {point}")
        return met

    TrainingOrchestrator.meet_async = watched  # type: ignore[method-assign]


def _die(folder: Path, point: str) -> None:
    mark = folder / MARK
    try:
        if mark.read_text() == point:
            # Only one of those who see it can take it away.
            mark.rename(folder / f"died-{os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)
    except FileNotFoundError:
        return
