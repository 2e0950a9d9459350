"""What the workers of a round wrote down, read while they write it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Attempt(NamedTuple):
    """One try at a step: by a crew, and by the last of its tries."""

    crew: int
    parts: dict[int, list[int]]
    """The samples of each place in the crew."""
    world: int


@dataclass
class Traces:
    """All traces in a folder."""

    folder: Path
    entries: list[dict[str, Any]] = field(default_factory=list)
    """The steps, of all workers."""
    up: dict[int, float] = field(default_factory=dict)
    """When each process had started, by its number."""
    last_step: int = 0
    crew: int = 0
    """The newest crew that has done a step, by its generation."""
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self) -> list[dict[str, Any]]:
        """What is new; a line that its writer was killed in is left out."""
        fresh = []
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                entry = json.loads(line)
                if "step" in entry:
                    fresh.append(entry)
                else:
                    self.up[int(path.stem)] = entry["at"]
        for entry in fresh:
            self.last_step = max(self.last_step, entry["step"])
            self.crew = max(self.crew, entry["crew"])
        self.entries += fresh
        return fresh

    def last_attempts(self) -> dict[int, Attempt]:
        """The try at each step that counts: the last crew's."""
        found: dict[int, Attempt] = {}
        for entry in sorted(self.entries, key=lambda entry: (entry["crew"], entry["at"])):
            step, crew = entry["step"], entry["crew"]
            if step not in found or found[step].crew < crew:
                found[step] = Attempt(crew, {}, entry["world"])
            found[step].parts[entry["place"]] = entry["samples"]
        return found

    @property
    def repeated(self) -> int:
        """How many steps were done more than once."""
        tries = {(entry["crew"], entry["step"]) for entry in self.entries}
        return len(tries) - len({step for _, step in tries})
