"""The gRPC server: pygrpc-native when it is installed, otherwise grpc.aio.

Both bring unary calls to one function. On the native front an answer goes out by its
call id, without a task or a context per call; what it does not serve (streams, health,
reflection) it hands to a grpc.aio server behind a Unix socket.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from ..errors import ConnectionError
from ..rpc.methods import METHODS, SERVICE, Method
from ..rpc.status_codes import CODES, Metadata, trailing_metadata
from ..telemetry import EventLog, tracing
from .state import Refused

log = EventLog("transport")

MESSAGE_LENGTH = 1000
"""Characters of a status message; more than 16 KiB of headers would break the connection."""

TRACKED_BYTES = 1024
"""Smaller answers are not worth counting: a call that waits costs as much."""
ADDRESS_UNREAD_BYTES = 32 * 1024 * 1024
UNREAD_BYTES = 256 * 1024 * 1024
UNIX_PATH = 100
"""The kernel refuses longer paths of Unix sockets; then the folder is named by descriptor."""

Choice = Literal["auto", "pygrpc-native", "grpc.aio"]
Answer = Message | asyncio.Future[Message]


REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class CallHandler(Protocol):
    """What a transport needs of the service."""

    def admit(self, method: str, peer: str) -> None:
        """Refuse a call from an address that makes too many, before its request is parsed."""
        ...

    def handle(self, method: str, request: Any, metadata: Any = ()) -> Answer:
        """Answer a unary call, now or later; ``metadata`` is the call's own."""
        ...

    def watch(self, request: Any) -> AsyncIterator[Message]:
        """Answer the streaming call."""
        ...

    def request_limit(self, method: str) -> int:
        """How many bytes a request may have."""
        ...

    def refuse_oversized(self, method: str, size: int) -> Refused:
        """The refusal of a request that is too large."""
        ...

    def refuse_unreadable(self, method: str, error: Exception) -> Refused:
        """The refusal of a request that cannot be parsed."""
        ...


def native_is_installed() -> bool:
    """Whether pygrpc-native can be used."""
    return importlib.util.find_spec("pygrpc_native") is not None


def open_transport(
    service: CallHandler,
    address: str,
    choice: Choice = "auto",
    socket_dir: str = "",
) -> Transport:
    """Choose and create the server; the port is bound on return.

    ``socket_dir`` is where the native front may keep its Unix socket.
    """
    if choice == "pygrpc-native" and not native_is_installed():
        raise ConnectionError(
            "transport pygrpc-native was requested but is not installed: "
            "pip install 'dtruntime[fast]', or use --transport grpc.aio"
        )
    use_native = choice == "pygrpc-native" or (choice == "auto" and native_is_installed())
    try:
        if use_native:
            return NativeTransport(service, address, socket_dir)
        return AioTransport(service, address)
    except (RuntimeError, OSError) as exc:
        raise ConnectionError(
            f"cannot listen on {address}: {exc}. The host must be this machine's, the port free: "
            "stop the coordinator or the program that uses it, or choose another address"
        ) from exc


def _status_of(error: BaseException) -> tuple[grpc.StatusCode, str, Metadata]:
    if isinstance(error, Refused):
        trailing = trailing_metadata(error.reason, error.retry_after)
        return CODES[error.reason], _cut(str(error)), trailing
    log.error("call.failed", error=repr(error))
    return grpc.StatusCode.INTERNAL, _cut(f"internal error: {type(error).__name__}: {error}"), ()


def _cut(message: str) -> str:
    """Shorten a message so that it fits into a header: it may quote long names."""
    return message if len(message) <= MESSAGE_LENGTH else f"{message[:MESSAGE_LENGTH]}…"


def _parser(service: CallHandler, method: Method) -> Callable[[bytes], Message]:
    limit, parse = service.request_limit(method.name), method.request.FromString

    def read(payload: bytes) -> Message:
        if len(payload) > limit:
            raise service.refuse_oversized(method.name, len(payload))
        try:
            return parse(payload)
        except DecodeError as exc:
            raise service.refuse_unreadable(method.name, exc) from None

    return read


def _stream_handler(service: CallHandler, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
    parse = _parser(service, method)

    async def call(payload: bytes, context: Any) -> AsyncIterator[Message]:
        try:
            async for message in service.watch(parse(payload)):
                yield message
        except Exception as exc:
            await context.abort(*_status_of(exc))

    return grpc.unary_stream_rpc_method_handler(
        call, response_serializer=method.reply.SerializeToString
    )


def _unary_handler(
    service: CallHandler, method: Method, unread: UnreadAnswers
) -> grpc.RpcMethodHandler[Any, Any]:
    parse = _parser(service, method)

    async def call(payload: bytes, context: Any) -> Message:
        peer = context.peer()
        try:
            service.admit(method.name, peer)
            sent = context.invocation_metadata() if tracing.is_on() else ()
            answer = service.handle(method.name, parse(payload), sent)
            message = answer if isinstance(answer, Message) else await answer
            size = message.ByteSize()
            if size >= TRACKED_BYTES:
                unread.take(peer, size)
                context.add_done_callback(lambda _: unread.read(peer, size))
            return message
        except Exception as exc:
            await context.abort(*_status_of(exc))
            raise

    return grpc.unary_unary_rpc_method_handler(
        call, response_serializer=method.reply.SerializeToString
    )


class UnreadAnswers:
    """Answers that clients have not read yet, per address and in total.

    A client that sends requests without reading the answers would fill the memory, so further
    answers to its address are refused.
    """

    def __init__(self, unread: Callable[[], int] | None = None) -> None:
        """``unread`` measures how many bytes wait in total; None: `read` reports each answer."""
        self._unread = unread
        self._answers: list[tuple[str, int]] = []
        self._of_address: Counter[str] = Counter()
        self._measured_at = 0.0
        self.total = 0

    def take(self, peer: str, size: int) -> None:
        """Count an answer that is about to be sent, or refuse it."""
        if size < TRACKED_BYTES:
            return
        address = peer.rpartition(":")[0]
        if time.monotonic() - self._measured_at > 1.0 or self._is_full(address, size):
            self._measure()
        if self._is_full(address, size):
            raise Refused(
                "rate_limited",
                f"{self._of_address[address]} bytes of answers to {address} are not read yet, "
                f"{self.total} in all: read them before asking for more",
                retry_after=1.0,
            )
        self.total += size
        self._of_address[address] += size
        if self._unread is not None:
            self._answers.append((address, size))

    def read(self, peer: str, size: int) -> None:
        """An answer has been read, or its call has ended."""
        self._forget(peer.rpartition(":")[0], size)

    def _is_full(self, address: str, size: int) -> bool:
        """One answer of any size always fits."""
        own = self._of_address.get(address, 0)
        return bool(own and own + size > ADDRESS_UNREAD_BYTES) or bool(
            self.total and self.total + size > UNREAD_BYTES
        )

    def _measure(self) -> None:
        """Forget as many bytes as were read, of the newest answers first.

        Whose they were is unknown; clients that do not read have the oldest.
        """
        self._measured_at = time.monotonic()
        if self._unread is None:
            return
        waiting = self._unread()
        while self._answers and self.total > waiting:
            address, size = self._answers.pop()
            kept = max(0, size - (self.total - waiting))
            self._forget(address, size - kept)
            if kept:
                self._answers.append((address, kept))

    def _forget(self, address: str, size: int) -> None:
        self.total -= size
        self._of_address[address] -= size
        if self._of_address[address] <= 0:
            del self._of_address[address]


class _SocketPlace:
    """The Unix socket, in the data directory: a killed coordinator leaves nothing elsewhere."""

    def __init__(self, folder: str) -> None:
        self._folder = -1
        self._own = "" if folder else tempfile.mkdtemp(prefix="strata-")
        self.path = Path(folder or self._own, "side.sock").absolute()
        if len(str(self.path)) > UNIX_PATH:
            self._folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            self.path = Path(f"/proc/self/fd/{self._folder}/side.sock")

    def clear(self) -> None:
        with suppress(OSError):  # not ours: then it was not made either
            self.path.unlink(missing_ok=True)
        if self._folder >= 0:
            os.close(self._folder)
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)


def _serve_reflection(server: grpc.aio.Server) -> None:
    """Serve reflection in both versions that clients use; their messages are the same."""
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1)
    _describe_reflection_v1()
    servicer = reflection.aio.ReflectionServicer(names)
    add = cast(Callable[..., None], reflection_pb2_grpc.add_ServerReflectionServicer_to_server)
    add(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    own = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((own,))


@functools.cache
def _describe_reflection_v1() -> None:
    """Register version 1 of reflection, which grpcio-reflection lacks."""
    file = descriptor_pb2.FileDescriptorProto()
    file.ParseFromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = file.package.replace("v1alpha", "v1")
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace("v1alpha", "v1")
    for method in file.service[0].method:
        method.input_type = method.input_type.replace("v1alpha", "v1")
        method.output_type = method.output_type.replace("v1alpha", "v1")
    pool: Any = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    pool.AddSerializedFile(file.SerializeToString())


class _AioServer:
    """A grpc.aio server with some of the service's methods, health and reflection."""

    def __init__(self, service: CallHandler, methods: Sequence[Method]) -> None:
        largest = max(service.request_limit(method.name) for method in methods)
        self.server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", largest),
                ("grpc.max_send_message_length", -1),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        unread = UnreadAnswers()
        handlers = {
            m.name: _stream_handler(service, m) if m.streams else _unary_handler(service, m, unread)
            for m in methods
        }
        self.server.add_registered_method_handlers(SERVICE, handlers)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        _serve_reflection(self.server)
        self._is_started = False

    async def start(self) -> None:
        """Begin to serve."""
        self._is_started = True
        await self.server.start()
        await self._set_health("SERVING")

    async def stop(self, grace: float) -> None:
        """End; calls in flight have ``grace`` seconds."""
        if not self._is_started:  # only one that was started lets go of its ports
            await self.server.start()
        await self._set_health("NOT_SERVING")
        await self.server.stop(grace)

    async def _set_health(self, word: str) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus.Value(word)
        for name in ("", SERVICE):
            await self._health.set(name, status)


class AioTransport(_AioServer):
    """Serves with grpc.aio."""

    name = "grpc.aio"

    def __init__(self, service: CallHandler, address: str) -> None:
        super().__init__(service, tuple(METHODS.values()))
        self.port: int = self.server.add_insecure_port(address)


class NativeTransport:
    """Serves unary calls with pygrpc-native's front, and the rest with grpc.aio behind it."""

    name = "pygrpc-native"

    def __init__(self, service: CallHandler, address: str, socket_dir: str = "") -> None:
        from pygrpc_native import EVENT_CANCEL, NativeGrpcFront

        unary = [m for m in METHODS.values() if not m.streams]
        self._service = service
        self._cancel = EVENT_CANCEL
        self._table = [(m.name, _parser(service, m)) for m in unary]
        paths = [(m.path, False) for m in unary]
        self._front = NativeGrpcFront(address, paths, call_details=True, metrics=True)
        self._unread = UnreadAnswers(self._unread_bytes)
        self._answered = 0
        """Bytes of all answers so far."""
        self.port: int = self._front.bound_port
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._socket = _SocketPlace(socket_dir)
        streams = [m for m in METHODS.values() if m.streams]
        self._behind = _AioServer(service, streams)

    async def start(self) -> None:
        """Begin to serve."""
        self._behind.server.add_insecure_port(f"unix:{self._socket.path}")
        await self._behind.start()
        self._front.set_fallback(str(self._socket.path))
        self._front.start()
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._receive, args=(loop,), name="strata-receive", daemon=True
        ).start()

    async def stop(self, grace: float) -> None:
        """End; calls in flight have ``grace`` seconds."""
        if self._waiting and grace:
            await asyncio.wait(self._waiting.values(), timeout=grace)
        await asyncio.sleep(0)
        await self._behind.stop(grace)
        await asyncio.get_running_loop().run_in_executor(None, self._front.close)
        self._socket.clear()

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        while (events := self._front.recv_batch_details(256)) is not None:
            try:
                loop.call_soon_threadsafe(self._on_events, events)
            except RuntimeError:
                return

    def _on_events(self, events: list[Any]) -> None:
        admit, handle, table = self._service.admit, self._service.handle, self._table
        for kind, call, method, payload, _, details in events:
            if kind == self._cancel:
                self._hang_up(call)
                continue
            name, parse = table[method]
            peer = details[1]
            try:
                admit(name, peer)
                answer = handle(name, parse(payload), details[0])
            except Exception as exc:
                self._fail(call, exc)
                continue
            if isinstance(answer, Message):
                self._respond(call, peer, answer)
            else:
                self._waiting[call] = answer
                answer.add_done_callback(functools.partial(self._answer, call, peer))

    def _respond(self, call: int, peer: str, answer: Message) -> None:
        payload = answer.SerializeToString()
        try:
            self._unread.take(peer, len(payload))
        except Refused as refused:
            self._fail(call, refused)
            return
        if self._front.respond(call, payload):
            self._answered += len(payload)

    def _unread_bytes(self) -> int:
        """Bytes answered minus bytes sent; a call is counted once its answer is sent."""
        counted = self._front.metrics()
        methods = counted["methods"].values() if counted else ()
        sent = sum(one["sent"]["sum"] for m in methods for one in m["status"].values())
        return max(0, self._answered - int(sent))

    def _hang_up(self, call: int) -> None:
        future = self._waiting.pop(call, None)
        if future is not None:
            future.cancel()

    def _answer(self, call: int, peer: str, future: asyncio.Future[Message]) -> None:
        if self._waiting.pop(call, None) is None or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._fail(call, error)
        else:
            self._respond(call, peer, future.result())

    def _fail(self, call: int, error: BaseException) -> None:
        code, message, trailing = _status_of(error)
        self._front.fail(call, code.value[0], message, trailing_metadata=trailing)


Transport = AioTransport | NativeTransport
