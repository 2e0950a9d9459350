"""Run the images with podman: a coordinator and four workers, one of which is killed and replaced.

    python scripts/images/rehearse.py

All containers are on the host's network and bound to loopback. The same training is done twice:
undisturbed, and with a worker container that gets SIGKILL in the middle. Exit status 0 means that
both end with the same weights, bit for bit, that every sample was read once per epoch, that the
health check, the dashboard and the metrics answer, and that nothing runs as root.
"""

import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

PODMAN = ["podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "--storage-driver=overlay"]
# Where the engine itself runs in a container, the defaults are above what it may set.
LIMITS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
HARDENED = ["--network=host", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"]
WORKERS = 4
EPOCHS = 3
TRAINING = ["python", "/opt/strata/examples/numpy_training.py", "--checkpoints=/run-data/ckpt"]
PATIENCE = 180.0


def podman(*arguments: str, check: bool = True) -> str:
    done = subprocess.run([*PODMAN, *arguments], capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"podman {' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout.strip()


def eventually(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE:.0f} s in vain: {what}")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Container:
    """A container in the background, removed by its own id."""

    def __init__(self, image: str, *arguments: str, options: list[str]) -> None:
        command = ["run", "--detach", *LIMITS, *HARDENED, *options, image, *arguments]
        self.id = podman(*command)

    @property
    def log(self) -> str:
        done = subprocess.run(
            [*PODMAN, "logs", self.id], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.stdout

    def inspect(self, template: str) -> str:
        return podman("inspect", "--format", template, self.id)

    def wait(self) -> int:
        eventually(f"the end of {self.id[:12]}\n{self.log[-2000:]}", self.has_ended)
        return int(self.inspect("{{.State.ExitCode}}"))

    def has_ended(self) -> bool:
        return self.inspect("{{.State.Status}}") == "exited"

    def is_healthy(self) -> bool:
        command = [*PODMAN, "healthcheck", "run", self.id]
        return subprocess.run(command, capture_output=True).returncode == 0

    def remove(self) -> None:
        podman("rm", "--force", "--time=0", self.id, check=False)


class Rehearsal:
    """One coordinator, and what runs under it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.http_port = free_port(), free_port()
        self.containers: list[Container] = []

    def start(self, image: str, *arguments: str, options: list[str]) -> Container:
        container = Container(image, *arguments, options=options)
        self.containers.append(container)
        return container

    def start_coordinator(self) -> Container:
        addresses = {
            "STRATA_ADDRESS": f"127.0.0.1:{self.port}",
            "STRATA_HTTP_ADDRESS": f"127.0.0.1:{self.http_port}",
            "STRATA_HEARTBEAT_TIMEOUT_MS": "5000",
        }
        options = [f"--env={name}={value}" for name, value in addresses.items()]
        return self.start("strata-coordinator", options=options)

    def start_worker(self, job: str, *arguments: str) -> Container:
        place = self.folder / job
        place.mkdir(exist_ok=True)
        place.chmod(0o777)
        options = [
            f"--env=COORDINATOR_URL=http://127.0.0.1:{self.port}",
            f"--env=STRATA_JOB={job}",
            f"--env=WORLD_SIZE={WORKERS}",
            f"--volume={place}:/run-data",
        ]
        tuning = [f"--epochs={EPOCHS}", f"--min-workers={WORKERS}", *arguments]
        return self.start("strata-worker", *TRAINING, *tuning, options=options)

    def train(self, job: str, *, kill: bool) -> str:
        """Train to the end; returns the digest of the weights, which all workers agree on."""
        slow = ["--step-seconds=0.05"] if kill else []
        crew = [self.start_worker(job, *slow) for _ in range(WORKERS)]
        if kill:
            crew[-1:] = [self.replace(job, crew)]
        codes = [worker.wait() for worker in crew]
        logs = "\n".join(worker.log for worker in crew)
        require(codes == [0] * WORKERS, f"exit codes {codes}\n{logs}")
        require(logs.count("every sample once") == EPOCHS, f"coverage\n{logs}")
        digests = re.findall(r"finished after step \d+, weights (\w+)", logs)
        require(len(digests) == WORKERS and len(set(digests)) == 1, f"weights differ\n{logs}")
        return digests[0]

    def replace(self, job: str, crew: list[Container]) -> Container:
        """Kill the last container in the middle of training, and start another in its place."""
        victim = crew[-1]

        def is_in_the_middle() -> bool:
            return any("step 60:" in worker.log for worker in crew)

        eventually(f"step 60 of {job}", is_in_the_middle)
        podman("kill", "--signal=KILL", victim.id)
        require(victim.wait() == 137, "the victim was not ended by SIGKILL")
        successor = self.start_worker(job, "--step-seconds=0.05")
        eventually("the replacement begins", lambda: "begins after step" in successor.log)
        found = re.search(r"begins after step (\d+)", successor.log)
        require(found is not None and int(found[1]) >= 40, f"resumed too early\n{successor.log}")
        return successor

    def fetch(self, path: str) -> str:
        url = f"http://127.0.0.1:{self.http_port}{path}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return str(reply.read().decode())


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"FAILED: {otherwise}")


def say(text: str) -> None:
    print(text, flush=True)


def rehearse(rehearsal: Rehearsal) -> None:
    coordinator = rehearsal.start_coordinator()
    eventually("the coordinator is healthy", coordinator.is_healthy)
    say("the coordinator is healthy, by its own health check")
    uid = podman("exec", coordinator.id, "python", "-c", "import os; print(os.getuid())")
    require(uid == "10001", f"the coordinator runs as user {uid}")
    whole = rehearsal.train("undisturbed", kill=False)
    say(f"{WORKERS} worker containers trained undisturbed: weights {whole}")
    killed = rehearsal.train("disturbed", kill=True)
    say(f"one got SIGKILL and was replaced: weights {killed}")
    require(whole == killed, "the weights are not those of the undisturbed run")
    require("<html" in rehearsal.fetch("/"), "no dashboard")
    require("strata_" in rehearsal.fetch("/metrics"), "no metrics")
    say("the dashboard and the metrics answer")
    podman("stop", "--time=30", coordinator.id)
    code = coordinator.inspect("{{.State.ExitCode}}")
    require(code == "0", f"the coordinator ended with {code} after SIGTERM\n{coordinator.log}")
    say("the coordinator ended by itself after SIGTERM")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="strata-rehearsal-") as folder:
        rehearsal = Rehearsal(Path(folder))
        try:
            rehearse(rehearsal)
        finally:
            for container in rehearsal.containers:
                container.remove()
    say("the images work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
