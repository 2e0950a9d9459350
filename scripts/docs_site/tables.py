"""Markdown tables."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Text that can stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text as code, nothing if it is empty."""
    return f"`{text}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, with an empty one behind; none without rows."""
    body = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    if not body:
        return []
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body, ""]
