"""What the values of a run begin with, held against what a checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..checkpoint.state_dict import describe, flatten
from ..checkpoint.state_dict.containers import containers_of, shaped_like

_NAMES_SHOWN = 4
_REMEDY = "or start with another folder for checkpoints"


class InitialValues:
    """The names, containers and arrays that values begin with; the arrays themselves are not kept.

    Values may change in kind and shape while a run goes on. What it begins with may not: another
    beginning is that of another program.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """``TypeError`` or ``ValueError`` when a value cannot be saved."""
        self._containers = {name: containers_of(value) for name, value in values.items()}
        self._arrays = {
            array.key: f"{array.kind} {array.dtype} {array.shape}"
            for array in describe(flatten(dict(values)).skeleton)
        }

    def saved(self) -> str:
        """What is kept of it in a checkpoint."""
        return json.dumps(self._arrays)

    def shaped(self, values: Mapping[str, Any], beginning: str | None) -> dict[str, Any]:
        """Values of a checkpoint, which may have none of its ``beginning``, in their containers.

        ``ValueError`` when they are those of another program.
        """
        missing = sorted(map(str, self._containers.keys() - values.keys()))
        if missing:
            raise ValueError(
                f"the checkpoint has no value of {', '.join(missing)} (it has "
                f"{', '.join(sorted(map(str, values))) or 'none'}): give state= the names that it "
                f"had when it was saved, {_REMEDY}"
            )
        if beginning is not None:
            self._check(json.loads(beginning))
        return {
            name: shaped_like(self._containers.get(name), value, exact=False)
            for name, value in values.items()
        }

    def _check(self, saved: Mapping[str, str]) -> None:
        here = self._arrays
        changed = [
            f"{key} was {saved.get(key, 'not there')} and is {here.get(key, 'not there')}"
            for key in sorted(here.keys() | saved.keys())
            if here.get(key) != saved.get(key) and self._has_name_of(key)
        ]
        if changed:
            more = f" and {len(changed) - _NAMES_SHOWN} more" * (len(changed) > _NAMES_SHOWN)
            raise ValueError(
                "the arrays in state= are not those that the saved run began with: "
                f"{', '.join(changed[:_NAMES_SHOWN])}{more}; make them as they were, {_REMEDY}"
            )

    def _has_name_of(self, key: str) -> bool:
        """Whether an array lies in a value that this run begins with too."""
        return any(key == name or key.startswith(f"{name}/") for name in self._containers)
