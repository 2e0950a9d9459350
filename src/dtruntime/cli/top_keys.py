"""Keys of a terminal, one by one and without echo."""

from __future__ import annotations

import os
import re
import select
import termios
import tty
from types import TracebackType
from typing import Any, Self

_KEYS = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b" ": "page down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\t": "next job",
    b"s": "sort",
    b"p": "pause",
    b"q": "quit",
    b"Q": "quit",
    b"\x04": "quit",
}
_ONE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|[\s\S]")


def named(data: bytes) -> list[str]:
    """The keys that were pressed; those without a meaning are left out."""
    return [_KEYS[key] for key in _ONE.findall(data) if key in _KEYS]


class Keys:
    """Reads keys in a ``with`` block; the terminal is as before when it ends."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._before: list[Any] = []
        self._bell = -1, -1

    def wake(self) -> None:
        """Let `read` return, from any thread."""
        os.write(self._bell[1], b"!")

    def read(self, seconds: float) -> list[str]:
        """The keys pressed meanwhile; waits so long for one."""
        ready, _, _ = select.select([self._terminal, self._bell[0]], [], [], seconds)
        if self._bell[0] in ready:
            os.read(self._bell[0], 4096)
        if self._terminal not in ready:
            return []
        data = os.read(self._terminal, 1024)
        return named(data) if data else ["quit"]

    def __enter__(self) -> Self:
        self._bell = os.pipe()
        self._before = termios.tcgetattr(self._terminal)
        tty.setcbreak(self._terminal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
        for end in self._bell:
            os.close(end)
