"""What requests may ask, each parameter with its bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .snapshot.workers import Sort

Name = Annotated[str, Meta(max_length=200)]
Text = Annotated[str, Meta(max_length=512)]
Number = Annotated[int, Meta(ge=0, le=2**53)]


class NoQuery(Struct, frozen=True):
    """Nothing."""


class JobQuery(Struct, frozen=True):
    """A job; empty: the one that was active last."""

    job: Name = ""


class PageQuery(JobQuery, frozen=True):
    """A page of a list; ``cursor`` is the ``next_cursor`` of the page before."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000
    cursor: Annotated[str, Meta(pattern="^[0-9]{0,9}$")] = ""

    @property
    def start(self) -> int:
        """How many come before the page."""
        return int(self.cursor or 0)


class WorkerQuery(PageQuery, frozen=True):
    """Which workers."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    state: Name = ""
    search: Name = ""
    sort: Sort = "rank"


class HistoryQuery(JobQuery, frozen=True):
    """How far back."""

    seconds: Annotated[int, Meta(ge=1, le=21600)] = 600


class LogQuery(JobQuery, frozen=True):
    """Which entries of the journal."""

    search: Name = ""
    level: Literal["", "info", "warning", "error"] = ""
    event: Name = ""
    after: Number = 0
    before: Number = 0
    limit: Annotated[int, Meta(ge=1, le=10000)] = 200
    format: Literal["json", "jsonl", "csv"] = "json"


class ActionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that is asked of a run."""

    job: Annotated[str, Meta(min_length=1, max_length=200)]
    kind: Literal["checkpoint", "stop", "drain"]
    worker_id: Name = ""
    reason: Text = ""
