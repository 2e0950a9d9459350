"""The service as any gRPC client sees it: messages out, messages or status codes back."""

import itertools
from collections.abc import Iterator
from typing import Any

import grpc

from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.rpc.methods import METHODS

SECONDS = 30.0


class Refusal(Exception):
    """A call that ended with a status other than OK."""

    def __init__(self, error: grpc.RpcError) -> None:
        call: Any = error
        self.code: grpc.StatusCode = call.code()
        self.message: str = call.details() or ""
        self.trailing: dict[str, str] = dict(call.trailing_metadata() or ())
        super().__init__(f"{self.code.name}: {self.message}")

    @property
    def reason(self) -> str:
        return str(self.trailing.get("strata-reason", ""))


class HeldCall:
    """A call in flight."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self, timeout: float = SECONDS) -> Any:
        try:
            return self._future.result(timeout)
        except grpc.RpcError as exc:
            raise Refusal(exc) from None

    def done(self) -> bool:
        return bool(self._future.done())

    def cancel(self) -> None:
        self._future.cancel()


class RawClient:
    """Calls to one coordinator for one job, nothing retried."""

    def __init__(self, url: str, job: str = "") -> None:
        self.job = job
        self.channel = grpc.insecure_channel(
            url.removeprefix("http://"), options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._sessions = (f"session-{n}" for n in itertools.count())

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stub(self, method: str) -> Any:
        known = METHODS[method]
        make = self.channel.unary_stream if known.streams else self.channel.unary_unary
        return make(
            known.path,
            request_serializer=known.request.SerializeToString,
            response_deserializer=known.reply.FromString,
        )

    def begin(self, method: str, request: Any, timeout: float = SECONDS) -> HeldCall:
        """Start a call and do not wait for it."""
        return HeldCall(self.stub(method).future(request, timeout=timeout))

    def call(self, method: str, request: Any = None, /, **fields: Any) -> Any:
        """Call with a message, or with the fields of one; the job is filled in."""
        kind: Any = METHODS[method].request
        if request is None:
            if "job" in kind.DESCRIPTOR.fields_by_name:
                fields.setdefault("job", self.job)
            request = kind(**fields)
        return self.begin(method, request).result()

    def call_bytes(self, method: str, payload: bytes) -> bytes:
        """Send bytes that need not be a message."""
        try:
            call = self.channel.unary_unary(METHODS[method].path)
            return bytes(call(payload, timeout=SECONDS))
        except grpc.RpcError as exc:
            raise Refusal(exc) from None

    def watch(self, after_id: int = 0, follow: bool = False) -> Any:
        request = pb.WatchRequest(job=self.job, after_id=after_id, follow=follow)
        return self.stub("WatchEvents")(request, timeout=SECONDS)

    # A worker's calls

    def register(self, **fields: Any) -> "RawWorker":
        return RawWorker(self, self.call("RegisterWorker", **fields))

    def workers(self, count: int, **fields: Any) -> "list[RawWorker]":
        return [self.register(**fields) for _ in range(count)]

    def statuses(self) -> dict[str, pb.WorkerStatus]:
        return {w.worker_id: w for w in self.call("GetStatus").workers}

    def events(self) -> Iterator[pb.Event]:
        return iter(list(self.watch()))


class RawWorker:
    """A member without heartbeats of its own."""

    def __init__(self, client: RawClient, registration: pb.WorkerRegistration) -> None:
        self.client = client
        self.registration = registration
        self.worker_id = registration.worker_id
        self.rank = registration.rank
        self.told = registration.generation
        self._tickets = itertools.count(1)

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "job": self.client.job,
            "worker_id": self.worker_id,
            "incarnation": self.registration.incarnation,
        }

    def heartbeat(self, **fields: Any) -> pb.HeartbeatResponse:
        reply: pb.HeartbeatResponse = self.client.call("Heartbeat", **self.identity, **fields)
        return reply

    def leave(self, reason: str = "") -> None:
        self.client.call("DeregisterWorker", **self.identity, reason=reason)

    def arrive(self, barrier_id: str, *, timeout_ms: int = 20_000, ticket: int = -1) -> HeldCall:
        """Reach a barrier; the ticket is the next one, unless given."""
        request = pb.BarrierRequest(
            barrier_id=barrier_id,
            generation=self.told,
            ticket=next(self._tickets) if ticket < 0 else ticket,
            timeout_ms=timeout_ms,
            **self.identity,
        )
        return self.client.begin("WaitBarrier", request)

    def begin_checkpoint(self, step: int, ticket: int = 1) -> pb.BeginCheckpointResponse:
        reply: pb.BeginCheckpointResponse = self.client.call(
            "BeginCheckpoint", **self.identity, step=step, ticket=ticket
        )
        return reply

    def commit(self, checkpoint_id: str, step: int, **fields: Any) -> HeldCall:
        request = pb.CheckpointInfo(
            checkpoint_id=checkpoint_id,
            step=step,
            generation=self.told,
            **self.identity,
            **fields,
        )
        return self.client.begin("NotifyCheckpoint", request)
