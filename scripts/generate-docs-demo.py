"""Run `strata demo` in a terminal of its own, and keep the last screen as a picture.

    python scripts/generate-docs-demo.py

Writes docs/images/demo.svg. What is shown is what the command printed.
"""

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
WIDTH = 100

TOKEN = re.compile(r"\x1b\[(?P<count>\d*)(?P<order>[AK])|\x1b\[\?\d+[lh]|(?P<step>[\r\n])")


def main() -> int:
    output = bytearray()

    def keep(terminal: int) -> bytes:
        part = os.read(terminal, 65536)
        output.extend(part)
        return part

    os.environ.update(COLUMNS=str(WIDTH), LINES="50", TERM="xterm-256color", COLORTERM="truecolor")
    program = [sys.executable, "-m", "dtruntime.cli.main", "demo", "--no-stay"]
    status = os.waitstatus_to_exitcode(pty.spawn(program, keep))
    if status:
        return status
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ strata demo", "dim"))
    for line in screen(output.decode()):
        console.print(Text.from_ansi(line), no_wrap=True)
    console.save_svg(str(PICTURE), title="strata demo")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", PICTURE.read_text(encoding="utf-8"), flags=re.S)
    PICTURE.write_text(
        picture.replace("Fira Code", "ui-monospace, Menlo, Consolas"), encoding="utf-8"
    )
    return 0


def screen(output: str) -> list[str]:
    """What is left on the screen once lines have been erased and written over."""
    lines, row, position = [""], 0, 0
    for token in TOKEN.finditer(output):
        lines[row] += output[position : token.start()]
        position = token.end()
        if token["order"] == "A":
            row = max(0, row - int(token["count"] or 1))
        elif token["order"] == "K":
            lines[row] = ""
        elif token["step"] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


if __name__ == "__main__":
    sys.exit(main())
