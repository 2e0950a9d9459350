"""What a run has made, without the run."""

from __future__ import annotations

import os
from typing import Any

from ..checkpoint import CheckpointManager
from ..checkpoint.access import has_kind
from ..errors import CheckpointNotFoundError, StrataError
from .run_checkpoints import DISTRIBUTED
from .tracked_state import OBJECTS


def load_tracked(
    checkpoints: str | os.PathLike[str],
    *names: str,
    step: int | None = None,
    map_location: Any = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """The saved states of the objects that a `Run` tracks, by name; all of them without names.

    ::

        model.load_state_dict(load_tracked("checkpoints", "model")["model"])

    ``checkpoints`` is what the run was given, ``step`` one of its checkpoints instead of the
    newest. ``options`` go to `CheckpointManager`.
    """
    with CheckpointManager(checkpoints, **options) as manager:
        latest = manager.latest()
        if latest is None:
            raise CheckpointNotFoundError(f"there is no checkpoint in {os.fspath(checkpoints)}")
        chosen = latest.step if step is None else step
        if has_kind(manager, chosen, DISTRIBUTED):
            raise StrataError(
                f"the checkpoint of step {chosen} is of a sharded model: load it with "
                "dtruntime.checkpoint.dcp.load_sharded, into a model of any number of ranks"
            )
        first = manager.ranks(chosen)[0]
        keys = [f"shared/{OBJECTS}/{name}" for name in names] or [f"shared/{OBJECTS}"]
        found = manager.load_state(chosen, rank=first, keys=keys, map_location=map_location)
    if not names:
        whole: dict[str, Any] = found[keys[0]]
        return whole
    return {name: found[key] for name, key in zip(names, keys, strict=True)}
