"""A coordinator inside this process."""

from __future__ import annotations

import os
from typing import Self

from ._sync_bridge import awaitable, blocking
from .config import Config
from .coordinator.server import CoordinatorServer
from .errors import StrataError


class Runtime:
    """Runs a coordinator in the background of this process.

    ::

        with Runtime(Config.from_file("config.toml")).start() as runtime:
            print(runtime.url)
    """

    def __init__(self, config: Config | str | os.PathLike[str] | None = None) -> None:
        """Take a `Config` or the path of a TOML file; the default comes from the environment."""
        self.config = config if isinstance(config, Config) else Config.load(config)
        self._server: CoordinatorServer | None = None

    @property
    def url(self) -> str:
        """The URL for workers on this machine."""
        if self._server is None:
            raise StrataError("the runtime is not running: call start() first")
        return f"http://{self._server.address.replace('0.0.0.0', '127.0.0.1')}"

    @awaitable
    async def start_async(self) -> Self:
        """Start serving; returns this runtime."""
        if self._server is None:
            server = CoordinatorServer(self.config.coordinator, self.config.telemetry)
            await server.start()
            self._server = server
        return self

    start = blocking(start_async)

    @awaitable
    async def stop_async(self) -> None:
        """Stop serving; the state stays in the data directory."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    stop = blocking(stop_async)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
