"""The reference of the gRPC service, from its .proto file and the comments in it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from scripts.docs_site.tables import code, table

INTRODUCTION = """\
# gRPC

Made from [proto/coordinator.proto](../source/proto/coordinator.proto.md). Server reflection and
the standard health service are on. Fields are added, never renumbered. Every call of a worker
carries its incarnation; one that has been replaced is refused. Calls are limited per worker and
per address ([configuration keys](configuration-keys.md)).
"""

OPENING = re.compile(r"(message|enum|service|oneof) (\w+) \{(\})?")
FIELD = re.compile(
    r"(?P<label>optional |repeated )?(?P<type>map<[^>]+>|[\w.]+) "
    r"(?P<name>\w+) = (?P<number>\d+)[^;]*;"
)
VALUE = re.compile(r"(?P<name>[A-Z]\w*) = (?P<number>\d+);")
CALL = re.compile(
    r"rpc (?P<name>\w+)\((?P<asks>(?:stream )?\w+)\) returns \((?P<answers>(?:stream )?\w+)\)"
)


@dataclass
class Member:
    """A field, a value of an enumeration or a call."""

    name: str
    number: int
    type: str
    comment: str


@dataclass
class Definition:
    """A message, an enumeration or a service."""

    kind: str
    name: str
    comment: str
    members: list[Member] = field(default_factory=list)


def page(proto: Path) -> str:
    """The whole page."""
    found = list(definitions(proto.read_text(encoding="utf-8")))
    names = {definition.name for definition in found}
    lines = [INTRODUCTION]
    for definition in found:
        if definition.kind == "service":
            lines += ["## Calls", ""]
            for comment, group in groupby(definition.members, key=lambda m: m.comment):
                rows = [(code(m.name), _types(m.type, names)) for m in group]
                lines += [f"{comment}:", "", *table(("call", "asks → answers"), rows)]
    lines += ["## Messages", ""]
    for definition in found:
        if definition.kind != "service":
            lines += _section(definition, names)
    return "\n".join(lines)


def _section(definition: Definition, names: set[str]) -> list[str]:
    lines = [f"### {definition.name}", "", definition.comment, ""]
    if definition.kind == "enum":
        values = [(str(m.number), code(m.name), m.comment) for m in definition.members]
        return lines + table(("number", "value", ""), values)
    fields = [
        (str(m.number), code(m.name), _types(m.type, names), m.comment) for m in definition.members
    ]
    return lines + (table(("number", "field", "type", ""), fields) or ["No fields.", ""])


def _types(text: str, names: set[str]) -> str:
    def linked(found: re.Match[str]) -> str:
        return f"[{found[0]}](#{found[0].lower()})" if found[0] in names else found[0]

    return re.sub(r"\w+", linked, text.replace("<", "&lt;").replace(">", "&gt;"))


def definitions(text: str) -> Iterator[Definition]:
    """The definitions of a file, in its order; one statement per line, comments above it."""
    current: Definition | None = None
    comment: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        opening = OPENING.match(line)
        if opening and opening[1] != "oneof":
            current = Definition(opening[1], opening[2], " ".join(comment))
            yield current
        elif current is not None and (member := _member(line, current.kind, " ".join(comment))):
            current.members.append(member)
            if current.kind == "service":
                continue  # what is said of a group of calls is said of each
        comment = []


def _member(line: str, kind: str, comment: str) -> Member | None:
    if kind == "service":
        found = CALL.match(line)
        return found and Member(found["name"], 0, f"{found['asks']} → {found['answers']}", comment)
    if kind == "enum":
        found = VALUE.match(line)
        return found and Member(found["name"], int(found["number"]), "", comment)
    found = FIELD.match(line)
    if found is None:
        return None
    kind_of_field = (found["label"] or "") + found["type"]
    return Member(found["name"], int(found["number"]), kind_of_field, comment)
