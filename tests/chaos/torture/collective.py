"""A sum over a crew by direct connections, which fails as the collectives of torch do.

A process that is killed breaks its connections at once, and the step of all others with them. One
that is only stopped breaks nothing: like `Run` with a process group, a wait ends when the
coordinator says that somebody was lost.
"""

import contextlib
import select
import socket
import struct
from pathlib import Path

from dtruntime.run import Crew, Run
from dtruntime.run.crew import has_lost

LOOK_SECONDS = 0.1
FRAME = struct.Struct("!IQ")
"""A step, and a value."""
MASK = 2**64 - 1


class Collective:
    """Connections of the present crew: all to its first member, which adds up."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._crew: Crew | None = None
        self._peers: list[socket.socket] = []

    def sum(self, value: int) -> int:
        """The sum of all members' values for this step; ``OSError`` when somebody is lost."""
        try:
            if self._crew is not self._run.crew:
                self.close()
                self._connect()
            return self._add_up(value) if self._run.crew.leads else self._ask(value)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """End all connections, so that nobody waits for this process."""
        self._crew = None
        for peer in self._peers:
            peer.close()
        self._peers.clear()

    def _add_up(self, value: int) -> int:
        step = self._run.step
        for peer in self._peers:
            theirs, part = FRAME.unpack(self._receive(peer))
            if theirs != step:
                raise AssertionError(f"ranks are out of step: {theirs} meets {step}")
            value += part
        for peer in self._peers:
            peer.sendall(FRAME.pack(step, value & MASK))
        return value

    def _ask(self, value: int) -> int:
        self._peers[0].sendall(FRAME.pack(self._run.step, value))
        return int(FRAME.unpack(self._receive(self._peers[0]))[1])

    def _connect(self) -> None:
        crew = self._run.crew
        path = self._folder / str(crew.generation)
        if crew.leads:
            self._accept(path, crew.size - 1)
        else:
            self._peers.append(self._reach(path))
        self._crew = crew

    def _accept(self, path: Path, members: int) -> None:
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            while len(self._peers) < members:
                self._wait_for(listener)
                self._peers.append(listener.accept()[0])

    def _reach(self, path: Path) -> socket.socket:
        while True:
            peer = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                peer.connect(str(path))
                return peer
            peer.close()
            self._check()
            select.select([], [], [], LOOK_SECONDS / 10)

    def _receive(self, peer: socket.socket) -> bytes:
        data = b""
        while len(data) < FRAME.size:
            self._wait_for(peer)
            more = peer.recv(FRAME.size - len(data))
            if not more:
                raise ConnectionResetError("a peer has closed its connection")
            data += more
        return data

    def _wait_for(self, peer: socket.socket) -> None:
        while not select.select([peer], [], [], LOOK_SECONDS)[0]:
            self._check()

    def _check(self) -> None:
        worker = self._run.orchestrator
        assert worker is not None
        if has_lost(worker, self._run.crew):
            raise ConnectionAbortedError("somebody was lost")
