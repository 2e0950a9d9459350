"""Many readers of a coordinator's event stream, in one process.

Says ``ready`` when each has its snapshot. When its stdin ends it says how many events and bytes
came after that, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

READ = 1 << 16


class Watcher:
    """One stream, read as a browser reads it, and thrown away."""

    def __init__(self) -> None:
        self.events = 0
        self.received = 0
        self.opened = asyncio.Event()

    async def watch(self, host: str, port: int, path: str) -> None:
        """Read until cancelled."""
        reader, writer = await asyncio.open_connection(host, port)
        request = f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\naccept: text/event-stream\r\n\r\n"
        writer.write(request.encode())
        tail = b""
        while data := await reader.read(READ):
            self.received += len(data)
            text = tail + data
            self.events += text.count(b"\nevent: change")
            tail = text[-20:] if b"\nevent: change" not in text[-20:] else b""
            if b"event: snapshot" in text:
                self.opened.set()
        raise ConnectionError(f"the stream ended after {self.received} bytes")


async def run(host: str, port: int, path: str, number: int) -> None:
    """Open all streams and read them until stdin ends."""
    watchers = [Watcher() for _ in range(number)]
    tasks: list[asyncio.Future[Any]] = [
        asyncio.create_task(one.watch(host, port, path)) for one in watchers
    ]
    opened: asyncio.Future[Any] = asyncio.gather(*(one.opened.wait() for one in watchers))
    await asyncio.wait([opened, *tasks], return_when=asyncio.FIRST_COMPLETED)
    before = sum(one.received for one in watchers)
    if any(task.done() for task in tasks):
        await asyncio.gather(*tasks)
    print("ready", flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        await asyncio.gather(*tasks)
    for task in tasks:
        task.cancel()
    events = sum(one.events for one in watchers)
    received = sum(one.received for one in watchers) - before
    print(json.dumps({"events": events, "bytes": received}), flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
