"""torch's process group of a crew, made anew whenever the crew changes.

If a rank dies while the group forms, torch waits for it and cannot be stopped. So the group forms
on a thread of its own. When the crew is given up, the group's connections are shut down, which ends
nearly all of these waits; a thread that waits all the same is left behind with what it holds.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import ConfigError
from ..crew import Crew

AUTO = "auto"
"""The backend for the devices of what is tracked."""
END_SECONDS = 1.0
"""How long a group that is given up may take to stop forming."""


class Forming:
    """A group that is being formed on a thread of its own."""

    def __init__(self) -> None:
        self.ended: Future[None] = Future()
        self.given_up = threading.Event()
        self.before = _open_sockets()
        """The connections that are not the group's."""
        self.opened: set[tuple[int, int]] = set()
        """The group's connections, once it has formed."""


class ProcessGroup:
    """torch's default process group, of the ranks of a crew."""

    def __init__(
        self,
        backend: str,
        timeout_seconds: float,
        coordinator_host: str,
        devices: Callable[[], Iterable[str]],
    ) -> None:
        """``devices`` are those of the tensors that will be exchanged, for ``auto``."""
        self._requested = self._backend = backend
        self._devices = devices
        self._formed = False
        self._host = coordinator_host
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store: Any = None
        self._forming: Forming | None = None
        self._sockets: set[tuple[int, int]] = set()
        """The connections that the group has opened: file and inode."""
        self.crew: Crew | None = None
        """The crew that trains with it."""

    @property
    def timeout_seconds(self) -> float:
        """How long forming, or a collective, may take."""
        return self._timeout.total_seconds()

    def offer(self, crew: Crew) -> bytes:
        """The backend that this worker needs and, from the crew's leader, its address."""
        if is_initialized():
            raise ConfigError(
                f"process_group={self._requested!r} lets the run make torch's process group, and "
                "the program has made it already: leave one of them out"
            )
        if self._requested == AUTO:
            self._backend = backend_for(self._devices())
        return f"{self._backend} {self._address(crew)}".encode()

    def _address(self, crew: Crew) -> str:
        if not crew.leads:
            return ""
        host, before = _address_towards(self._host), _open_sockets()
        self._store = dist.TCPStore(
            host, 0, crew.size, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        self._sockets = _open_sockets() - before
        return f"{host}:{self._store.port}"

    def form(self, crew: Crew, offers: Mapping[int, bytes]) -> Future[None]:
        """Begin to form the group from what the ranks offer; the future is done when it has formed.

        Then `settle`, once all ranks have formed it, or `leave`, also while it is being formed.
        """
        parts = {rank: offer.decode().partition(" ") for rank, offer in offers.items()}
        backends = {rank: backend for rank, (backend, _, _) in parts.items()}
        if len(set(backends.values())) > 1:
            raise ConfigError(
                f"workers need different process groups by the devices of their parameters, by "
                f"rank {backends}: all have to train on the same kind of device"
            )
        self._forming = Forming()
        args = self._forming, crew, self._store, parts[crew.ranks[0]][2]
        # Nobody waits for this thread at the end of the process.
        name = "strata-process-group"
        threading.Thread(target=self._run, args=args, name=name, daemon=True).start()
        return self._forming.ended

    def _run(self, forming: Forming, crew: Crew, store: Any, address: str) -> None:
        try:
            self._join(forming, crew, store or self._connect(crew, address))
        except Exception as exc:
            forming.ended.set_exception(exc)
        else:
            forming.ended.set_result(None)

    def _join(self, forming: Forming, crew: Crew, store: Any) -> None:
        if forming.given_up.is_set():
            return
        # The name by which ranks find each other has the number of groups that torch has made,
        # also of those that failed, of which newcomers have seen none.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"generation-{crew.generation}", store),
            rank=crew.index,
            world_size=crew.size,
            timeout=self._timeout,
        )
        forming.opened = _open_sockets() - forming.before
        if forming.given_up.is_set():
            dist.destroy_process_group()

    def _connect(self, crew: Crew, address: str) -> Any:
        host, _, port = address.rpartition(":")
        return dist.TCPStore(host, int(port), crew.size, is_master=False, timeout=self._timeout)

    def settle(self) -> None:
        """The group has formed on all ranks."""
        assert self._forming is not None
        self._sockets |= self._forming.opened
        self._forming, self._formed = None, True

    def interrupt(self) -> None:
        """End collectives under way, here and on ranks that wait for this one; from any thread.

        NCCL can abort. Gloo cannot, and would wait for its timeout: its connections are shut down.
        """
        sockets, self._sockets = self._sockets, set()
        forming = self._forming
        if forming is not None:
            sockets |= _open_sockets() - forming.before
        elif sockets and self._formed and "nccl" in self._backend:
            dist.distributed_c10d._abort_process_group()
            if self._backend == "nccl":
                return
        for number, inode in sockets:
            _shut_down(number, inode)

    def leave(self) -> None:
        """Leave the group, when no other rank waits for this one any more."""
        self.crew, self._sockets = None, set()
        formed, self._formed = self._formed, False
        forming, self._forming = self._forming, None
        if forming is not None:
            forming.given_up.set()
            formed = bool(wait([forming.ended], END_SECONDS).done)
        if formed and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


def is_initialized() -> bool:
    """Whether the process has a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def backend_for(devices: Iterable[str]) -> str:
    """torch's backends for kinds of devices."""
    kinds = sorted(set(devices)) or ["cpu"]
    backends = {"cpu": "gloo", "cuda": "nccl"}
    if other := [kind for kind in kinds if kind not in backends]:
        raise ConfigError(
            f"process_group='auto' knows cpu and cuda, and parameters are on {', '.join(other)}: "
            "name the backend of torch that is to be used"
        )
    if len(kinds) == 1:
        return backends[kinds[0]]
    return ",".join(f"{kind}:{backends[kind]}" for kind in kinds)


def _open_sockets() -> set[tuple[int, int]]:
    """The sockets of this process: file and inode."""
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


def _shut_down(number: int, inode: int) -> None:
    """Shut a connection down, unless the file is another one by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        same = os.fstat(connection.fileno()).st_ino == inode
        if same and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def _address_towards(host: str) -> str:
    """This machine's address on the way to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
