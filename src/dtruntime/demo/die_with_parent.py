"""Ends processes when the one that started them is gone, however that came about.

Whoever starts one holds the other end of its standard input and never writes: the input ends with
the holder, also when that was killed in a way that it could not clean up after.

``python -m dtruntime.demo.die_with_parent FILE`` ends the process whose number is in a file then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path


def end_with_parent() -> None:
    """End this process with the one that holds its input."""

    def watch() -> None:
        # Not sys.stdin: its lock, held by this thread, would stop the interpreter's end.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Wait, then end the process; without the file there is none any more."""
    os.read(0, 1)
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(Path(sys.argv[1]).read_text()), signal.SIGTERM)


if __name__ == "__main__":
    main()
