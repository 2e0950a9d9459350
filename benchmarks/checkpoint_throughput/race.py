"""Contenders measured in turns, round after round."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtruntime.bench.report import Announce, in_turn

from ..harness import Kind
from ..processes import Process, ProcessFailed
from . import fio, seaweed
from .contenders import of_part
from .contenders.base import TINY
from .results import FIO_BUFFERED, FIO_DIRECT, GIB, MIB, Runner, title_of

_WORKER = "benchmarks.checkpoint_throughput.worker"
_SEED = 7


@dataclass(frozen=True, slots=True)
class Profile:
    """Rounds and sizes of one run of the benchmark."""

    rounds: int
    """How often each contender is measured in turn."""
    repeats: int
    """How often it saves, or loads, when it is its turn, after a first time."""
    save_sizes: tuple[int, ...]
    load_sizes: tuple[int, ...]
    s3_sizes: tuple[int, ...]
    s3_servers: int
    """How many servers are saved to, one after the other."""
    s3_loads: int
    writers: tuple[int, ...]
    writer_bytes: int
    steps: int
    """Saves per kind of training, after the first."""
    small_tensors: int
    s3_saves: int = 4
    """How often each contender saves to each server."""
    memory_bytes: int = GIB
    width: int = 512
    """Of the model that is trained."""


FULL = Profile(
    rounds=3,
    repeats=3,
    save_sizes=(MIB, 10 * MIB, 100 * MIB, GIB, 4 * GIB),
    load_sizes=(100 * MIB, GIB, 4 * GIB),
    s3_sizes=(100 * MIB, GIB),
    s3_servers=4,
    s3_loads=32,
    writers=(1, 4, 8),
    writer_bytes=256 * MIB,
    steps=6,
    small_tensors=200_000,
)
QUICK = Profile(
    rounds=2,
    repeats=2,
    save_sizes=(10 * MIB, GIB),
    load_sizes=(100 * MIB, GIB),
    s3_sizes=(100 * MIB,),
    s3_servers=2,
    s3_loads=8,
    writers=(1, 4),
    writer_bytes=128 * MIB,
    steps=3,
    small_tensors=20_000,
)


@dataclass(frozen=True, slots=True)
class Race:
    """Measures parts in a folder of the disk."""

    profile: Profile
    scratch: Path
    announce: Announce

    def saves(self) -> list[Runner]:
        """Saves into a folder, beside what the disk and the memory can do."""
        measured = []
        for size in self.profile.save_sizes:
            runners = _runners("local", size) + _fio_runners(size)
            for runner in self._turns(runners):
                if runner.name in (FIO_DIRECT, FIO_BUFFERED):
                    self._fio_turn(runner)
                else:
                    self._turn(runner, saves=1 + self._repeats(size))
            measured += runners
        return measured

    def loads(self) -> list[Runner]:
        """Loads from a folder, with and without the page cache."""
        measured = []
        for size in self.profile.load_sizes:
            runners = _runners("load", size)
            for runner in self._turns(runners):
                repeats = self._repeats(size)
                self._turn(runner, saves=1, loads=self.profile.repeats, cold_loads=repeats)
            measured += runners
        return measured

    def peaks(self) -> list[Runner]:
        """The memory of a first save."""
        runners = _runners("memory", self.profile.memory_bytes)
        for runner in self._turns(runners):
            self._turn(runner, saves=1)
        return runners

    def small_tensors(self) -> list[Runner]:
        """Very many small tensors: what takes long is what is done with each of them."""
        runners = _runners("small-tensors", 4 * TINY * self.profile.small_tensors)
        for runner in self._turns(runners):
            self._turn(runner, {"is_tiny": True}, saves=2, loads=1)
        return runners

    def objects(self) -> list[Runner]:
        """Saves to an S3 server and loads from it.

        How much a server does in a second depends on what it did before, by more than contenders
        differ. So all of them stay, and save or load once when it is their turn, in another order
        in each round. One of them takes part twice: its two results would be the same if nothing
        else made a difference.
        """
        measured: list[Runner] = []
        order = random.Random(_SEED)
        profile = self.profile
        for size in profile.s3_sizes:
            runners = _runners("s3", size)
            turns = ["save"] * profile.s3_servers + ["load"]
            for number, what in enumerate(turns):
                rounds = profile.s3_saves if what == "save" else profile.s3_loads
                title = f"s3, {title_of(size)}"
                self.announce(f"{title}: starting server {number + 1} of {len(turns)}")
                for runner in runners:
                    lack = self._lack(runner.size * len(runners), profile.s3_saves)
                    runner.error = runner.error or lack
                with (
                    seaweed.server(self.scratch / "seaweedfs") as environment,
                    self._standing(runners, what, environment) as processes,
                ):
                    for _ in range(rounds):
                        for runner in order.sample(runners, len(runners)):
                            self.announce(f"{title}, {what}: {runner.name}")
                            _single_turn(runner, what, processes)
                shutil.rmtree(self.scratch / "seaweedfs")
            measured += runners
        return measured

    @contextmanager
    def _standing(
        self, runners: list[Runner], what: str, environment: dict[str, str]
    ) -> Iterator[dict[str, Process]]:
        """Contenders that have saved once, and loaded once if that is what will be measured.

        They load into memory that they have used before: how long the system takes to hand out new
        memory differs more than they do.
        """
        processes = {}
        order = {"bucket": seaweed.BUCKET, "environment": environment}
        with ExitStack() as stack:
            for runner in runners:
                folder = self.scratch / re.sub(r"[^a-z0-9]+", "-", runner.name.lower())
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                if runner.error:
                    continue
                own = {**order, "folder": str(folder), "keeps_memory": what == "load"}
                process = stack.enter_context(_process(runner, own))
                processes[runner.name] = process
                with _noting_errors(runner):
                    runner.saved(process.ask({"do": "save"}), is_first=True)
                    if what == "load":
                        process.ask({"do": "check"})
            yield processes

    def _turns(self, runners: list[Runner]) -> Iterator[Runner]:
        """Another one is first in each round: who comes later may find a busier machine."""
        rounds = self._rounds(runners[0].size)
        for number in range(rounds):
            for runner in in_turn(runners, number, rounds):
                where = f"{runner.part}, {title_of(runner.size)}, round {number + 1}"
                self.announce(f"{where}: {runner.name}")
                yield runner

    def _turn(
        self,
        runner: Runner,
        order: dict[str, Any] | None = None,
        *,
        saves: int,
        loads: int = 0,
        cold_loads: int = 0,
    ) -> None:
        """Let a contender save and load in a process of its own; nothing is left in the folder."""
        folder = self.scratch / "turn"
        runner.error = runner.error or self._lack(runner.size, saves)
        if runner.error:
            return
        own = {**(order or {}), "folder": str(folder)}
        with _process(runner, own) as process, _noting_errors(runner):
            for number in range(saves):
                runner.saved(process.ask({"do": "save"}), is_first=number == 0)
            if loads:
                process.ask({"do": "check"})
            runner.warm_loads += [process.ask({"do": "load"}) for _ in range(loads)]
            runner.cold_loads += [process.ask({"do": "load cold"}) for _ in range(cold_loads)]
        shutil.rmtree(folder, ignore_errors=True)

    def _fio_turn(self, runner: Runner) -> None:
        runner.error = runner.error or self._lack(runner.size, 1)
        if not runner.error:
            os.sync()
            direct = runner.name == FIO_DIRECT
            seconds = fio.write_seconds(self.scratch / "fio", runner.size, direct=direct)
            runner.durables.append(seconds)

    def _lack(self, size: int, saves: int) -> str:
        """Why so much cannot be saved here: a state, its copy, and one more for the library."""
        memory, disk = 3 * size + GIB, (saves + 1) * size + GIB
        if psutil.virtual_memory().available < memory:
            return f"skipped: it needs {memory / GIB:.0f} GiB of free memory"
        if shutil.disk_usage(self.scratch).free < disk:
            return f"skipped: it needs {disk / GIB:.0f} GiB of free disk"
        return ""

    def _repeats(self, size: int) -> int:
        """Large states are saved once more only, so that a run ends on the same day."""
        return self.profile.repeats if size < GIB else 1

    def _rounds(self, size: int) -> int:
        return self.profile.rounds if size <= GIB else min(2, self.profile.rounds)


def _single_turn(runner: Runner, what: str, processes: dict[str, Process]) -> None:
    if runner.error:
        return
    with _noting_errors(runner):
        answer = processes[runner.name].ask({"do": what})
        if what == "load":
            runner.warm_loads.append(answer)
        else:
            runner.saved(answer, is_first=False)


@contextmanager
def _noting_errors(runner: Runner) -> Iterator[None]:
    try:
        yield
    except ProcessFailed as exc:
        runner.error = str(exc)


def _process(runner: Runner, order: dict[str, Any]) -> Process:
    return Process(_WORKER, {"name": runner.name, "size": runner.size, **order})


def _runners(part: str, size: int) -> list[Runner]:
    return [Runner(part, entry.name, entry.kind, size) for entry in of_part(part)]


def _fio_runners(size: int) -> list[Runner]:
    if fio.version() is None or size < fio.LEAST:
        return []
    return [Runner("local", name, Kind.LIMIT, size) for name in (FIO_DIRECT, FIO_BUFFERED)]
