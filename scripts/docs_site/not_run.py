"""The page of examples that no test runs."""

import re
from pathlib import Path

COMMENT = re.compile(
    r"^ *<!-- not run: (?P<reason>[^\n]*?) -->\n+ *```(?P<kind>\w+)\n(?P<first>[^\n]*)", re.M
)


def not_run_page(root: Path) -> str:
    """Each block of the documentation that is marked as not run, with the reason."""
    lines = [
        "# Examples that no test runs",
        "",
        "Python blocks of these pages are run by the tests, and commands in them are checked",
        "against the command line and the Makefile. These are not, for the reasons given.",
        "",
        "| page | begins with | why |",
        "|---|---|---|",
    ]
    for page in sorted((root / "docs").rglob("*.md")):
        name = page.relative_to(root / "docs").as_posix()
        for found in COMMENT.finditer(page.read_text(encoding="utf-8")):
            first = found["first"].strip().replace("|", "\\|")
            lines.append(f"| [{name}](../{name}) | `{first}` | {found['reason']} |")
    return "\n".join([*lines, ""])
