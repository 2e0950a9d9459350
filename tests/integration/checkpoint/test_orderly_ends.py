"""Saves under way are finished at every orderly end of a program, or the end is loud.

Every program is a process of its own, and what it has stored is loaded here.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dtruntime import CheckpointManager
from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from dtruntime.types import Membership
from tests.support.coordinators import JobView

STEPS = [1, 2, 3, 4, 5]
CLEANUP_FAILED = 120
"""The exit status that Python has for an error in the cleanup behind a program."""

HEADER = """
import asyncio, atexit, gc, multiprocessing, os, resource, signal, sys, threading, time
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from dtruntime import CheckpointManager, TrainingOrchestrator

FOLDER = sys.argv[1]

def state(step):
    # More than is stored while a program ends.
    return {"step": step, "w": np.full(500_000, step, np.float32)}

def save_all(manager, steps=range(1, 6)):
    for step in steps:
        manager.save(state(step), step)

def train(steps=range(1, 6)):
    manager = CheckpointManager(FOLDER)
    save_all(manager, steps)
"""


FULL = """
def fill_up():
    # No file may have more than a megabyte.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
"""


@dataclass(frozen=True)
class End:
    """A program, and how it ends."""

    program: str
    status: int = 0
    steps: tuple[int, ...] = tuple(STEPS)


ENDS = {
    "return": End("train()"),
    "deleted": End(
        """
        manager = CheckpointManager(FOLDER)
        save_all(manager)
        del manager
        gc.collect()
        """
    ),
    "SIGTERM that is an exit": End(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        train()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
        """,
        status=128 + signal.SIGTERM,
    ),
    "several managers": End(
        """
        def main():
            managers = [CheckpointManager(FOLDER) for _ in range(2)]
            save_all(managers[0], [1, 2, 3])
            managers[0].wait()
            save_all(managers[1], [4, 5])
        main()
        """
    ),
    "asyncio": End(
        """
        async def main():
            manager = CheckpointManager(FOLDER)
            for step in range(1, 6):
                await manager.save_async(state(step), step=step)
        asyncio.run(main())
        """
    ),
    "exception": End("train(); raise ValueError('of the program')", status=1),
    "exception in asyncio": End(
        """
        async def main():
            train()
            raise ValueError("of the program")
        asyncio.run(main())
        """,
        status=1,
    ),
    "sys.exit": End("train(); sys.exit(3)", status=3),
    "KeyboardInterrupt": End("train(); raise KeyboardInterrupt", status=-signal.SIGINT),
    "SIGINT": End(
        "train(); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", status=-signal.SIGINT
    ),
    "SIGINT in asyncio": End(
        """
        async def main():
            train()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        asyncio.run(main())
        """,
        status=-signal.SIGINT,
    ),
    "thread": End("threading.Thread(target=train).start()"),
    "thread that outlives the main thread": End(
        """
        def later():
            manager = CheckpointManager(FOLDER)
            threading.main_thread().join()
            save_all(manager)
        threading.Thread(target=later).start()
        """
    ),
    "asyncio in a thread that outlives the main thread": End(
        """
        async def later():
            manager = CheckpointManager(FOLDER)
            for step in range(1, 6):
                await manager.save_async(state(step), step=step)
            assert await manager.list_checkpoints() == [1, 2, 3, 4, 5]
        def run():
            threading.main_thread().join()
            asyncio.run(later())
        threading.Thread(target=run).start()
        """
    ),
    "exception in a thread": End(
        """
        def fail():
            train()
            raise ValueError("of the thread")
        threading.Thread(target=fail).start()
        """
    ),
    "sys.exit in a thread": End(
        """
        def leave():
            train()
            sys.exit(3)
        threading.Thread(target=leave).start()
        """
    ),
    "pool": End("ThreadPoolExecutor(1).submit(train)"),
    "daemon thread": End(
        """
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join()
        """
    ),
    "exit function": End("manager = CheckpointManager(FOLDER); atexit.register(save_all, manager)"),
    "fork": End(
        """
        child = multiprocessing.get_context("fork").Process(target=train)
        child.start()
        child.join()
        sys.exit(child.exitcode)
        """
    ),
    "exception in a fork": End(
        """
        def fail():
            train()
            raise ValueError("of the child")
        child = multiprocessing.get_context("fork").Process(target=fail)
        child.start()
        child.join()
        sys.exit(child.exitcode)
        """,
        status=1,
    ),
    "spawn": End(
        """
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=train)
            child.start()
            child.join()
            sys.exit(child.exitcode)
        """
    ),
    "forkserver": End(
        """
        if __name__ == "__main__":
            child = multiprocessing.get_context("forkserver").Process(target=train)
            child.start()
            child.join()
            sys.exit(child.exitcode)
        """
    ),
    "process pool": End(
        """
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor(1) as pool:
            pool.submit(train).result()
        """
    ),
}


def run(
    tmp_path: Path, program: str, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "program.py"
    file.write_text(HEADER + textwrap.dedent(program), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(file), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_stored(folder: Path | str, steps: list[int]) -> None:
    """What is stored is loaded, and is what was saved."""
    with CheckpointManager(folder) as manager:
        assert manager.steps() == steps
        for step in steps:
            loaded = manager.load_state(step)
            assert loaded["step"] == step
            assert np.array_equal(loaded["w"], np.full(500_000, step, np.float32))


OFTEN = {
    "return",
    "SIGTERM that is an exit",
    "asyncio",
    "exception",
    "SIGINT",
    "thread",
    "pool",
    "exit function",
    "fork",
    "spawn",
}
"""Ends that most programs have, for `make test`."""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(end, id=name, marks=[] if name in OFTEN else pytest.mark.long)
        for name, end in ENDS.items()
    ],
)
def test_saves_under_way_are_stored_at_an_orderly_end(end: End, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = run(tmp_path, end.program, str(folder))
    assert done.returncode == end.status, done.stderr
    check_stored(folder, list(end.steps))


@pytest.mark.long
def test_saves_of_torch_multiprocessing_are_stored(tmp_path: Path) -> None:
    program = """
        def work(rank):
            manager = CheckpointManager(os.path.join(FOLDER, str(rank)))
            save_all(manager)
        if __name__ == "__main__":
            import torch.multiprocessing
            torch.multiprocessing.spawn(work, nprocs=2)
        """
    done = run(tmp_path, program, str(tmp_path / "checkpoints"))
    assert done.returncode == 0, done.stderr
    check_stored(tmp_path / "checkpoints" / "0", STEPS)
    check_stored(tmp_path / "checkpoints" / "1", STEPS)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_asynchronous_saves_of_distributed_checkpoint_are_stored(tmp_path: Path) -> None:
    program = """
        import torch, torch.distributed.checkpoint as dcp
        from dtruntime.checkpoint.dcp import StrataWriter
        def main():
            torch.distributed.init_process_group(
                "gloo", init_method="file://" + FOLDER + ".init", rank=0, world_size=1
            )
            weights = {"w": torch.full((20_000_000,), 7.0)}
            dcp.async_save(weights, storage_writer=StrataWriter(FOLDER, step=7))
        main()
        """
    folder = tmp_path / "checkpoints"
    done = run(tmp_path, program, str(folder))
    assert done.returncode == 0, done.stderr
    import torch
    import torch.distributed.checkpoint as dcp

    from dtruntime.checkpoint.dcp import StrataReader

    loaded = {"w": torch.zeros(20_000_000)}
    dcp.load(loaded, storage_reader=StrataReader(folder, step=7), no_dist=True)
    assert torch.equal(loaded["w"], torch.full((20_000_000,), 7.0))


@pytest.mark.long
def test_asynchronous_save_of_distributed_checkpoint_that_fails_fails_the_program(
    tmp_path: Path,
) -> None:
    program = """
        import torch, torch.distributed.checkpoint as dcp
        from dtruntime.checkpoint.dcp import StrataWriter
        def main():
            torch.distributed.init_process_group(
                "gloo", init_method="file://" + FOLDER + ".init", rank=0, world_size=1
            )
            fill_up()
            weights = {"w": torch.full((20_000_000,), 7.0)}
            dcp.async_save(weights, storage_writer=StrataWriter(FOLDER, step=7))
        main()
        """
    folder = tmp_path / "checkpoints"
    done = run(tmp_path, FULL + textwrap.dedent(program), str(folder))
    assert done.returncode == CLEANUP_FAILED, done.stderr
    assert f"strata: the checkpoint of step 7 is not in {folder}: " in done.stderr


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_member_in_a_child_process_tells_its_last_step_and_leaves(
    method: str, coordinator: LocalCoordinator, view: JobView, tmp_path: Path
) -> None:
    program = f"""
        def work():
            orchestrator = TrainingOrchestrator(heartbeat_interval_ms=10_000)
            orchestrator.register()
            orchestrator.report(step=7)
        if __name__ == "__main__":
            child = multiprocessing.get_context({method!r}).Process(target=work)
            child.start()
            child.join()
        """
    done = run(tmp_path, program, "", COORDINATOR_URL=coordinator.url, STRATA_JOB=view.job)
    assert done.returncode == 0, done.stderr
    assert [kind for kind, _ in view.events if kind == "worker.left"]
    (worker,) = view.status.workers
    assert (worker.membership, worker.step) == (Membership.LEFT, 7)


def test_newest_checkpoint_is_in_the_main_storage_when_the_program_has_ended(
    tmp_path: Path,
) -> None:
    program = """
        def main():
            manager = CheckpointManager(FOLDER, local_tier=FOLDER + ".local", upload_every=100)
            save_all(manager)
        main()
        """
    folder = tmp_path / "checkpoints"
    done = run(tmp_path, program, str(folder))
    assert done.returncode == 0, done.stderr
    check_stored(folder, [5])


def test_reference_program_finds_its_last_checkpoint_when_it_is_started_again(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    program = """
        async def main():
            orchestrator = TrainingOrchestrator(
                worker_id="worker-0", coordinator_url=sys.argv[2], world_size=1, rank=0
            )
            await orchestrator.register_worker(ip="127.0.0.1", port=8080)
            checkpoints = CheckpointManager(FOLDER)
            start = max(await checkpoints.list_checkpoints(), default=-1) + 1
            print("starts at", start)
            for step in range(start, start + 1000):
                if step % 100 == 0:
                    data = f"step_{step}".encode() * 1_000_000
                    await checkpoints.save_async(data, step=step)
        asyncio.run(main())
        """
    folder = tmp_path / "checkpoints"
    for start, last in ((0, 900), (901, 1900)):
        done = run(tmp_path, program, str(folder), coordinator.url, STRATA_JOB=job)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"starts at {start}\n"
        with CheckpointManager(folder) as manager:
            assert manager.steps() == list(range(last - 400, last + 1, 100))
            assert manager.load_bytes(last) == f"step_{last}".encode() * 1_000_000


# What cannot be stored

FAILURES = {
    "return": "fill_up(); train([5])",
    "asyncio": """
        async def main():
            manager = CheckpointManager(FOLDER)
            await manager.save_async(state(5), step=5)
        fill_up()
        asyncio.run(main())
        """,
    "sys.exit": "fill_up(); train([5]); sys.exit(0)",
    "thread that outlives the main thread": """
        def later():
            threading.main_thread().join()
            train([5])
        fill_up()
        threading.Thread(target=later).start()
        """,
    "exit function": """
        fill_up()
        manager = CheckpointManager(FOLDER)
        atexit.register(lambda: manager.save(state(5), 5))
        """,
}


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES.keys())
def test_save_that_fails_at_the_end_is_told_and_fails_the_program(
    program: str, tmp_path: Path
) -> None:
    others = """
import atexit
atexit.register(lambda: print("another exit function"))
"""
    folder = tmp_path / "checkpoints"
    done = run(tmp_path, others + FULL + textwrap.dedent(program), str(folder))
    assert done.returncode == CLEANUP_FAILED, done.stderr
    assert f"strata: the checkpoint of step 5 is not in {folder}: " in done.stderr
    assert "File too large" in done.stderr
    assert "another exit function\n" in done.stdout
    check_stored(folder, [])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_save_that_fails_at_the_end_of_a_child_fails_the_child(method: str, tmp_path: Path) -> None:
    program = f"""
        def work():
            fill_up()
            train([5])
        if __name__ == "__main__":
            child = multiprocessing.get_context({method!r}).Process(target=work)
            child.start()
            child.join()
            print("child", child.exitcode)
        """
    folder = tmp_path / "checkpoints"
    done = run(tmp_path, FULL + textwrap.dedent(program), str(folder))
    status = CLEANUP_FAILED if method == "spawn" else 1
    assert done.stdout == f"child {status}\n", done.stderr
    assert "Traceback" not in done.stderr
    assert f"strata: the checkpoint of step 5 is not in {folder}: " in done.stderr


def test_failure_that_the_program_has_seen_does_not_fail_its_end(tmp_path: Path) -> None:
    program = """
        fill_up()
        manager = CheckpointManager(FOLDER)
        handle = manager.save(state(1), 1)
        try:
            handle.wait()
        except OSError as exc:
            print("seen")
        """
    done = run(tmp_path, FULL + textwrap.dedent(program), str(tmp_path / "checkpoints"))
    assert (done.returncode, done.stdout) == (0, "seen\n"), done.stderr
    assert "strata:" not in done.stderr


def test_daemon_thread_that_saves_while_the_program_ends_is_refused_loudly(tmp_path: Path) -> None:
    program = """
        manager = CheckpointManager(FOLDER)
        def work():
            threading.main_thread().join()
            try:
                manager.save(state(1), 1)
            except OSError as exc:
                print("refused", flush=True)
            tried.set()
        tried = threading.Event()
        threading.Thread(target=work, name="trainer", daemon=True).start()
        threading.Thread(target=tried.wait).start()
        """
    done = run(tmp_path, program, str(tmp_path / "checkpoints"))
    assert (done.returncode, done.stdout) == (CLEANUP_FAILED, "refused\n"), done.stderr
    assert "the daemon thread 'trainer' is about to be cut off" in done.stderr


@pytest.fixture
def silent_store() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


HANGING = """
def main():
    manager = CheckpointManager("s3://bucket/run", anonymous=True, region="x")
    manager.save(b"x", 5)
main()
"""


def test_storage_that_hangs_holds_the_end_up_for_a_bounded_time(
    silent_store: str, tmp_path: Path
) -> None:
    done = run(tmp_path, HANGING, "", AWS_ENDPOINT_URL=silent_store, STRATA_EXIT_SECONDS="1")
    assert done.returncode == CLEANUP_FAILED, done.stderr
    assert (
        "strata: the checkpoint of step 5 in s3://bucket/run is not stored: nothing was written "
        "for 1 s\n" in done.stderr
    )


def test_second_interrupt_of_the_wait_at_the_end_gives_up_loudly(silent_store: str) -> None:
    program = HEADER + HANGING
    with WorkerProcess(program, [""], env={"AWS_ENDPOINT_URL": silent_store}) as worker:
        eventually(lambda: "the program ends when this is stored" in worker.log, within=60)
        worker.send_signal(signal.SIGINT)
        eventually(lambda: "press Ctrl-C again to give it up" in worker.log, within=60)
        worker.send_signal(signal.SIGINT)
        assert worker.wait() == CLEANUP_FAILED
        assert "s3://bucket/run is not stored: it was given up by Ctrl-C" in worker.log
        assert "Traceback" not in worker.log


def test_store_that_refuses_fails_the_end(tmp_path: Path, s3_server: dict[str, str]) -> None:
    program = """
        def main():
            CheckpointManager("s3://orderly-ends/run").save(b"x", 5)
        main()
        """
    done = run(tmp_path, program, "", **{**s3_server, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert done.returncode == CLEANUP_FAILED, done.stderr
    assert "strata: the checkpoint of step 5 is not in s3://orderly-ends/run: " in done.stderr
