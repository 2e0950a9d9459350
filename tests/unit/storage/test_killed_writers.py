"""Processes killed in the middle of writes: every file that can be seen is whole."""

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from dtruntime.storage import LocalBackend
from dtruntime.storage.names import PARTIAL

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
    remains = list(tmp_path.rglob(f"{PARTIAL}*"))
    assert remains, "no writer was killed in the middle of a write"
    assert LocalBackend(tmp_path).sweep(0) == len(remains)
    assert not list(tmp_path.rglob(f"{PARTIAL}*"))
    check(tmp_path)


def check(folder: Path) -> None:
    backend = LocalBackend(folder)
    files = list(backend.list())
    on_disk = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == sum(not path.name.startswith(PARTIAL) for path in on_disk)
    for file in files:
        data = backend.read(file.name)
        assert len(data) == file.size == os.path.getsize(backend.location(file.name))
        assert hashlib.sha256(data[32:]).digest() == data[:32], file.name
