"""The picture of ``strata top``: as many lines as the terminal has."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..coordinator.http.event_log import level_of, sentence
from ..coordinator.state import Event
from ..rpc.gen import coordinator_pb2 as pb
from .status_view import checkpoint_line, headline, hint, job_lines, staleness
from .status_watch import TopState
from .worker_table import worker_lines

JOURNAL_LINES = 8
LEAST_WORKERS = 4
WORKERS_FIRST = 16
"""Older checkpoints are shown where so many workers have room, and the journal."""
CHECKPOINT_LINES = 4
BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"warning": "yellow", "error": "red"}
_KEY_HELP = "q quit   s sort   ↑↓ scroll   tab next job   p pause"


def top_view(state: TopState, width: int, height: int | None) -> RenderableType:
    """Everything in ``height`` lines; ``None``: in as many as it takes."""
    look = state.look
    head = [headline(look.coordinator), *staleness(look.stale_since)]
    if look.job is None:
        return Group(*head, hint(look.coordinator))
    rows = state.rows()
    lines = [*job_lines(look.job), _pace(state, width)]
    older = [checkpoint_line(one) for one in look.job.checkpoints[1:CHECKPOINT_LINES]]
    needed = len(head) + len(lines) + min(len(rows), WORKERS_FIRST) + JOURNAL_LINES + 5
    if height is None or height >= needed + len(older):
        lines[2:2] = older  # below the newest
    head += lines
    journal = [_entry(event) for event in look.events]
    if height is None:
        return Group(*head, Text(), *worker_lines(rows, width), *_journal(journal, JOURNAL_LINES))
    # Empty lines before both tables, their headings, and the line of keys.
    room = max(LEAST_WORKERS, height - len(head) - 3)
    logged = min(JOURNAL_LINES, len(journal), max(0, room - LEAST_WORKERS - 2))
    page = room - (logged + 2 if logged else 0)
    if len(rows) < page:
        logged = min(len(journal), logged + page - len(rows)) if logged else 0
        page = len(rows)
    state.page = page = max(1, page)
    state.first = min(state.first, max(0, len(rows) - page))
    shown = rows[state.first : state.first + page]
    body = [Text(), *worker_lines(shown, width), *_journal(journal, logged)]
    space = [Text()] * max(0, height - len(head) - len(body) - 1)
    return Group(*head, *body, *space, _foot(state, len(rows), len(shown)))


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The newest values as bars, the highest of them full; a gap where there is none."""
    newest = values[-width:]
    most = max((value for value in newest if value is not None), default=0.0) or 1.0
    bars = (round((value or 0.0) / most * (len(BARS) - 1)) for value in newest)
    return "".join(
        " " if value is None else BARS[bar] for value, bar in zip(newest, bars, strict=True)
    )


def _pace(state: TopState, width: int) -> Text:
    values = list(state.pace.values)
    if not values:
        text = "  pace        not known yet: it takes two looks at reported steps"
        return Text(text, "dim", no_wrap=True, overflow="ellipsis")
    bars, newest = sparkline(values, max(8, min(60, width - 50))), values[-1]
    highest = max(value for value in values if value is not None)
    return Text.assemble(
        ("  pace        ", "dim"),
        (bars, "cyan"),
        "  nobody takes steps" if newest is None else f"  {newest:.2f} steps/s",
        (f"   highest {highest:.2f}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _journal(lines: list[Text], count: int) -> list[Text]:
    """The newest entries, newest last, with a heading."""
    return [Text(), Text("  journal", "dim"), *lines[-count:]] if count and lines else []


def _entry(event: pb.Event) -> Text:
    known = Event(event.id, event.at, event.job, event.kind, dict(event.fields))
    stamp = time.strftime("%H:%M:%S", time.localtime(event.at))
    return Text.assemble(
        (f"  {stamp}  ", "dim"),
        (sentence(known), _STYLES.get(level_of(event.kind), "")),
        no_wrap=True,
        overflow="ellipsis",
    )


def _foot(state: TopState, total: int, shown: int) -> Text:
    place = f"workers {state.first + 1:,} to {state.first + shown:,} of {total:,}"
    return Text.assemble(
        (" PAUSED ", "reverse") if state.paused else "",
        (f" {place}, by {state.sort}   {_KEY_HELP}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
