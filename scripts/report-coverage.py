"""The coverage of each package of dtruntime, as measured by `make coverage`."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import coverage

PACKAGE = Path("src/dtruntime")


def statements(data: coverage.Coverage, file: str) -> tuple[int, int]:
    """How many statements a file has, and how many of them were run."""
    _, lines, _, missing, _ = data.analysis2(file)
    return len(lines), len(lines) - len(missing)


def package_of(file: Path) -> str:
    """The package that a file belongs to, two levels deep."""
    inside = file.relative_to(PACKAGE.resolve()).parent.parts[:2]
    return ".".join(["dtruntime", *inside])


def main() -> None:
    """Print the table."""
    measured = coverage.Coverage(data_file=sys.argv[1])
    measured.load()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for file in sorted(PACKAGE.resolve().rglob("*.py")):
        if "gen" in file.parts:
            continue
        lines, run = statements(measured, str(file))
        for name in (package_of(file), "total"):
            counts[name] = [a + b for a, b in zip(counts[name], (1, lines, run), strict=True)]
    total = counts.pop("total")
    width = max(map(len, counts))
    print(f"{'package':{width}}  files  statements  covered")
    for name, (files, lines, run) in [*sorted(counts.items()), ("total", tuple(total))]:
        print(f"{name:{width}}  {files:5}  {lines:10}  {run / max(lines, 1):7.1%}")


if __name__ == "__main__":
    main()
