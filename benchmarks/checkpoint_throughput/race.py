"""Contenders measured in turn, round after round."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ..data_loading.isolated import ProcessFailed
from . import fio, seaweed, turn
from .contenders import Kind, of_part
from .profiles import GIB, Profile
from .report import title_of
from .results import FIO_BUFFERED, FIO_DIRECT, Runner

Announce = Callable[[str], None]
S3_ROUNDS = 2
"""So many rounds with an S3 server for one with a disk."""


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

    Contenders change places after a few seconds, because the speed of a machine that others share
    drifts. Loads are from a server that holds little else, and into memory that the process has
    used before: how long the system takes to hand out new memory differs more than those who load.
    """
    found: list[Runner] = []
    for size in profile.s3_sizes:
        runners = _runners("s3", size)
        rounds = S3_ROUNDS * profile.rounds
        for number in range(rounds):
            with _served(scratch, announce) as wanted:
                for runner in _in_turn(runners, number, rounds):
                    announce(f"s3, {title_of(size)}, round {number + 1}, save: {runner.name}")
                    _turn(runner, scratch, saves=1 + _repeats(profile, size), **wanted)
        with _served(scratch, announce) as wanted:
            for runner in runners:
                announce(f"s3, {title_of(size)}, to be loaded: {runner.name}")
                # It counts as the first save of a process, which is not in the medians.
                _turn(runner, scratch, saves=1, apart=True, **wanted)
            wanted |= {"saves": 0, "loads": profile.repeats, "keeps_memory": True}
            for number in range(rounds):
                for runner in _in_turn(runners, number, rounds):
                    announce(f"s3, {title_of(size)}, round {number + 1}, load: {runner.name}")
                    _turn(runner, scratch, apart=True, **wanted)
        found += runners
    return found


@contextmanager
def _served(scratch: Path, announce: Announce) -> Iterator[dict[str, Any]]:
    """A server of its own, and what turns have to know of it."""
    announce("s3: starting SeaweedFS")
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


def _turn(runner: Runner, scratch: Path, *, apart: bool = False, **wanted: Any) -> None:
    """``apart``: in a place of this contender's own."""
    folder = scratch / (re.sub(r"[^a-z0-9]+", "-", runner.name.lower()) if apart else "turn")
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
