"""The network between workers and their servers: ``python -m ... COORDINATOR [S3]``.

A process of its own, so that what the harness does never holds up a connection. It takes one
command per line, and answers each with ``ok``.
"""

import random
import sys
from contextlib import ExitStack

from dtruntime.testing import TcpProxy
from tests.support.servers.http_faults import Action, HttpFaults

ANSWERS: tuple[Action, ...] = (503, 503, 503, 500, "cut", "lose", "half")


def main() -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(TcpProxy(sys.argv[1]))
        s3 = stack.enter_context(HttpFaults(sys.argv[2])) if len(sys.argv) > 2 else None
        print("listening", proxy.url, s3.url if s3 else "", flush=True)
        for line in sys.stdin:
            command, *rest = line.split()
            if s3 is not None:
                s3.requests.clear()
            if command == "cut":
                proxy.cut()
            elif command == "delay":
                proxy.delay = float(rest[0])
            elif command == "silence":
                proxy.go_silent(new_connections=True)
            elif command == "refuse":
                proxy.refuse()
            elif command == "heal":
                proxy.delay = 0.0
                proxy.heal()
                proxy.accept()
            elif command == "s3" and s3 is not None:
                fail_some(s3, float(rest[0]))
            else:
                raise ValueError(f"no such command: {line}")
            print("ok", s3.faults if s3 else 0, flush=True)


def fail_some(s3: HttpFaults, rate: float) -> None:
    """Answer a part of all requests with an error, or break their connections."""

    def rule(line: str, number: int) -> Action:
        return random.choice(ANSWERS) if random.random() < rate else None

    s3.rule = rule


if __name__ == "__main__":
    main()
