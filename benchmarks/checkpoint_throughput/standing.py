"""A contender in a process that stays, and saves or loads once whenever it is its turn."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from ..data_loading.isolated import ROOT, ProcessFailed, environment
from .memory import keep_memory
from .turn import ordered, timed_load, timed_save

LONGEST_SECONDS = 600.0


class Standing:
    """The process, from here. Its methods raise ``ProcessFailed``."""

    def __init__(self, name: str, size: int, folder: Path, **wanted: Any) -> None:
        """With ``keeps_memory`` it uses again what it has freed, instead of new memory."""
        self._order = {"name": name, "size": size, "folder": str(folder), **wanted}
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / "stderr.txt"

    def __enter__(self) -> Self:
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", __name__, json.dumps(self._order)],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def save(self) -> tuple[float, float]:
        """Save once: how long the caller was kept, and until it was durable, in seconds."""
        stall, durable = self._ask("save")
        return stall, durable

    def load(self) -> float:
        """Load once what was saved last, in seconds."""
        return self._ask("load")[0]

    def check(self) -> None:
        """Load it, and compare."""
        self._ask("check")

    def _ask(self, what: str) -> list[float]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(LONGEST_SECONDS, process.kill)
        deadline.start()
        try:
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
            answer: list[float] = json.loads(process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            code = process.wait()
            last = self._errors.read_text(errors="replace").strip().rpartition("\n")[2][:300]
            raise ProcessFailed(last or f"it ended with {code}") from None
        finally:
            deadline.cancel()
        return answer


def main() -> None:
    """Follow the order in the first argument, and what comes line by line."""
    order = json.loads(sys.argv[1])
    if order.get("keeps_memory"):
        keep_memory()
    contender = ordered(order)
    for line in sys.stdin:
        answer: list[float] = []
        match line.strip():
            case "save":
                answer += timed_save(contender)
            case "load":
                answer.append(timed_load(contender))
            case "check":
                contender.check(contender.load())
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
