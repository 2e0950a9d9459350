"""Processes killed in the middle of writes: every file that can be seen is whole."""

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtruntime.storage import LocalBackend
from dtruntime.storage.backend import PARTIAL

WRITER = """
import hashlib, itertools, os, random, sys
from dtruntime.storage import LocalBackend

backend = LocalBackend(sys.argv[1])
source = random.Random(sys.argv[2])
bodies = [source.randbytes(size) for size in (0, 100, 70_000, 1_500_000, 9_000_000) * 2]
files = [hashlib.sha256(body).digest() + body for body in bodies]
print("ready", flush=True)
for number in itertools.count():
    data = source.choice(files)
    name = f"folder-{number % 3}/{number % 7}"
    if number % 3 == 0:
        backend.write(name, [data[:7], data[7:]])
    elif number % 3 == 1:
        backend.delete(name)
        backend.create(name, data)
    else:
        with backend.writer(name) as writer:
            for at in range(0, len(data), 500_000):
                writer.write(data[at : at + 500_000])
    print(name, flush=True)
"""


def test_every_file_of_a_killed_writer_is_whole(tmp_path: Path) -> None:
    source = random.Random(7)
    seen = set()
    for round_ in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(round_)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(source.randrange(1, 12)):
            assert process.stdout.readline()
        time.sleep(source.uniform(0, 0.02))  # somewhere in the middle of something
        process.kill()
        process.wait()
        process.stdout.close()
        check(tmp_path)
        seen |= set(tmp_path.rglob(f"{PARTIAL}*"))
    assert seen, "no writer was killed in the middle of a write"
    remains = list(tmp_path.rglob(f"{PARTIAL}*"))
    assert LocalBackend(tmp_path).sweep(0) == len(remains)
    assert not list(tmp_path.rglob(f"{PARTIAL}*"))
    check(tmp_path)


HALF = """
import sys
from dtruntime.storage import LocalBackend

writer = LocalBackend(sys.argv[1]).writer("folder/file")
writer.write(bytes(12 * 2**20))
print("half", flush=True)
sys.stdin.read()
"""


@contextmanager
def half_written(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in the middle of writing a file, and the file."""
    before = set(folder.rglob(f"{PARTIAL}*"))
    command = [sys.executable, "-c", HALF, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        (partial,) = set(folder.rglob(f"{PARTIAL}*")) - before
        try:
            yield process, partial
        finally:
            process.kill()


def test_what_a_killed_process_was_writing_goes_with_the_next_write(tmp_path: Path) -> None:
    with half_written(tmp_path) as (living, kept), half_written(tmp_path) as (process, partial):
        process.kill()
        process.wait()
        assert partial.exists()
        LocalBackend(tmp_path).write("folder/other", b"x")
        assert not partial.exists()
        assert kept.exists(), "its writer lives"
        assert living.poll() is None
        living.kill()
        living.wait()
        assert LocalBackend(tmp_path).sweep() == 1
    assert not list(tmp_path.rglob(f"{PARTIAL}*"))


def test_lock_says_nothing_about_what_another_machine_writes(tmp_path: Path) -> None:
    """A network file system may keep the locks of each machine apart."""
    with half_written(tmp_path) as (process, partial):
        process.kill()
        process.wait()
    host, number = partial.name.removeprefix(PARTIAL).split("-")
    assert len(host) == 12
    others = partial.with_name(f"{PARTIAL}{'0' * 12}-{number}")
    unmarked = partial.with_name(f"{PARTIAL}{number}")
    partial.rename(others)
    unmarked.write_bytes(b"of a process that has no lock yet")
    assert LocalBackend(tmp_path).sweep() == 0
    for path in (others, unmarked):
        assert path.exists()
        os.utime(path, (1, 1))
    assert LocalBackend(tmp_path).sweep() == 2


def check(folder: Path) -> None:
    backend = LocalBackend(folder)
    files = list(backend.list())
    on_disk = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == sum(not path.name.startswith(PARTIAL) for path in on_disk)
    for file in files:
        data = backend.read(file.name)
        assert len(data) == file.size == os.path.getsize(backend.location(file.name))
        assert hashlib.sha256(data[32:]).digest() == data[:32], file.name
