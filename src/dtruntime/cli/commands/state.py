"""``strata state``: check, back up and restore what a coordinator remembers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...config import Config
from ...coordinator.store import backup
from ...coordinator.store.integrity import Examination
from ...display import plain


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "state",
        help="check, back up and restore the coordinator's state",
        description="Look after the state in a coordinator's data directory. Exit code 1: it is "
        "damaged, or the operation was refused.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = _add_action(
        actions, "check", "say whether the state is intact, of a running coordinator too", _check
    )
    check.add_argument("copy", nargs="?", metavar="COPY", help="a backup instead of a directory")
    copy = _add_action(
        actions, "backup", "copy the state, of a running coordinator too, into a file", _backup
    )
    copy.add_argument("copy", metavar="COPY", help="the file to write")
    copy.add_argument("--force", action="store_true", help="replace the file if it exists")
    restore = _add_action(
        actions, "restore", "make a backup the state of a coordinator that is stopped", _restore
    )
    restore.add_argument(
        "copy", nargs="?", metavar="COPY", help="the backup; --salvage: else the directory's own"
    )
    restore.add_argument(
        "--force", action="store_true", help="replace a newer or another state, which is kept aside"
    )
    restore.add_argument(
        "--salvage", action="store_true", help="leave damaged records out (in quarantine)"
    )


def _add_action(actions: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
    action.add_argument("--data-dir", help="where the state is kept (default strata-data)")
    action.add_argument("--config", metavar="FILE", help="TOML configuration")
    action.set_defaults(run=run)
    return action


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
        raise ValueError("name the COPY to restore, or go on with what is intact by --salvage")
    own = not options.copy
    copy = data_dir / "state.db" if own else Path(options.copy)
    aside = backup.restore(copy, data_dir, options.force or own, options.salvage)
    if aside is not None:
        print(plain(f"what was there is in {aside}"))
    print(plain(f"restored {copy} to {data_dir}: {_contents(backup.check(data_dir).found)}"))
    return 0


def _contents(found: Examination) -> str:
    commits = f", commit {found.summary.sequence}" if found.summary else ""
    return f"{found.records} records of {found.jobs} jobs, {found.events} events{commits}"
