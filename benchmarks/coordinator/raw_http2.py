"""gRPC calls over HTTP/2 by hand, from any address of this machine, for clients that misbehave."""

import socket
import struct
from types import TracebackType
from typing import Self

from google.protobuf.message import Message

from dtruntime.config import split_address
from dtruntime.rpc.methods import METHODS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, WINDOW_UPDATE = 0, 1, 3, 4, 8
INITIAL_WINDOW = 4
END_STREAM, END_HEADERS = 1, 4
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(text: str) -> bytes:
    """A string of a header, without compression."""
    return bytes([len(text)]) + text.encode()


class RawHttp2Client:
    """One connection; without a window its answers stay with the server."""

    def __init__(self, url: str, source: str = "127.0.0.2", window: int = 0) -> None:
        self._socket = socket.create_connection(split_address(url), source_address=(source, 0))
        settings = struct.pack(">HI", INITIAL_WINDOW, window)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._stream = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def ask(self, method: str, request: Message) -> int:
        """Make a call; returns the number of its stream."""
        self._socket.sendall(self.call(method, request))
        return self._stream

    def call(self, method: str, request: Message) -> bytes:
        """The next call, as it goes over the wire."""
        self._stream += 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": METHODS[method].path,
            ":authority": "x",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(b"\0" + literal(name) + literal(v) for name, v in headers.items())
        payload = request.SerializeToString()
        body = struct.pack(">BI", 0, len(payload)) + payload
        return frame(HEADERS, END_HEADERS, self._stream, block) + frame(
            DATA, END_STREAM, self._stream, body
        )

    def send(self, calls: bytes) -> None:
        """Send calls that were made before."""
        self._socket.sendall(calls)

    def drain(self, seconds: float) -> int:
        """Throw away what has come, and give the server room to send more; returns its bytes."""
        self._socket.settimeout(seconds)
        try:
            size = len(self._socket.recv(1 << 20))
        except TimeoutError:
            return 0
        if size:
            self._socket.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", size)))
        return size

    def cancel(self, stream: int) -> None:
        """Give up a call."""
        self._socket.sendall(frame(RESET, 0, stream, struct.pack(">I", CANCEL)))
