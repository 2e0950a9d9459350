"""A real Slurm of two nodes on this machine, with a partition that is preempted by another."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from dtruntime.testing import eventually
from tests.support.servers.s3_server import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
GRACE_SECONDS = 60
PATIENCE = 100.0
CONFIGURATION = """\
ClusterName=strata
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A job that is put back must not start before the credentials of its last start have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=30
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
NodeName=d1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=d2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=low Nodes=d1,d2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=d1,d2 PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """Its daemons are children of this process, and end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STRATA_"))}
        self.environment = {
            **inherited,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(folder),
        }

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def _start(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._write_configuration()
        names = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
        places = {name: f"{self.folder}/munge.{ending}" for name, ending in names.items()}
        files = [f"--{name}-file={place}" for name, place in places.items() if name != "socket"]
        # It is forced, since folders of tests are not open to all users.
        self._daemon("munged", "--foreground", "--force", f"--socket={places['socket']}", *files)
        eventually(Path(places["socket"]).exists, what="the start of munged")
        self._daemon("slurmctld", "-D", "-c")
        for node in ("d1", "d2"):
            self._daemon("slurmd", "-D", "-N", node)
        eventually(self._is_up, within=PATIENCE, what="two idle nodes")

    def _write_configuration(self) -> None:
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            ports=free_ports(3),
            folder=self.folder,
            user=getpass.getuser(),
            grace=GRACE_SECONDS,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _daemon(self, name: str, *options: str) -> None:
        path = self.folder / f"{name}{options[-1] if name == 'slurmd' else ''}.log"
        with path.open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [shutil.which(name) or name, *options],
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _is_up(self) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args!r} has ended\n{self.logs()}"
        return self.command("sinfo", "-h", "-p", "low", "-o", "%T %D", check=False) == "idle 2"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.command("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), check=False)
        self._stop()

    def _stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()

    def command(self, *words: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def submit(self, *words: str, environment: Mapping[str, str] | None = None) -> "SlurmJob":
        """Submit a batch script, with what the environment has besides."""
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            env={**self.environment, **(environment or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return SlurmJob(self, done.stdout.strip())


class SlurmJob:
    """A job that was submitted."""

    def __init__(self, cluster: SlurmCluster, number: str) -> None:
        self.cluster = cluster
        self.number = number

    def field(self, name: str) -> str:
        """What ``scontrol show job`` says of it."""
        shown = self.cluster.command("scontrol", "show", "job", "-o", self.number, check=False)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word).get(name, "")

    @property
    def restarts(self) -> int:
        return int(self.field("Restarts"))

    def update(self, change: str) -> None:
        self.cluster.command("scontrol", "update", f"JobId={self.number}", change)

    def until(self, *states: str) -> str:
        """Wait until it is in one of these states."""

        def state() -> str:
            now = self.field("JobState")
            if now in states:
                return now
            if now in ENDED and ENDED.isdisjoint(states):
                pytest.fail(f"job {self.number} has ended: {now}")
            return ""

        return eventually(state, within=PATIENCE, what=f"job {self.number} to be {states}")

    def until_restarted(self) -> None:
        """Wait until it has been put back into the queue."""
        self.until("PENDING")
        eventually(lambda: self.restarts, within=PATIENCE, what=f"a restart of {self.number}")

    def end(self) -> str:
        """How it ended, when it has: its state and its exit status."""
        state = self.until(*ENDED)
        return f"{state} {self.field('ExitCode').partition(':')[0]}"
