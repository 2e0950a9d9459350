"""k6: a second generator, with the .proto, that checks what h2load does not look at."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from dtruntime.rpc.gen import coordinator_pb2 as pb

from ..harness import BenchmarkError
from . import messages
from .client import Client
from .servers import Server, Tools

SCRIPT = Path(__file__).with_name("verify.js")
PROTOS = Path(__file__).parents[2] / "proto"
RUN_TIMEOUT = 360.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many replies were right, in status and in fields."""

    verified: int
    failed: int


@dataclass(frozen=True, slots=True)
class Verifier:
    """k6 against one coordinator."""

    tools: Tools
    server: Server
    scratch: Path

    def heartbeats(
        self, request: pb.HeartbeatRequest, expected: pb.HeartbeatResponse, vus: int, each: int
    ) -> Verdict:
        """Every reply names the generation and the number of members."""
        plan = {
            "request": _as_json(request),
            "generation": expected.generation,
            "liveWorkers": expected.live_workers,
        }
        return self._run("heartbeat", plan, vus, each)

    def shards(
        self, request: pb.ShardRequest, expected: Sequence[pb.ShardAssignment], vus: int, each: int
    ) -> Verdict:
        """Every index gives the shard that ListShards has at that place."""
        shards = [
            {"shardId": s.shard_id, "startSample": s.start_sample, "endSample": s.end_sample}
            for s in expected
        ]
        return self._run("shard", {"request": _as_json(request), "shards": shards}, vus, each)

    def registrations(self, client: Client, job: str, vus: int, each: int) -> Verdict:
        """Every reply is a worker of its own: as many members as replies."""
        plan = {"request": _as_json(messages.registration(job))}
        verdict = self._run("registration", plan, vus, each)
        missing = abs(vus * each - client.live_workers(job))
        return Verdict(verdict.verified - missing, verdict.failed + missing)

    def barriers(self, arrivals: Sequence[pb.BarrierRequest], rounds: int) -> Verdict:
        """Every worker sees every round complete, in order, with all participants."""
        plan = {"arrivals": [_as_json(arrival) for arrival in arrivals]}
        return self._run("barrier", plan, len(arrivals), rounds)

    def _run(self, operation: str, plan: Mapping[str, Any], vus: int, each: int) -> Verdict:
        summary, plan_file = self.scratch / "verdict.json", self.scratch / "plan.json"
        summary.unlink(missing_ok=True)
        common = {
            "operation": operation,
            "service": messages.SERVICE,
            "address": self.server.address,
            "protos": str(PROTOS),
            "summary": str(summary),
            "vus": vus,
            "iterations": each,
        }
        plan_file.write_text(json.dumps({**common, **plan}))
        errors = self._k6(plan_file)
        if not summary.exists():
            raise BenchmarkError(f"k6 could not verify {operation}:\n{errors[-2000:]}")
        counts = json.loads(summary.read_text())
        return Verdict(counts["verified"], vus * each - counts["verified"])

    def _k6(self, plan: Path) -> str:
        command = self.tools.on_load_cores(
            self.tools.k6, "run", "--quiet", "--no-usage-report", "-e", f"PLAN={plan}", str(SCRIPT)
        )
        finished = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT)
        self.scratch.joinpath("k6.log").write_text(finished.stderr)
        return finished.stderr


def _as_json(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = MessageToDict(message)
    return fields
