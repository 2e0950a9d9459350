"""This machine: the disk under the coordinator's state, file descriptors, memory."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ...display import count, duration, size
from .finding import Finding, Verdict

GROUP = "this machine"
SYNCS = 16
SYNC_BYTES = 4096
SLOW_SYNC_SECONDS = 0.02
LITTLE_SPACE = 1_000_000_000
NO_SPACE = 50_000_000
LITTLE_MEMORY = 500_000_000
SPARE_DESCRIPTORS = 64
"""What a coordinator needs besides one per worker."""
_VOLATILE = {"tmpfs", "ramfs"}
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph"}
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


def check_machine(data_dir: Path, workers: int) -> Iterator[Finding]:
    """``workers`` is how many a coordinator here has or will have, 0 when nobody knows."""
    folder = _existing(data_dir.absolute())
    there = folder == data_dir.absolute()
    where = str(data_dir) if there else f"{folder} ({data_dir} is not there yet)"
    yield _space(folder, where)
    yield _sync(folder, where)
    if (kind := _filesystem(folder)) is not None:
        yield kind
    yield _descriptors(workers)
    yield _memory()


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _space(folder: Path, where: str) -> Finding:
    free = shutil.disk_usage(folder).free
    verdict: Verdict = "ok" if free >= LITTLE_SPACE else "warn" if free >= NO_SPACE else "fail"
    remedy = "" if verdict == "ok" else "free some space, or use another --data-dir"
    text = f"{size(free)} free in {where}"
    return Finding(GROUP, "disk space", verdict, text, remedy, {"free_bytes": free})


def _sync(folder: Path, where: str) -> Finding:
    """Write and sync for real: every registration and commit waits for that."""
    try:
        times = sorted(_sync_times(folder))
    except OSError as exc:
        remedy = "give this user the right to write there, or use another --data-dir"
        return Finding(GROUP, "disk sync", "fail", f"cannot write in {where}: {exc}", remedy)
    median = statistics.median(times)
    text = f"fsync takes {duration(median)} (median of {len(times)}), at most {duration(times[-1])}"
    measured = {"median_seconds": median, "longest_seconds": times[-1]}
    if median > SLOW_SYNC_SECONDS:
        remedy = "put --data-dir on a local SSD: registrations and commits wait for the disk"
        return Finding(GROUP, "disk sync", "warn", text, remedy, measured)
    return Finding(GROUP, "disk sync", "ok", text, measured=measured)


def _sync_times(folder: Path) -> Iterator[float]:
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            started = time.perf_counter()
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            yield time.perf_counter() - started


def _filesystem(folder: Path) -> Finding | None:
    """A warning when the file system is no place for a database."""
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)]
    if not mounts:
        return None
    mount = max(mounts, key=lambda p: len(p.mountpoint))
    where = f"{folder} is on {mount.fstype}"
    if mount.fstype in _VOLATILE:
        remedy = "use a --data-dir on a disk, or the coordinator forgets its jobs at a reboot"
        return Finding(GROUP, "file system", "warn", f"{where}, which is memory", remedy)
    if mount.fstype in _REMOTE:
        remedy = "use a --data-dir on a local disk: SQLite's log needs one"
        return Finding(GROUP, "file system", "warn", f"{where}, over a network", remedy)
    return Finding(GROUP, "file system", "ok", where)


def _descriptors(workers: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding(GROUP, "open files", "ok", "no limit")
    room = max(0, soft - SPARE_DESCRIPTORS)
    text = f"limit {soft:,}: a coordinator started here serves {count(room, 'worker')}"
    measured = {"soft_limit": soft, "hard_limit": hard}
    if workers > room:
        needed = workers + SPARE_DESCRIPTORS
        text += f", and there are {workers:,}"
        remedy = f"ulimit -n {needed} (systemd: LimitNOFILE={needed}) before starting it"
        return Finding(GROUP, "open files", "warn", text, remedy, measured)
    return Finding(GROUP, "open files", "ok", text, measured=measured)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    limit = _cgroup_limit()
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit)
    text = f"{size(available)} of {size(total)} available"
    measured = {"available_bytes": float(available), "total_bytes": float(total)}
    if available < LITTLE_MEMORY:
        remedy = "end something, or use a larger machine: what runs out of memory is killed"
        return Finding(GROUP, "memory", "warn", text, remedy, measured)
    return Finding(GROUP, "memory", "ok", text, measured=measured)


def _cgroup_limit() -> int | None:
    """The memory limit of this container, if there is one."""
    try:
        text = _CGROUP_MEMORY.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
