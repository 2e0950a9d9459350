"""torch's process group among a crew, made anew whenever the crew changes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError
from .crew import Crew

AUTO = "auto"
"""The backend that suits the devices of what is tracked."""


class ProcessGroup:
    """The default process group of torch, among the ranks of a crew."""

    def __init__(
        self,
        backend: str,
        timeout_seconds: float,
        coordinator_host: str,
        devices: Callable[[], Iterable[str]],
    ) -> None:
        """``devices`` says where the tensors are that will be exchanged, for ``auto``."""
        self._wanted = backend
        self._backend = backend
        self._devices = devices
        self._formed = False
        self._host = coordinator_host
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store: Any = None
        self._sockets: set[tuple[int, int]] = set()
        """The connections that the group has opened: file and inode."""

    def offer(self, crew: Crew) -> bytes:
        """The backend that this worker needs and, from the crew's leader, where it waits."""
        if crew.size == 1:
            return b""
        if is_initialized():
            raise ConfigError(
                f"process_group={self._wanted!r} lets the run make torch's process group, and the "
                "program has made it already: leave out one of both"
            )
        self._backend = backend_for(self._devices()) if self._wanted == AUTO else self._wanted
        return f"{self._backend} {self._address(crew)}".encode()

    def _address(self, crew: Crew) -> str:
        if not crew.leads:
            return ""
        host = _address_towards(self._host)
        self._store = dist.TCPStore(
            host, 0, crew.size, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        return f"{host}:{self._store.port}"

    def form(self, crew: Crew, offers: Mapping[int, bytes]) -> None:
        """Come together, by what each rank has offered."""
        if crew.size == 1:
            return
        found = {rank: offer.decode().partition(" ") for rank, offer in offers.items()}
        backends = {rank: backend for rank, (backend, _, _) in found.items()}
        if len(set(backends.values())) > 1:
            raise ConfigError(
                f"workers need different process groups by the devices of their parameters, by "
                f"rank {backends}: all have to train on the same kind of device"
            )
        if not crew.leads:
            host, _, port = found[crew.ranks[0]][2].rpartition(":")
            self._store = dist.TCPStore(
                host, int(port), crew.size, is_master=False, timeout=self._timeout
            )
        before = _open_sockets()
        self._formed = True
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"generation-{crew.generation}", self._store),
            rank=crew.index,
            world_size=crew.size,
            timeout=self._timeout,
        )
        self._sockets = _open_sockets() - before

    def interrupt(self) -> None:
        """End collectives that are under way, here and where others wait for this rank.

        May be called from any thread. NCCL can abort; Gloo cannot, and a rank that waits for one
        that does not answer would wait for the timeout: so its connections are shut down.
        """
        sockets, self._sockets = self._sockets, set()
        if sockets and "nccl" in self._backend:
            dist.distributed_c10d._abort_process_group()
            if self._backend == "nccl":
                return
        for number, inode in sockets:
            _shut_down(number, inode)

    def leave(self) -> None:
        """Break up, when nobody waits for this rank any more."""
        self._sockets = set()
        formed, self._formed = self._formed, False
        if formed and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


def is_initialized() -> bool:
    """Whether the process has a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def backend_for(devices: Iterable[str]) -> str:
    """The backends of torch for some kinds of devices."""
    kinds = sorted(set(devices)) or ["cpu"]
    known = {"cpu": "gloo", "cuda": "nccl"}
    if other := [kind for kind in kinds if kind not in known]:
        raise ConfigError(
            f"process_group='auto' knows cpu and cuda, and parameters are on {', '.join(other)}: "
            "name the backend of torch that is to be used"
        )
    if len(kinds) == 1:
        return known[kinds[0]]
    return ",".join(f"{kind}:{known[kind]}" for kind in kinds)


def _open_sockets() -> set[tuple[int, int]]:
    """The sockets of this process: file and inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _shut_down(number: int, inode: int) -> None:
    """Shut a connection down, unless its file has become another one since."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        same = os.fstat(connection.fileno()).st_ino == inode
        if same and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def _address_towards(host: str) -> str:
    """The address of this machine that is on the way to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
