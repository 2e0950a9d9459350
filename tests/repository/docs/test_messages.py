"""Messages quoted in the documentation are messages that the code has."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
QUOTED = re.findall(
    r"^\| (?P<log>log: )?(?P<text>`.*?`(?:,[^|`]*`[^`|]*`)*) \|", PAGE.read_text(), re.MULTILINE
)


@cache
def texts_of_the_code() -> str:
    """All texts in the sources, one per line, with an ellipsis for what is filled in."""
    texts = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in texts)


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda quoted: quoted[1])
def test_quoted_message_is_one_of_the_code(quoted: tuple[str, str]) -> None:
    for message in re.findall(r"`([^`]+)`", quoted[1]):
        pieces = [piece.strip(" '\"") for piece in message.split("…")]
        pattern = "[^\n]*".join(re.escape(piece) for piece in pieces if piece)
        assert re.search(pattern, texts_of_the_code()), f"nothing in src/ says: {message}"


def test_there_are_messages_to_look_for() -> None:
    assert len(QUOTED) > 20
