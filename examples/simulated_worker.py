"""Many workers that train nothing: load for a coordinator, and life for a demonstration.

    strata coordinator 127.0.0.1:50051 &
    python examples/simulated_worker.py --workers 200 --seconds 60 --die-every 10 --checkpoints
    strata status --watch --job simulation

All workers live in this one process, up to a thousand of them. Each is a member of its own with
its own connection, rank and heartbeats. It takes steps of about ``--step-seconds``, reports how
far it is, and meets the others at a barrier after each epoch. One in twenty is a straggler. With
``--die-every`` now and then one falls silent, as a machine does that has lost power; the others
go on when the coordinator has declared it dead, and later it is started again. The same
``--seed`` gives the same workers.
"""

import argparse
import asyncio
import math
import os
import random
import resource
import time

from dtruntime import SyncError, TrainingOrchestrator, WorkerConfig
from dtruntime._sync_bridge import awaitable
from dtruntime.client import Observer
from dtruntime.telemetry import configure_logging

STRAGGLERS = 0.05
MEETING_MS = 60_000
HEARTBEATS_PER_SECOND = 250
"""Of all workers together: one core has to be enough for a thousand."""


class Mortal(TrainingOrchestrator):
    """A worker that can die without a word."""

    @awaitable
    async def fall_silent(self) -> None:
        # There is no such call in the interface: processes that die do not announce it.
        await self._heartbeats.stop()


class Crowd:
    """All workers, and how far they are together."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.epoch = 0
        """The epoch that is trained: all have met after those before it."""
        self.step = 0
        """The furthest step of any worker."""
        self.steps = 0
        """The steps of all workers together."""
        self.deaths = 0
        self.rejoined = 0
        self.workers = [SimulatedWorker(self, number) for number in range(options.workers)]

    async def run(self) -> None:
        began = time.monotonic()
        await asyncio.gather(*(worker.join() for worker in self.workers))
        print(f"{len(self.workers)} registered in {time.monotonic() - began:.1f} s", flush=True)
        living = [asyncio.create_task(worker.live()) for worker in self.workers]
        living += [asyncio.create_task(self.narrate())]
        if self.options.die_every:
            living += [asyncio.create_task(self.reap())]
        _, still = await asyncio.wait(
            living, timeout=self.options.seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in still:
            task.cancel()
        ended = await asyncio.gather(*living, return_exceptions=True)
        print(self.verdict(await self.status()), flush=True)
        await asyncio.gather(*(worker.leave() for worker in self.workers))
        for error in ended:
            if not isinstance(error, asyncio.CancelledError | None):
                raise error

    async def reap(self) -> None:
        """Let one of the workers die every now and then, and start it again."""
        while True:
            await asyncio.sleep(self.random.expovariate(1 / self.options.die_every))
            self.random.choice(self.workers).doom()

    async def narrate(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            alive = sum(not worker.is_doomed for worker in self.workers)
            print(
                f"epoch {self.epoch}, {self.steps:,} steps of all, {alive} alive, "
                f"{self.deaths} died, {self.rejoined} came back",
                flush=True,
            )

    async def status(self):
        observer = Observer(self.options.coordinator)
        try:
            return await observer.status_async(self.options.job)
        finally:
            await observer.close_async()

    def verdict(self, status) -> str:
        stragglers = sum(worker.is_straggler for worker in status.workers)
        return (
            f"the coordinator sees {status.live_workers} live and {status.dead_workers} dead, "
            f"{stragglers} stragglers, {status.checkpoint_count} checkpoints, "
            f"generation {status.generation}"
        )


class SimulatedWorker:
    """One worker's life."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd = crowd
        self.number = number
        self.random = random.Random(f"{crowd.options.seed}/{number}")
        slow = self.random.random() < STRAGGLERS
        self.pace = self.random.uniform(1.8, 3.0) if slow else self.random.uniform(0.95, 1.05)
        options = crowd.options
        interval = max(1_000, 1_000 * options.workers // HEARTBEATS_PER_SECOND)
        self.config = WorkerConfig(
            coordinator_url=options.coordinator,
            job=options.job,
            rank=number,
            world_size=options.workers,
            gpu_count=8,
            # Longer than the coordinator allows is shortened by itself.
            heartbeat_interval_ms=interval,
            metadata={"simulated": "yes"},
        )
        self.member = Mortal(self.config)
        self.doomed = asyncio.Event()

    @property
    def is_doomed(self) -> bool:
        return self.doomed.is_set()

    def doom(self) -> None:
        self.doomed.set()

    async def join(self) -> None:
        await self.member.register_worker(ip=f"node-{self.number // 8}")

    async def leave(self) -> None:
        await self.member.deregister_worker("the simulation is over")

    async def live(self) -> None:
        while True:
            training = asyncio.create_task(self.train(self.crowd.step))
            death = asyncio.create_task(self.doomed.wait())
            try:
                await asyncio.wait({training, death}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                training.cancel()
                death.cancel()
            if not self.is_doomed:
                await training  # raises what it failed with
            await self.die_and_return()

    async def die_and_return(self) -> None:
        await self.member.fall_silent()
        self.crowd.deaths += 1
        await asyncio.sleep(self.crowd.options.rejoin_seconds)
        # A process that is started again knows nothing of the one before.
        self.member = Mortal(self.config)
        await self.join()
        self.doomed.clear()
        self.crowd.rejoined += 1

    async def train(self, step: int) -> None:
        """Train from a step on: one that was started again goes on where the others are."""
        options, crowd = self.crowd.options, self.crowd
        while True:
            epoch = crowd.epoch
            while step < (epoch + 1) * options.epoch_steps:
                step += 1
                await self.step(epoch, step)
            await self.meet(epoch)
            if options.checkpoints and self.config.rank == 0:
                await self.save(epoch)

    async def step(self, epoch: int, step: int) -> None:
        seconds = self.crowd.options.step_seconds * self.pace * self.random.uniform(0.9, 1.1)
        await asyncio.sleep(seconds)
        self.crowd.steps += 1
        self.crowd.step = max(self.crowd.step, step)
        loss = 4.0 * math.exp(-step / 200) + 0.5 + self.random.gauss(0.0, 0.02)
        self.member.report(
            step=step, epoch=epoch, state="training", loss=loss, step_seconds=seconds
        )

    async def meet(self, epoch: int) -> None:
        """Meet all others; when one is lost meanwhile, those who are left."""
        while self.crowd.epoch == epoch:
            try:
                await self.member.wait_barrier(f"epoch-{epoch}", timeout_ms=MEETING_MS)
                self.crowd.epoch = epoch + 1
            except SyncError as error:
                if error.reason == "superseded":
                    await self.join()  # this one was taken for dead
                self.member.report(state="recovering")

    async def save(self, epoch: int) -> None:
        step = (epoch + 1) * self.crowd.options.epoch_steps
        self.member.report(state="checkpointing")
        await self.member.commit_checkpoint_async(
            f"simulated-{step}",
            step,
            epoch=epoch,
            path=f"nowhere/step-{step}",
            size_bytes=self.random.randrange(10**9, 2 * 10**9),
            simulated="yes",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8, help="1 to 1,000")
    url = os.environ.get("COORDINATOR_URL", "http://127.0.0.1:50051")
    parser.add_argument("--coordinator", default=url, metavar="URL", help="default: %(default)s")
    parser.add_argument("--job", default="simulation")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--epoch-steps", type=int, default=20, help="steps from barrier to barrier")
    parser.add_argument("--die-every", type=float, metavar="SECONDS", help="on average")
    parser.add_argument("--rejoin-seconds", type=float, default=10.0, help="after a death")
    parser.add_argument("--checkpoints", action="store_true", help="commit one after each epoch")
    options = parser.parse_args()
    if not 1 <= options.workers <= 1_000:
        parser.error("--workers must be 1 to 1,000")
    os.environ.setdefault("STRATA_LOG", "error")  # a thousand registrations are no news
    configure_logging()
    # Every worker has a connection of its own.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(simulate(options))


async def simulate(options: argparse.Namespace) -> None:
    await Crowd(options).run()


if __name__ == "__main__":
    main()
