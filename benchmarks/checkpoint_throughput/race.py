"""Contenders measured in turn, round after round."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from ..data_loading.isolated import ProcessFailed
from . import fio, seaweed, turn
from .contenders import Kind, of_part
from .profiles import GIB, Profile
from .report import title_of
from .results import FIO_BUFFERED, FIO_DIRECT, Runner
from .standing import Standing

Announce = Callable[[str], None]
_SEED = 7


def saves(profile: Profile, scratch: Path, announce: Announce) -> list[Runner]:
    """Saves into a folder, beside what the disk and the memory can do."""
    found = []
    for size in profile.save_sizes:
        runners = _runners("local", size)
        limits = _fio_runners(size)
        rounds = _rounds(profile, size)
        for number in range(rounds):
            for runner in _in_turn(runners, number, rounds):
                announce(f"local, {title_of(size)}, round {number + 1}: {runner.name}")
                _turn(runner, scratch, saves=1 + _repeats(profile, size))
            for limit in limits:
                announce(f"local, {title_of(size)}, round {number + 1}: {limit.name}")
                _fio_turn(limit, scratch)
        found += runners + limits
    return found


def loads(profile: Profile, scratch: Path, announce: Announce) -> list[Runner]:
    """Loads from a folder, with and without the page cache."""
    found = []
    for size in profile.load_sizes:
        runners = _runners("load", size)
        repeats = _repeats(profile, size)
        rounds = _rounds(profile, size)
        for number in range(rounds):
            for runner in _in_turn(runners, number, rounds):
                announce(f"load, {title_of(size)}, round {number + 1}: {runner.name}")
                _turn(runner, scratch, saves=1, loads=profile.repeats, cold_loads=repeats)
        found += runners
    return found


def peaks(profile: Profile, scratch: Path, announce: Announce) -> list[Runner]:
    """The memory of a first save."""
    runners = _runners("memory", profile.memory_bytes)
    for number in range(profile.rounds):
        for runner in _in_turn(runners, number, profile.rounds):
            announce(f"memory, round {number + 1}: {runner.name}")
            _turn(runner, scratch, saves=1)
    return runners


def objects(profile: Profile, scratch: Path, announce: Announce) -> list[Runner]:
    """Saves to an S3 server and loads from it.

    How much a server does in a second depends on what it did before, by more than those who use it
    differ. So all contenders stay, and save or load once when it is their turn, in another order in
    each round. One of them takes part twice: its two results would be the same if nothing else made
    a difference.
    """
    found: list[Runner] = []
    order = random.Random(_SEED)
    for size in profile.s3_sizes:
        runners = _runners("s3", size)
        turns = ["save"] * profile.s3_servers + ["load"]
        for number, what in enumerate(turns):
            rounds = profile.s3_saves if what == "save" else profile.s3_loads
            announce(f"s3, {title_of(size)}: starting server {number + 1} of {len(turns)}")
            _check_room(runners, profile.s3_saves, scratch)
            with _served(scratch) as wanted, _all_standing(runners, what, scratch, wanted) as there:
                for _ in range(rounds):
                    for runner in order.sample(runners, len(runners)):
                        announce(f"s3, {title_of(size)}, {what}: {runner.name}")
                        _single_turn(runner, what, there)
        found += runners
    return found


def _check_room(runners: list[Runner], saves: int, scratch: Path) -> None:
    """Note what is missing, if anything, for all of them at a time."""
    for runner in runners:
        runner.error = runner.error or _lack(runner.size * len(runners), saves, scratch)


@contextmanager
def _all_standing(
    runners: list[Runner], what: str, scratch: Path, wanted: dict[str, Any]
) -> Iterator[dict[str, Standing]]:
    """Contenders that have saved once, and loaded once if that is what will be measured.

    They load into memory that they have used before: how long the system takes to hand out new
    memory differs more than they do.
    """
    found = {}
    with ExitStack() as stack:
        for runner in runners:
            folder = scratch / re.sub(r"[^a-z0-9]+", "-", runner.name.lower())
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if runner.error:
                continue
            one = Standing(runner.name, runner.size, folder, keeps_memory=what == "load", **wanted)
            found[runner.name] = stack.enter_context(one)
            try:
                stall, durable = one.save()
                if what == "load":
                    one.check()
            except ProcessFailed as exc:
                runner.error = str(exc)
                continue
            runner.first_stalls.append(stall)
            runner.first_durables.append(durable)
        yield found


def _single_turn(runner: Runner, what: str, there: dict[str, Standing]) -> None:
    if runner.error:
        return
    try:
        if what == "load":
            runner.warm_loads.append(there[runner.name].load())
        else:
            stall, durable = there[runner.name].save()
            runner.stalls.append(stall)
            runner.durables.append(durable)
    except ProcessFailed as exc:
        runner.error = str(exc)


@contextmanager
def _served(scratch: Path) -> Iterator[dict[str, Any]]:
    """A server of its own, and what contenders have to know of it."""
    with seaweed.server(scratch / "seaweedfs") as environment:
        yield {"bucket": seaweed.BUCKET, "environment": environment}
    shutil.rmtree(scratch / "seaweedfs")


def _runners(part: str, size: int) -> list[Runner]:
    return [Runner(part, entry.name, entry.kind, size) for entry in of_part(part)]


def _in_turn(runners: list[Runner], number: int, rounds: int) -> list[Runner]:
    """Another one is first in each round: who comes later may find a busier machine."""
    first = number * len(runners) // rounds
    return runners[first:] + runners[:first]


def _fio_runners(size: int) -> list[Runner]:
    if fio.version() is None or size < fio.LEAST:
        return []
    return [Runner("local", name, Kind.LIMIT, size) for name in (FIO_DIRECT, FIO_BUFFERED)]


def _turn(runner: Runner, scratch: Path, **wanted: Any) -> None:
    folder = scratch / "turn"
    runner.error = runner.error or _lack(runner.size, wanted["saves"], scratch)
    if runner.error:
        return
    try:
        runner.add(turn.take(runner.name, runner.size, folder, **wanted))
    except ProcessFailed as exc:
        runner.error = str(exc)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fio_turn(runner: Runner, scratch: Path) -> None:
    runner.error = runner.error or _lack(runner.size, 1, scratch)
    if not runner.error:
        os.sync()
        direct = runner.name == FIO_DIRECT
        runner.durables.append(fio.write_seconds(scratch / "fio", runner.size, direct=direct))


def _lack(size: int, saves: int, scratch: Path) -> str:
    """Why so much cannot be saved here, if so: a state, its copy, and one more for the library."""
    if psutil.virtual_memory().available < 3 * size + GIB:
        return f"skipped: it needs {(3 * size + GIB) / GIB:.0f} GiB of free memory"
    if shutil.disk_usage(scratch).free < (saves + 1) * size + GIB:
        return f"skipped: it needs {((saves + 1) * size + GIB) / GIB:.0f} GiB of free disk"
    return ""


def _repeats(profile: Profile, size: int) -> int:
    """Large states are saved once more only, so that a run ends on the same day."""
    return profile.repeats if size < GIB else 1


def _rounds(profile: Profile, size: int) -> int:
    return profile.rounds if size <= GIB else min(2, profile.rounds)
