"""The reference of the command line, from its parser."""

import argparse
from collections.abc import Iterator

from dtruntime.cli.main import build_parser
from scripts.docs_site.tables import code, table

INTRODUCTION = """\
# Commands and options

Made from the parser of `strata` itself. What the commands print, with examples, is in
[the command line](../command-line.md).
"""


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for name, parser, summary in commands(build_parser()):
        lines += _section(name, parser, summary)
    return "\n".join(lines)


def commands(
    parser: argparse.ArgumentParser, name: str = "strata", summary: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """A parser and all parsers below it, with their full names."""
    yield name, parser, summary
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for child, below in action.choices.items():
                yield from commands(below, f"{name} {child}", helps.get(child, ""))


def _section(name: str, parser: argparse.ArgumentParser, summary: str) -> list[str]:
    level = "#" * min(len(name.split()) + 1, 4)
    text = parser.description or (summary and summary[0].upper() + summary[1:] + ".")
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    lines = [f"{level} {name}", "", text.replace("%%", "%"), "", "```text", usage, "```", ""]
    return lines + table(("argument", "meaning"), _arguments(parser))


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield code(choice.dest), choice.help or ""
        elif action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            yield (
                code(_invocation(formatter, action)),
                formatter._expand_help(action) if action.help else "",
            )


def _invocation(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    return formatter._format_action_invocation(action)
