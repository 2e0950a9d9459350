"""Rounds of killing processes that save checkpoints, and what has to hold after each."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from dtruntime.checkpoint.file_format.manifest import PACKS
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.store import writer_lock
from dtruntime.checkpoint.store.catalog import Catalog
from dtruntime.checkpoint.store.writer_lock import WriterLock
from dtruntime.storage import open_backend
from dtruntime.storage.backend import PARTIAL
from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.support.paths import PROGRAMS
from tests.support.programs.checkpoint_savers import AT_ONCE, KEEP, MODES, content, load, same

SAVERS = PROGRAMS / "checkpoint_savers.py"
LONG_AGO = 3600.0


class Saver:
    """One forked process."""

    def __init__(self, savers: "Savers", pid: int) -> None:
        self._savers = savers
        self.pid = pid
        self._code: int | None = None

    @property
    def said(self) -> list[str]:
        start = f"{self.pid} "
        return [x.removeprefix(start) for x in self._savers.process.lines if x.startswith(start)]

    @property
    def committed(self) -> int:
        """The last step that it reported, or 0."""
        steps = [int(line.split()[1]) for line in self.said if line.startswith("committed ")]
        return max(steps, default=0)

    def wait_for(self, start: str) -> str:
        """Wait until it says something; returns what it said last of that kind."""

        def found() -> list[str]:
            return [line for line in self.said if line.startswith(start)]

        try:
            return eventually(found, within=60, what=f"{start!r} of {self.pid}")[-1]
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {self.said}\n{self._savers.process.log[-2000:]}") from exc

    def kill(self) -> int:
        """End it, if it has not ended; returns its exit code."""
        if self._code is None:  # until it is waited for, its number is not given to another
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self._code is None:
            self._savers.process.send(f"reap {self.pid}")
            ended = self._savers.process.expect(f"ended {self.pid} ", 60)
            self._code = int(ended.split()[2])
        return self._code


class Savers:
    """The program that forks savers."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self.process = WorkerProcess(SAVERS, env={"STRATA_LOG": "error", **(env or {})})

    def start(self, name: str, **arguments: Any) -> Saver:
        self.process.send(json.dumps({"name": name, **arguments}))
        return Saver(self, int(self.process.expect("started ").split()[1]))

    def __enter__(self) -> Self:
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()


class KilledWriter:
    """A place that one process after the other saves to, and is killed."""

    def __init__(self, savers: Savers, url: str, mode: str, seed: int) -> None:
        self.savers = savers
        self.url = url
        self.mode = mode
        self.random = random.Random(f"{seed}/{mode}")
        self.reported = 0
        self.steps: list[int] = []
        self.kills = 0

    def kill_once(self) -> None:
        """Let a process save, kill it somewhere, and check what is left."""
        first = max(self.steps, default=0) + 1
        operation = self.random.randint(1, 90) if self.random.random() < 0.6 else 0
        # One that kills itself saves until it does.
        arguments = {"url": self.url, "mode": self.mode, "step": first, "saves": 1000}
        saver = self.savers.start("save_on", operation=operation, **arguments)
        if operation:
            code = saver.wait()
        else:
            saver.wait_for("committed ")
            time.sleep(self.random.uniform(0.0, 0.15))
            code = saver.kill()
        assert code == -signal.SIGKILL, saver.said
        self.kills += 1
        self.reported = max(self.reported, saver.committed)
        self.check(first)

    def check(self, first: int) -> None:
        """All that is listed loads and is right; nothing that was reported is gone."""
        with CheckpointManager(self.url) as manager:
            self.steps = manager.steps()
            assert max(self.steps, default=0) >= self.reported
            assert all(step < first + 1000 for step in self.steps)
            assert len(self.steps) <= KEEP[self.mode] + 1, "retention comes right after the commit"
            for step in self.steps:
                assert same(load(manager, self.mode, step), content(self.mode, step)), step
            if self.steps:
                self.check_newest(manager)

    def check_newest(self, manager: CheckpointManager) -> None:
        """The newest is loaded: in a folder the last one listed.

        A server may still carry out what a process has asked for before it died; then the next
        step is listed from there on, and is as good as the others.
        """
        newest = load(manager, self.mode)
        last = manager.load_latest().step
        if "://" in self.url and last != max(self.steps):
            print(f"step {last} came to the store after {self.steps} were listed")
            assert manager.steps()[-1] == last == max(self.steps) + 1
        else:
            assert last == max(self.steps)
        assert same(newest, content(self.mode, last))

    def save_in_peace(self) -> None:
        """A process that is not killed saves a few times."""
        first = max(self.steps, default=0) + 1
        saver = self.savers.start("save_on", url=self.url, mode=self.mode, step=first, saves=4)
        assert saver.wait() == 0, saver.said
        self.reported = saver.committed
        self.check(first)
        assert self.steps == list(range(first, first + 4))[-KEEP[self.mode] :]


def packs_left(mode: str) -> int:
    """Kept, of the checkpoint dropped last, and of two saves under way; differences need more."""
    return KEEP[mode] + 3 + (10 if mode == "delta" else 0)


def check_tidy(folder: Path, mode: str) -> None:
    """Of all the killed processes nothing is left in a folder but what the last one needs."""
    names = [path.name for path in (folder / "packs").iterdir()]
    assert not [name for name in names if name.startswith(PARTIAL)]
    assert len(names) <= packs_left(mode), f"{len(names)} packs after {mode}"
    assert not list((folder / "locks").iterdir())


def let_partial_files_age(folder: Path) -> int:
    """Make what killed processes left look old; returns how many files there are."""
    found = [path for path in folder.rglob(f"{PARTIAL}*") if path.is_file()]
    for path in found:
        then = time.time() - LONG_AGO
        os.utime(path, (then, then))
    return len(found)


def torture_folder(savers: Savers, folder: Path, mode: str, kills: int, seed: int) -> int:
    """Kill writers to a folder; disk usage stays bounded all the time."""
    writer = KilledWriter(savers, str(folder), mode, seed)
    for _ in range(kills):
        writer.kill_once()
        assert let_partial_files_age(folder) <= 4, "each writer collects what the last one left"
        packs = len(list((folder / "packs").iterdir())) if (folder / "packs").exists() else 0
        assert packs <= packs_left(mode) + 4
    writer.save_in_peace()
    check_tidy(folder, mode)
    return writer.kills


def torture_bucket(savers: Savers, url: str, mode: str, kills: int, seed: int) -> int:
    """Kill writers to an object store."""
    writer = KilledWriter(savers, url, mode, seed)
    for _ in range(kills):
        writer.kill_once()
        assert len(unneeded_packs(url)) <= packs_left(mode) + 4
    writer.save_in_peace()
    left = unneeded_packs(url)
    # The checkpoint dropped last, and what the server has done yet for the process killed last.
    assert len(left) <= 3, f"packs are left of killed processes: {sorted(left)}"
    clear_away(url)
    assert not unneeded_packs(url)
    return writer.kills


def clear_away(url: str) -> None:
    """What the next writer does when all others have been gone for long."""
    with open_backend(url) as backend, patch.object(writer_lock, "ORPHAN_SECONDS", AT_ONCE):
        Catalog(backend).sweep(WriterLock(backend).is_dead)


def unneeded_packs(url: str) -> list[str]:
    """Packs that no committed checkpoint needs."""
    with open_backend(url) as backend:
        catalog = Catalog(backend)
        there = [file.name for file in backend.list(PACKS)]
        needed = {file for entry in catalog.entries() for file in catalog.manifest(entry).files}
        return [name for name in there if name not in needed]


class KilledRanks:
    """Several ranks that save together, and are killed in all combinations."""

    WORLD = 3

    def __init__(
        self, savers: Savers, coordinator: LocalCoordinator, url: str, mode: str, seed: int
    ) -> None:
        self.savers = savers
        self.coordinator = coordinator
        self.url = url
        self.mode = mode
        self.random = random.Random(f"{seed}/ranks/{mode}")
        self.reported = 0
        self.kills = 0

    @contextmanager
    def ranks(self, **arguments: Any) -> Iterator[list[Saver]]:
        """All ranks, after each has checked everything; they are gone at the end."""
        started = [self.start(rank, **arguments) for rank in range(self.WORLD)]
        try:
            found = {tuple(json.loads(r.wait_for("found ")[6:])) for r in started}
            assert len(found) == 1, f"ranks see different checkpoints: {found}"
            assert max(found.pop(), default=0) >= self.reported
            yield started
        finally:
            for rank in started:
                rank.kill()
                self.reported = max(self.reported, rank.committed)
                assert not [line for line in rank.said if line.startswith("wrong")]

    def start(self, rank: int, **arguments: Any) -> Saver:
        arguments = {"die_before_manifest": False, **arguments}
        place = {"url": self.url, "coordinator": self.coordinator.url, "mode": self.mode}
        return self.savers.start("save_rank", rank=rank, world=self.WORLD, **place, **arguments)

    def kill_once(self, how: str) -> None:
        """``all`` ranks, ``one`` of them (a new one takes its place), the ``coordinator``, or
        all when the coordinator has committed and the ``manifest`` is not written."""
        self.kills += 1
        with self.ranks(die_before_manifest=how == "manifest") as ranks:
            if how == "manifest":
                assert ranks[0].wait() == -signal.SIGKILL
                ranks[1].wait_for("committed ")
                return
            ranks[0].wait_for("committed ")
            time.sleep(self.random.uniform(0.0, 0.15))
            if how == "one":
                self._replace(ranks, self.random.randrange(self.WORLD))
            elif how == "coordinator":
                self._restart_coordinator(ranks)

    def _restart_coordinator(self, ranks: list[Saver]) -> None:
        """Saves ride through it, or fail because somebody's wait for the commit was cut off."""
        self.coordinator.kill()
        before = ranks[0].committed
        self.coordinator.start()

        def goes_on() -> bool:
            failed = any(line.startswith("failed ") for rank in ranks for line in rank.said)
            return failed or ranks[0].committed > before + 1

        eventually(goes_on, within=60)

    def _replace(self, ranks: list[Saver], victim: int) -> None:
        """Kill a rank; the one in its place makes the others' saves fail, with a reason."""
        ranks[victim].kill()
        self.reported = max(self.reported, ranks[victim].committed)
        ranks[victim] = self.start(victim)
        for number, rank in enumerate(ranks):
            if number != victim:
                assert "worker-" in rank.wait_for("failed "), rank.said
        ranks[victim].wait_for("found ")


HOWS = ("all", "one", "coordinator", "manifest")


def torture_ranks(
    savers: Savers, coordinator: LocalCoordinator, url: str, mode: str, kills: int, seed: int
) -> int:
    """Kill ranks and their coordinator."""
    killed = KilledRanks(savers, coordinator, url, mode, seed)
    hows = [HOWS[number % len(HOWS)] for number in range(kills)]
    killed.random.shuffle(hows)
    for how in hows:
        killed.kill_once(how)
    with killed.ranks() as ranks:
        before = killed.reported
        eventually(lambda: ranks[0].committed > before + 3, within=60, what="saves in peace")
    left = unneeded_packs(url)
    # Two saves were under way, and a checkpoint had just been dropped. In a bucket, where nobody
    # can tell for some hours which ranks are gone, that is so of each kill.
    times = 1 + kills if "://" in url else 1
    assert len(left) <= 4 * killed.WORLD * times, f"left of killed ranks: {sorted(left)}"
    clear_away(url)
    assert not unneeded_packs(url)
    return killed.kills


__all__ = ["HOWS", "MODES", "KilledRanks", "Savers", "torture_bucket", "torture_folder"]
