"""A task that is no training: several workers search a space of keys, and no key is left out.

There are ``--space`` numbered keys, and the SHA-256 digests of a handful of them. Which are they?

    strata coordinator 127.0.0.1:50051 &
    export COORDINATOR_URL=http://127.0.0.1:50051 STRATA_JOB=search
    for i in 1 2 3; do python examples/distributed_task.py --folder /tmp/search & done

Kill a worker with ``kill -9`` whenever you like: what it had not committed is tried by the others.
Start more: they get their share. Started again later, a worker goes on from its last commit. At
the end one worker prints the keys, and the coordinator's proof that every key was tried, none of
them twice, as far as commits count.
"""

import argparse
import random
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from dtruntime import CheckpointManager, DatasetRegistry, SyncError, TrainingOrchestrator
from dtruntime.telemetry import configure_logging

DATASET = "keys"


def digest_of(number: int) -> bytes:
    """The digest of a key; its text is all but the number a constant."""
    return sha256(b"strata:%d" % number).digest()


def wanted_digests(space: int, count: int, seed: int) -> frozenset[bytes]:
    """What is searched for. A real task would be given these, and not the numbers."""
    return frozenset(map(digest_of, random.Random(seed).sample(range(space), count)))


def try_keys(numbers: Iterable[int], wanted: frozenset[bytes]) -> list[int]:
    return [number for number in numbers if digest_of(number) in wanted]


def search(worker: TrainingOrchestrator, options: argparse.Namespace) -> int:
    """Try this worker's share of the keys; returns how many those were."""
    datasets = DatasetRegistry()
    datasets.register_dataset(DATASET, options.space, options.shard_size, shuffle=False)
    keys = datasets.live_loader(DATASET, options.batch_size)
    if keys.epoch > 0:
        return 0  # all keys have been tried before
    wanted = wanted_digests(options.space, options.wanted, options.seed)
    tried = 0
    with CheckpointManager(options.folder / worker.worker_id, keep_count=1) as findings:
        latest = findings.latest()
        found = list(findings.load_state()["found"]) if latest else []
        for number, batch in enumerate(keys, 1):
            tried += len(batch["sample"])
            if new := try_keys(batch["sample"].tolist(), wanted):
                # Kept before the keys count as tried: nobody will try them again.
                found += new
                findings.save({"found": found}, step=len(found)).wait()
            worker.report(step=number, state="training", tried=tried, found=len(found))
            if number % options.commit_batches == 0:
                keys.commit()
                print(f"{worker.worker_id} has committed {tried:,} keys", flush=True)
            time.sleep(options.batch_seconds)
    return tried


def meet(worker: TrainingOrchestrator, tried: int) -> dict[int, int]:
    """Wait for all others who are left; returns how many keys each has tried, by rank."""
    while True:
        try:
            values = worker.exchange("searched", str(tried).encode(), timeout_ms=60_000)
            return {rank: int(value) for rank, value in values.items()}
        except SyncError as error:
            if error.reason != "membership_changed":
                raise


def show_result(folder: Path, tried: dict[int, int]) -> None:
    found: set[int] = set()
    for place in sorted(folder.iterdir()):
        with CheckpointManager(place) as findings:
            if findings.latest():
                found.update(findings.load_state()["found"])
    print(f"found {sorted(found)}")
    print("tried by rank:", ", ".join(f"{rank}: {count:,}" for rank, count in tried.items()))
    for proof in DatasetRegistry().coverage(DATASET):
        print(
            f"proof: {proof.covered:,} of {proof.total:,} keys tried, {proof.missing} missing, "
            f"{proof.repeated} repeated, dealt out {proof.segments} times"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("search"), help="for what is found")
    parser.add_argument("--space", type=int, default=2_000_000, help="how many keys there are")
    parser.add_argument("--wanted", type=int, default=5, help="how many digests are given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=5_000)
    parser.add_argument("--commit-batches", type=int, default=4, help="from commit to commit")
    parser.add_argument("--batch-seconds", type=float, default=0.0, help="make batches this slow")
    options = parser.parse_args()
    configure_logging()
    options.folder.mkdir(parents=True, exist_ok=True)
    with TrainingOrchestrator() as worker:
        print(f"{worker.register()} searches", flush=True)
        tried = meet(worker, search(worker, options))
        if worker.rank == min(tried):
            show_result(options.folder, tried)


if __name__ == "__main__":
    main()
