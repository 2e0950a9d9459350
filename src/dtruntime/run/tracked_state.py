"""The state that a run saves: objects with a ``state_dict``, plain values, and random numbers."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..checkpoint.state_dict import describe, flatten
from ..checkpoint.state_dict.rebuilding import containers_of, shaped_like
from ..sharding.hashing import fold

_SHARDING = ("torch.distributed.tensor", "torch.distributed.fsdp")
"""No model is sharded unless one of these modules of torch is loaded."""

OBJECTS = "objects"
"""The key of the objects' states in a checkpoint."""


class Tracked:
    """Objects and values by name, the same on all ranks.

    Objects have ``state_dict`` and ``load_state_dict``, as torch's modules, optimizers and
    schedulers do. Values (arrays, pytrees of JAX, numbers) are in ``values`` and replaced there.
    """

    def __init__(self, objects: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> None:
        self._objects: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}
        self.values: dict[str, Any] = dict(values or {})
        self._beginning = InitialValues(self.values)
        self.add(objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track more objects."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(
                    f"cannot track {name!r}: a {type(thing).__name__} has no state_dict() and "
                    "load_state_dict(); arrays and other values go into state={...}"
                )
            if name in self._objects:
                raise ValueError(f"{name!r} is tracked already")
            self._objects[name] = _bare(thing)
            if self._objects[name] is not thing:
                self._wrappers[name] = thing

    @property
    def objects(self) -> Mapping[str, Any]:
        """The objects by name."""
        return self._objects

    @property
    def is_sharded(self) -> bool:
        """Whether a model or an optimizer is spread over the workers, by FSDP or as DTensors."""
        return any(map(_is_sharded, self._objects.values()))

    @property
    def reduced_by_torch(self) -> frozenset[str]:
        """Names of objects whose gradients torch itself averages: wrapped in DDP, or sharded."""
        sharded = {name for name, thing in self._objects.items() if _is_sharded(thing)}
        return frozenset(self._wrappers.keys() | sharded)

    @property
    def wrappers(self) -> Mapping[str, Any]:
        """DDP's wrappers of tracked modules, by name."""
        return self._wrappers

    def capture(self) -> dict[str, Any]:
        """All states, by reference: save them before the next step changes them."""
        objects = {name: thing.state_dict() for name, thing in self._objects.items()}
        return {OBJECTS: objects, **self.capture_values()}

    def capture_values(self) -> dict[str, Any]:
        """The values, and a description of the initial ones."""
        return {"values": dict(self.values), "beginning": self._beginning.saved()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what was captured."""
        kept = state[OBJECTS]
        self.check(kept)
        values = self.checked_values(state)
        for name, thing in self._objects.items():
            thing.load_state_dict(kept[name])
        self.values.update(values)

    def checked_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Captured values in the program's containers; ``ValueError`` if another program's."""
        return self._beginning.shaped(state["values"], state.get("beginning"))

    def check(self, kept: Mapping[str, Any]) -> None:
        """``ValueError`` if an object has no state there."""
        missing = sorted(self._objects.keys() - kept.keys())
        if missing:
            raise ValueError(
                f"the checkpoint has no state of {', '.join(missing)} (it has "
                f"{', '.join(sorted(kept)) or 'none'}): track what was tracked when it was saved, "
                "or start with another folder for checkpoints"
            )


def _is_sharded(thing: Any) -> bool:
    if not any(name in sys.modules for name in _SHARDING):
        return False
    from .pytorch.sharded_models import is_sharded

    return is_sharded(thing)


def _bare(thing: Any) -> Any:
    """The module inside DDP's wrapper, whose state also fits without one."""
    return thing.module if type(thing).__name__ == "DistributedDataParallel" else thing


_NAMES_SHOWN = 4
_REMEDY = "or start with another folder for checkpoints"


class InitialValues:
    """The names, containers, and shapes of arrays that values begin with.

    Values may change in kind and shape during a run. The initial ones may not: if they differ, the
    checkpoint is another program's.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """``TypeError`` or ``ValueError`` if a value cannot be saved."""
        self._containers = {name: containers_of(value) for name, value in values.items()}
        self._arrays = {
            array.key: f"{array.kind} {array.dtype} {array.shape}"
            for array in describe(flatten(dict(values)).skeleton)
        }

    def saved(self) -> str:
        """The description that is saved in a checkpoint."""
        return json.dumps(self._arrays)

    def shaped(self, values: Mapping[str, Any], beginning: str | None) -> dict[str, Any]:
        """Saved values in their containers; an old checkpoint has no ``beginning``.

        ``ValueError`` if they are another program's.
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
        """Whether an array is in a value that this run begins with too."""
        return any(key == name or key.startswith(f"{name}/") for name in self._containers)


def capture_rng() -> dict[str, Any]:
    """The states of the global generators of Python, numpy and torch, also on GPUs."""
    version, numbers, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "python": json.dumps([version, list(numbers), gauss]),
        "numpy": {**state["state"], "has_gauss": state["has_gauss"], "gauss": state["gauss"]},
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Restore the states that `capture_rng` returned."""
    version, numbers, gauss = json.loads(states["python"])
    random.setstate((version, tuple(numbers), gauss))
    state = states["numpy"]
    gaussian = int(state["has_gauss"]), float(state["gauss"])
    np.random.set_state(("MT19937", state["key"], int(state["pos"]), *gaussian))
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(states["torch"].cpu())
        if "cuda" in states and torch.cuda.is_available():
            available = states["cuda"][: torch.cuda.device_count()]
            torch.cuda.set_rng_state_all([state.cpu() for state in available])


def seed_rng(*key: int) -> None:
    """Seed all generators, for a worker without saved states."""
    number = fold(*key)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(number & 0x7FFFFFFFFFFFFFFF)
