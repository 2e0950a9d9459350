"""A gRPC client that asks and never reads: HTTP/2 by hand, with a window of no bytes."""

import socket
import struct
from types import TracebackType
from typing import Self

from google.protobuf.message import Message

from dtruntime.config import split_address
from dtruntime.rpc.methods import METHODS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS = 0, 1, 3, 4
INITIAL_WINDOW = 4
END_STREAM, END_HEADERS = 1, 4
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(text: str) -> bytes:
    """A string of a header, without compression."""
    return bytes([len(text)]) + text.encode()


class UnreadingClient:
    """One connection whose answers stay with the server."""

    def __init__(self, url: str, source: str = "127.0.0.2") -> None:
        self._socket = socket.create_connection(split_address(url), source_address=(source, 0))
        window = struct.pack(">HI", INITIAL_WINDOW, 0)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, window))
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
        self._socket.sendall(
            frame(HEADERS, END_HEADERS, self._stream, block)
            + frame(DATA, END_STREAM, self._stream, body)
        )
        return self._stream

    def cancel(self, stream: int) -> None:
        """Give up a call."""
        self._socket.sendall(frame(RESET, 0, stream, struct.pack(">I", CANCEL)))
