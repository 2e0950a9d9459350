"""The result of one check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Verdict = Literal["ok", "note", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """What a check found, and what to do about it.

    A ``note`` is about something that this machine may not need.
    """

    group: str
    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    measured: Mapping[str, float] = {}
    """Numbers behind the text, each named with its unit."""
