"""Pictures of the mermaid diagrams, so that no page needs a script to draw them.

The pages keep the text. A picture is named after its text, so that one that does not fit is not
found; ``make diagrams`` makes those that are missing.
"""

import hashlib
import os
import re
from pathlib import Path, PurePosixPath

FOLDER = "images/diagrams"
FENCE = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"sequenceDiagram": "Sequence diagram", "stateDiagram-v2": "State diagram"}


def name_of(text: str) -> str:
    """The file of a diagram's picture."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] + ".svg"


def diagrams_in(docs: Path) -> dict[str, str]:
    """All diagrams of the pages in a folder: file names and texts."""
    return {
        name_of(found["text"]): found["text"]
        for page in sorted(docs.rglob("*.md"))
        for found in FENCE.finditer(page.read_text(encoding="utf-8"))
    }


def with_pictures(markdown: str, uri: str, docs: Path) -> str:
    """The page with pictures in place of the diagrams that have one; others stay text."""
    way = os.path.relpath(FOLDER, str(PurePosixPath(uri).parent))

    def picture(found: re.Match[str]) -> str:
        name = name_of(found["text"])
        if not (docs / FOLDER / name).exists():
            return found[0].replace("```mermaid", "```text", 1)
        kind = KINDS.get(found["text"].split(maxsplit=1)[0], "Diagram")
        return f"![{kind}]({way}/{name}){{ .diagram }}"

    return FENCE.sub(picture, markdown)
