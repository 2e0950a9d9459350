"""Everything that was measured, as ``--json`` prints it."""

from __future__ import annotations

import msgspec

from .machine import Machine
from .measures import Section

SCHEMA = 1


class BenchReport(msgspec.Struct, frozen=True):
    """The machine, and each part that was measured."""

    started_at: float
    """Seconds since 1970."""
    machine: Machine
    sections: list[Section]
    skipped: dict[str, str]
    """Parts that could not be measured here, each with the reason."""
    schema: int = SCHEMA
