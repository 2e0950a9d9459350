"""Ends a process when the one that started it is gone, however that came about."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path


def end_with_parent(pid_file: Path) -> None:
    """End this process, and the one whose number is in a file, when the demonstration has ended.

    It holds the other end of our standard input and never writes: the input ends with it, also
    when it was killed in a way that it could not clean up after.
    """

    def watch() -> None:
        # Not sys.stdin: its lock, held by this thread, would stop the interpreter's end.
        os.read(0, 1)
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
