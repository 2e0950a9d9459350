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
from . import bench, checkpoints, coordinator, datasets, demo, doctor, jobs, status
from .invocation import log_only_when_asked

COMMAND, ACTION = "COMMAND", "ACTION"
"""How usages call what has to be chosen."""
COMMANDS = (
    coordinator.add_parser,
    status.add_parser,
    jobs.add_outcome_parser,
    jobs.add_parser,
    jobs.add_actions_parser,
    datasets.add_parser,
    checkpoints.add_parser,
    coordinator.add_state_parser,
    demo.add_parser,
    bench.add_parser,
    doctor.add_parser,
)


class CommandParser(argparse.ArgumentParser):
    """Parser that lists the commands where none is given."""

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
    for add_parser in COMMANDS:
        add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = build_parser().parse_args(arguments)
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
