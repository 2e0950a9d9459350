"""Being told to go: SIGTERM, or a file that appears."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

LOOK_SECONDS = 0.5


class Notices:
    """Watches for a notice that this process is going to be stopped.

    The first SIGTERM is a notice; with the second one everything is as if there were no run. The
    handler only takes a note: it may interrupt anything, also code that holds a lock.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | None,
        *,
        signals: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file or os.environ.get("STRATA_PREEMPTION_FILE") or None
        self._signals = signals
        self._clock = clock
        self._looked = -LOOK_SECONDS
        self._previous: Any = None
        self._installed = False
        self._since: float | None = None
        self.reason = ""
        """What the notice was."""

    @property
    def seconds(self) -> float:
        """How long ago the notice came."""
        return 0.0 if self._since is None else self._clock() - self._since

    def install(self) -> None:
        """Begin to listen for SIGTERM; only the main thread can."""
        if self._signals and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def remove(self) -> None:
        """Listen no longer."""
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def look(self) -> bool:
        """Whether there is a notice; looks for the file, but not all the time."""
        if self._since is not None:
            return True
        now = self._clock()
        if self._file and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            if os.path.exists(self._file):
                self._since, self.reason = now, f"{os.fspath(self._file)} appeared"
        return self._since is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.remove()
        self._since, self.reason = self._clock(), "SIGTERM"
