"""strata status --watch in a real terminal, against real coordinators and workers."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import PATIENT

COMMAND = [sys.executable, "-m", "dtruntime.cli.main", "status"]
SECONDS = 20.0


class Terminal:
    """What a program writes to a terminal, and the keys that are pressed there."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self._master = master
        self.process = process
        self.seen = ""

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def forget(self) -> None:
        self._read()
        self.seen = ""

    def shows(self, pattern: str) -> None:
        eventually(
            lambda: self._read() and re.search(pattern, self.seen), within=SECONDS, what=pattern
        )

    def wait(self) -> int:
        # Who does not read keeps the program from ending.
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
            time.sleep(0.01)
        return self.process.wait(0)

    def _read(self) -> bool:
        while select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                break
            if not data:
                break
            self.seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return True


@contextmanager
def watching(url: str, *arguments: str, rows: int = 30, columns: int = 140) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    before = termios.tcgetattr(slave)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [*COMMAND, "--url", url, "--watch", "--interval", "0.1", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    try:
        yield Terminal(master, process)
        assert termios.tcgetattr(slave) == before
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


@contextmanager
def crew(url: str, job: str, number: int) -> Iterator[list[TrainingOrchestrator]]:
    members = [TrainingOrchestrator(coordinator_url=url, job=job) for _ in range(number)]
    try:
        for step, member in enumerate(members):
            member.register()
            member.report(step=step, state="training")
            member.beat()
        yield members
    finally:
        for member in members:
            member.deregister()


def test_live_view_sorts_pauses_follows_and_quits(coordinator: LocalCoordinator, job: str) -> None:
    with (
        crew(coordinator.url, job, 3) as members,
        watching(coordinator.url, "--job", job) as terminal,
    ):
        terminal.shows(r"worker-0 +training")
        terminal.shows(r"worker-2 joined as rank 2")
        terminal.shows(r"workers 1 to 3 of 3, by problems")
        terminal.press(b"s")
        terminal.shows(r"by rank")
        terminal.press(b"p")
        terminal.shows(r"PAUSED")
        terminal.press(b"p")
        terminal.forget()
        members[1].report(step=4711)
        members[1].beat()
        terminal.shows(r"4,711")
        terminal.shows(r"pace .*steps/s")
        members[2].deregister()
        terminal.shows(r"worker-2 \(rank 2\) left")
        terminal.press(b"q")
        assert terminal.wait() == 0


def test_open_barrier_is_shown_with_who_is_missing(coordinator: LocalCoordinator, job: str) -> None:
    with (
        crew(coordinator.url, job, 2) as members,
        watching(coordinator.url, "--job", job) as terminal,
    ):
        waiting = threading.Thread(target=members[0].barrier, args=("meeting", 60_000))
        waiting.start()
        terminal.shows(r"meeting: 1 of 2 arrived")
        terminal.shows(r"missing worker-1 \(step 1\)")
        members[1].barrier("meeting")
        waiting.join()
        terminal.press(b"q")
        assert terminal.wait() == 0


def test_coordinator_that_is_killed_is_waited_for() -> None:
    with (
        LocalCoordinator(**PATIENT) as coordinator,
        crew(coordinator.url, "again", 1),
        watching(coordinator.url) as terminal,
    ):
        terminal.shows(r"worker-0")
        coordinator.kill()
        terminal.shows(r"has not answered for")
        coordinator.start()
        terminal.forget()
        terminal.shows(r"term 2")
        terminal.press(b"\x04")
        assert terminal.wait() == 0


def test_pipe_gets_everything_and_the_journal(coordinator: LocalCoordinator, job: str) -> None:
    with crew(coordinator.url, job, 40):
        command = [*COMMAND, "--url", coordinator.url, "--job", job, "--events", "50"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "worker-39" in done.stdout
    assert "joined as rank" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.long
def test_several_jobs_are_shown_one_after_the_other_and_the_last_status_stays() -> None:
    with (
        LocalCoordinator(**PATIENT) as coordinator,
        crew(coordinator.url, "first", 1),
        crew(coordinator.url, "second", 2),
        watching(coordinator.url) as terminal,
    ):
        terminal.shows(r"job first[\s\S]*job second[\s\S]*all jobs")
        terminal.press(b"\t")
        terminal.shows(r"workers 1 to 1 of 1")
        terminal.press(b"\t")
        terminal.shows(r"workers 1 to 2 of 2")
        terminal.forget()
        terminal.press(b"\t")
        terminal.shows(r"all jobs")
        terminal.press(b"\t")
        terminal.shows(r"workers 1 to 1 of 1")
        terminal.forget()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 0
        terminal.shows(r"job first(?![\s\S]*job second)[\s\S]*worker-0")


@pytest.mark.parametrize(("arguments", "code"), [(["--job", "nowhere"], 1), ([], 3)])
def test_exit_codes(coordinator: LocalCoordinator, arguments: list[str], code: int) -> None:
    url = coordinator.url if code == 1 else "http://127.0.0.1:1"
    done = subprocess.run(
        [*COMMAND, "--watch", "--url", url, *arguments], capture_output=True, timeout=60
    )
    assert done.returncode == code
