"""As much of YAML as our manifests use: blocks of mappings and lists, comments, plain scalars."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    number: int
    indent: int
    text: str


def parse(text: str) -> list[Any]:
    """The documents of a manifest; raises ValueError for what is not in order, with the line."""
    documents: list[list[Line]] = [[]]
    for number, raw in enumerate(text.splitlines(), 1):
        if "\t" in raw:
            raise ValueError(f"line {number}: a tab")
        if raw.rstrip() == "---":
            documents.append([])
        elif raw.strip() and not raw.lstrip().startswith("#"):
            bare = re.sub(r"\s+#.*$", "", raw.rstrip())
            documents[-1].append(Line(number, len(bare) - len(bare.lstrip()), bare.strip()))
    return [_document(lines) for lines in documents if lines]


def _document(lines: list[Line]) -> Any:
    value, rest = _block(lines, lines[0].indent)
    if rest:
        raise ValueError(f"line {rest[0].number}: indented unlike the lines before it")
    return value


def _block(lines: list[Line], indent: int) -> tuple[Any, list[Line]]:
    return (_list if lines[0].text.startswith("- ") else _mapping)(lines, indent)


def _list(lines: list[Line], indent: int) -> tuple[list[Any], list[Line]]:
    items = []
    while lines and lines[0].indent == indent and lines[0].text.startswith("- "):
        first = lines[0]
        text = first.text[2:].lstrip()
        if not _is_entry(text):
            items.append(_scalar(text, first.number))
            lines = lines[1:]
            continue
        inner = indent + len(first.text) - len(text)
        item, lines = _mapping([Line(first.number, inner, text), *lines[1:]], inner)
        items.append(item)
    return items, lines


def _mapping(lines: list[Line], indent: int) -> tuple[dict[str, Any], list[Line]]:
    found: dict[str, Any] = {}
    while lines and lines[0].indent == indent and not lines[0].text.startswith("- "):
        line, lines = lines[0], lines[1:]
        if not _is_entry(line.text):
            raise ValueError(f"line {line.number}: {line.text!r} is no entry of a mapping")
        name, _, rest = line.text.partition(":")
        if name in found:
            raise ValueError(f"line {line.number}: {name!r} is there twice")
        if rest.strip():
            found[name] = _scalar(rest.strip(), line.number)
        elif lines and lines[0].indent > indent:
            found[name], lines = _block(lines, lines[0].indent)
        else:
            raise ValueError(f"line {line.number}: {name!r} has no value")
    return found, lines


def _is_entry(text: str) -> bool:
    return re.match(r"[\w./-]+:(\s|$)", text) is not None


def _scalar(text: str, number: int) -> Any:
    if text[0] in '["':
        return json.loads(text)
    if text[0] in "{}&*!|>%@`'":
        raise ValueError(f"line {number}: {text!r} is more than this parser knows")
    plain = {"true": True, "false": False}
    return int(text) if re.fullmatch(r"-?\d+", text) else plain.get(text, text)


def mappings_in(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings at any depth."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from mappings_in(part)
