"""``strata coordinator``: run a coordinator in the foreground."""

from __future__ import annotations

import argparse
from typing import Any

from ...config import Config, CoordinatorConfig, split_address
from ...coordinator import server
from ...telemetry import configure_logging


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "coordinator",
        help="run a coordinator",
        description="Run a coordinator until SIGTERM or Ctrl-C. Its state is in --data-dir; a "
        "coordinator started again there carries on.",
    )
    parser.add_argument(
        "address", nargs="?", metavar="HOST:PORT", help="default 0.0.0.0:50051; port 0: a free one"
    )
    serving = parser.add_mutually_exclusive_group()
    serving.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="where the HTTP API and the dashboard are served (default: port 3000 of the same "
        "host; port 0: a free one)",
    )
    serving.add_argument("--no-http", action="store_true", help="serve neither of them")
    parser.add_argument("--data-dir", help="where the state is kept (default strata-data)")
    parser.add_argument(
        "--drain-seconds",
        metavar="SECONDS",
        help="after the first SIGTERM or Ctrl-C, serve on for so long while workers are there "
        "(default 0)",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML configuration")
    parser.add_argument(
        "--transport",
        choices=("auto", "pygrpc-native", "grpc.aio"),
        help="gRPC server (default auto: pygrpc-native when installed)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until stopped."""
    configure_logging()
    given = {
        "address": options.address,
        "http_address": "" if options.no_http else options.http,
        "data_dir": options.data_dir,
        "drain_seconds": options.drain_seconds,
        "transport": options.transport,
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    config = Config.load(options.config).override("coordinator", "command line", **chosen)
    if config.coordinator.http_address == CoordinatorConfig().http_address and not options.http:
        config = config.override("coordinator", "default", http_address=_beside(config.coordinator))
    server.run(config.coordinator, on_started=_announce, telemetry=config.telemetry)
    return 0


def _beside(config: CoordinatorConfig) -> str:
    """The default port of HTTP on the host that workers use: who chose loopback gets loopback."""
    _, port = split_address(config.http_address)
    host, _ = split_address(config.address)
    return f"{host}:{port}"


def _announce(address: str, http_address: str) -> None:
    lines = [f"coordinator listening on {address}"]
    if http_address:
        host, port = split_address(http_address)
        shown = "localhost" if host in ("0.0.0.0", "[::]") else host
        lines.append(f"dashboard and API on http://{shown}:{port}")
    print("\n".join(lines), flush=True)
