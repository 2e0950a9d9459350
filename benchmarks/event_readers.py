"""Many readers of a coordinator's event stream, in one process that says what came through."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from dtruntime.config import split_address

from .processes import Handler, serve

READ = 1 << 16
CHANGE = b"\nevent: change"


class Reader:
    """One stream, read as a browser reads it, and thrown away."""

    def __init__(self) -> None:
        self.events = self.received = 0
        self.opened = asyncio.Event()

    async def read(self, url: str, path: str) -> None:
        """Read until cancelled."""
        host, port = split_address(url)
        reader, writer = await asyncio.open_connection(host, port)
        request = f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\naccept: text/event-stream\r\n\r\n"
        writer.write(request.encode())
        tail = b""
        while data := await reader.read(READ):
            self.received += len(data)
            text = tail + data
            self.events += text.count(CHANGE)
            tail = text[-20:] if CHANGE not in text[-20:] else b""
            if b"event: snapshot" in text:
                self.opened.set()
        raise ConnectionError(f"a stream of events ended after {self.received} bytes")


def _prepare(order: dict[str, Any]) -> Handler:
    """Open all streams; each has its snapshot before anything is answered."""
    readers = [Reader() for _ in range(order["streams"])]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    tasks = [
        asyncio.run_coroutine_threadsafe(reader.read(order["url"], order["path"]), loop)
        for reader in readers
    ]
    for reader in readers:
        asyncio.run_coroutine_threadsafe(reader.opened.wait(), loop).result(60)

    def count(question: dict[str, Any]) -> dict[str, int]:
        for task in tasks:
            if task.done():
                task.result()
        events = sum(reader.events for reader in readers)
        return {"events": events, "bytes": sum(reader.received for reader in readers)}

    return count


if __name__ == "__main__":
    serve(_prepare)
