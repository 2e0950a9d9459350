"""Whether registered means stored: the coordinator is killed and counts its workers again."""

from __future__ import annotations

from pathlib import Path

from .client import connect
from .operations import Bench, register_workers
from .profiles import Profile
from .servers import Kind, start
from .tools import Tools
from .verify import Verdict

WORKERS = 500
JOB = "survivors"


def check(tools: Tools, profile: Profile, scratch: Path) -> Verdict:
    """Register workers, kill the coordinator at once, start another on the same data."""
    kind, folder = Kind.STRATA_NATIVE, scratch / "durability"
    with start(kind, tools, folder) as server:
        bench = Bench(tools, scratch, profile, {kind: server})
        register_workers(bench, kind, JOB, WORKERS)
        server.process.kill()
    with start(kind, tools, folder) as server, connect(server.address) as client:
        survivors = client.live_workers(JOB)
    return Verdict(min(survivors, WORKERS), abs(WORKERS - survivors))
