"""``strata``: the command line.

Exit codes: 0 done, 1 the operation failed, 2 wrong usage, 3 the coordinator is unreachable.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from .._version import __version__
from ..display import plain
from ..errors import ConfigError, ConnectionError, StrataError
from .invocation import log_only_when_asked

COMMAND, ACTION = "COMMAND", "ACTION"
"""How usages call what has to be chosen."""
COMMANDS = {
    "coordinator": ("coordinator", "add_parser"),
    "status": ("status", "add_parser"),
    "outcome": ("jobs", "add_outcome_parser"),
    "jobs": ("jobs", "add_parser"),
    "actions": ("jobs", "add_actions_parser"),
    "datasets": ("datasets", "add_parser"),
    "checkpoints": ("checkpoints", "add_parser"),
    "state": ("coordinator", "add_state_parser"),
    "demo": ("demo", "add_parser"),
    "bench": ("bench", "add_parser"),
    "doctor": ("doctor", "add_parser"),
}
"""Which function of which module declares each. Only the module of the command that is called is
imported: all together take twice as long."""


class CommandParser(argparse.ArgumentParser):
    """Parser that lists the commands where none is given."""

    def error(self, message: str) -> NoReturn:
        """End with status 2, after the usage; without a command, after the whole help."""
        if message.endswith((f": {COMMAND}", f": {ACTION}")):
            self.print_help(sys.stderr)
            self.exit(2, f"\n{self.prog}: choose one of these\n")
        super().error(message)


def build_parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of these commands, or of all."""
    parser = CommandParser(
        prog="strata",
        description="Coordinates data loading, checkpointing and recovery for ML training.",
    )
    parser.add_argument("--version", action="version", version=f"strata {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar=COMMAND, required=True)
    for module, declare in map(COMMANDS.__getitem__, commands):
        getattr(import_module(f".{module}", __package__), declare)(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    called = given[:1] if given and given[0] in COMMANDS else COMMANDS
    options = build_parser(called).parse_args(given)
    if options.command not in ("coordinator", "state"):
        log_only_when_asked()
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except ConfigError as exc:
        return _complain(exc, 2)
    except ConnectionError as exc:
        return _complain(exc, 3)
    except BrokenPipeError:
        # Nobody reads on; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (StrataError, ValueError, OSError) as exc:
        return _complain(exc, 1)
    except KeyboardInterrupt:
        return 130


def _complain(error: Exception, code: int) -> int:
    print(f"strata: {plain(str(error))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
