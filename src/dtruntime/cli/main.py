"""``strata``: the command line.

Exit codes: 0 done, 1 the operation failed, 2 wrong usage, 3 the coordinator is unreachable.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._version import __version__
from ..display import plain
from ..errors import ConfigError, ConnectionError, StrataError
from .commands import (
    actions,
    bench,
    checkpoints,
    coordinator,
    datasets,
    demo,
    doctor,
    jobs,
    outcome,
    state,
    status,
)

COMMAND, ACTION = "COMMAND", "ACTION"
"""How what has to be chosen is called in usages."""
COMMANDS = (
    coordinator,
    status,
    outcome,
    jobs,
    actions,
    datasets,
    checkpoints,
    state,
    demo,
    bench,
    doctor,
)


class CommandParser(argparse.ArgumentParser):
    """Parser that says which commands there are where none is given."""

    def error(self, message: str) -> NoReturn:
        """End with status 2, after the usage; without a command, after the whole help."""
        if message.endswith((f": {COMMAND}", f": {ACTION}")):
            self.print_help(sys.stderr)
            self.exit(2, f"\n{self.prog}: choose one of these\n")
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = CommandParser(
        prog="strata",
        description="Coordinates data loading, checkpointing and recovery for ML training.",
    )
    parser.add_argument("--version", action="version", version=f"strata {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar=COMMAND, required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = build_parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except ConfigError as exc:
        return _complain(exc, 2)
    except ConnectionError as exc:
        return _complain(exc, 3)
    except BrokenPipeError:
        # Whoever read it has seen enough; what is still buffered must not raise again at exit.
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
