"""``strata coordinator`` runs one in the foreground; ``strata state`` looks after its state."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config import Config, CoordinatorConfig, split_address
from ..coordinator import server
from ..coordinator.store import backup
from ..coordinator.store.integrity import Examination
from ..display import plain
from ..telemetry import configure_logging
from .invocation import add_command


def add_parser(subparsers: Any) -> None:
    """Declare ``strata coordinator``."""
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
        help="address of the HTTP API and the dashboard (default: port 3000 of the same host; port "
        "0: a free one)",
    )
    serving.add_argument("--no-http", action="store_true", help="do not serve HTTP")
    parser.add_argument("--data-dir", help="where the state is kept (default strata-data)")
    parser.add_argument(
        "--drain-seconds",
        metavar="SECONDS",
        help="how long to keep serving live workers after the first SIGTERM or Ctrl-C (default 0)",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML configuration")
    parser.add_argument(
        "--transport",
        choices=("auto", "pygrpc-native", "grpc.aio"),
        help="gRPC server (default auto: pygrpc-native when installed)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
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
    """The default HTTP port on the host that workers use: a loopback choice holds for both."""
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


def add_state_parser(subparsers: Any) -> None:
    """Declare ``strata state``."""
    actions = add_command(
        subparsers,
        "state",
        help="check, back up and restore the coordinator's state",
        description="Look after the state in a coordinator's data directory. Exit code 1: it is "
        "damaged, or the operation was refused.",
    )
    for name, run, text, copy, force in (
        (
            "check",
            _check,
            "say whether the state is intact, also of a running coordinator",
            "a backup instead of a directory",
            "",
        ),
        (
            "backup",
            _backup,
            "copy the state into a file, also of a running coordinator",
            "the file to write",
            "replace the file if it exists",
        ),
        (
            "restore",
            _restore,
            "make a backup the state of a coordinator that is stopped",
            "the backup; --salvage: else the directory's own",
            "replace a newer or another state, which is kept aside",
        ),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=run)
        action.add_argument("--data-dir", help="where the state is kept (default strata-data)")
        action.add_argument("--config", metavar="FILE", help="TOML configuration")
        optional = None if name == "backup" else "?"
        action.add_argument("copy", nargs=optional, metavar="COPY", help=copy)
        if force:
            action.add_argument("--force", action="store_true", help=force)
        if name == "restore":
            action.add_argument(
                "--salvage", action="store_true", help="leave damaged records out (in quarantine)"
            )


def _data_dir(options: argparse.Namespace) -> Path:
    if options.data_dir:
        return Path(options.data_dir)
    return Path(Config.load(options.config).coordinator.data_dir)


def _check(options: argparse.Namespace) -> int:
    checked = backup.check(Path(options.copy) if options.copy else _data_dir(options))
    for damage in checked.damages:
        print(plain(f"damaged: {damage}"))
    for problem in checked.found.journal:
        print(plain(f"journal: {problem}"))
    word = "damaged" if checked.damages else "intact"
    print(plain(f"{checked.path}: {word}: {_contents(checked.found)}"))
    return 1 if checked.damages else 0


def _backup(options: argparse.Namespace) -> int:
    found = backup.back_up(_data_dir(options), Path(options.copy), options.force)
    print(plain(f"{options.copy}: {_contents(found)}"))
    return 0


def _restore(options: argparse.Namespace) -> int:
    data_dir = _data_dir(options)
    if not options.copy and not options.salvage:
        raise ValueError("name the COPY to restore, or keep the intact records with --salvage")
    own = not options.copy
    copy = data_dir / "state.db" if own else Path(options.copy)
    aside = backup.restore(copy, data_dir, options.force or own, options.salvage)
    if aside is not None:
        print(plain(f"the previous state is kept in {aside}"))
    print(plain(f"restored {copy} to {data_dir}: {_contents(backup.check(data_dir).found)}"))
    return 0


def _contents(found: Examination) -> str:
    commits = f", commit {found.summary.sequence}" if found.summary else ""
    return f"{found.records} records of {found.jobs} jobs, {found.events} events{commits}"
