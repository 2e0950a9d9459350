"""torch's process group among a crew, made anew whenever the crew changes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .crew import Crew

BUCKET_BYTES = 32 * 2**20


class ProcessGroup:
    """The default process group of torch, among the ranks of a crew."""

    def __init__(self, backend: str, timeout_seconds: float, coordinator_host: str) -> None:
        self._backend = backend
        self._host = coordinator_host
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store: Any = None
        self._sockets: set[tuple[int, int]] = set()
        """The connections that the group has opened: file and inode."""

    def address(self, crew: Crew) -> bytes:
        """Where the crew's leader waits for the others; nothing from everybody else."""
        if not crew.leads or crew.size == 1:
            return b""
        host = _address_towards(self._host)
        self._store = dist.TCPStore(
            host, 0, crew.size, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        return f"{host}:{self._store.port}".encode()

    def form(self, crew: Crew, address: bytes) -> None:
        """Come together at the leader's address."""
        if crew.size == 1:
            return
        if not crew.leads:
            host, _, port = address.decode().rpartition(":")
            self._store = dist.TCPStore(
                host, int(port), crew.size, is_master=False, timeout=self._timeout
            )
        before = _open_sockets()
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
        if sockets and self._backend == "nccl":
            dist.distributed_c10d._abort_process_group()
            return
        for number, inode in sockets:
            _shut_down(number, inode)

    def leave(self) -> None:
        """Break up, when nobody waits for this rank any more."""
        self._sockets = set()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


def is_initialized() -> bool:
    """Whether the process has a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def average_gradients(parameters: Iterable[Any], samples: int, crew: Crew) -> None:
    """Replace gradients by their mean over all samples of the crew's batches.

    A rank without samples takes part with zeros.
    """
    if crew.size == 1:
        return
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in wanted:
        if parameter.grad is None or not samples:
            parameter.grad = torch.zeros_like(parameter)
    if not wanted:
        return
    count = torch.tensor([samples], dtype=torch.float64, device=wanted[0].device)
    dist.all_reduce(count)
    share = samples / max(1.0, float(count))
    for bucket in _buckets([parameter.grad for parameter in wanted]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat.mul_(share)
        dist.all_reduce(flat)
        at = 0
        for gradient in bucket:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()


def _buckets(gradients: list[Any]) -> Iterator[list[Any]]:
    """Gradients of one type and device together, up to a size."""
    bucket: list[Any] = []
    size = 0
    for gradient in gradients:
        other = bucket and (
            gradient.dtype != bucket[0].dtype or gradient.device != bucket[0].device
        )
        if bucket and (other or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket


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
