"""The states of sharded models: each worker's share of the tensors, and plain values once.

Modules and optimizers are read and restored by ``torch.distributed.checkpoint.state_dict``, which
calls parameters by their names and not by numbers, so that a state fits any sharding. Everything
that is no tensor of theirs (schedulers, groups of parameters, values) is packed into one array of
bytes, which the first worker saves; and what every worker has of its own into one of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ...checkpoint import CheckpointManager
from ...checkpoint.dcp import Planning, ShardedCheckpoint, save_sharded
from ...checkpoint.dcp.sharded_states import world_size
from ...checkpoint.save.handle import SaveHandle
from ...checkpoint.state_dict import flatten, rebuild
from ...errors import CheckpointDamagedError, StrataError
from ..crew import Crew
from ..tracked_state import Tracked

OWN, PLAIN = "strata:own", "strata:plain"
"""What stands beside the tracked objects in a checkpoint."""
_PARTIAL = StateDictOptions(strict=False)


def is_sharded(thing: Any) -> bool:
    """Whether tensors of a module or an optimizer are spread over processes."""
    if isinstance(thing, torch.nn.Module):
        wrapped = any(type(m).__name__ == "FullyShardedDataParallel" for m in thing.modules())
        return wrapped or any(isinstance(tensor, DTensor) for tensor in thing.parameters())
    if isinstance(thing, torch.optim.Optimizer):
        return any(isinstance(tensor, DTensor) for tensor in _parameters(thing))
    return False


class ShardedStates:
    """Saves and restores what is tracked, and what each worker has of its own."""

    def __init__(self, manager: CheckpointManager, tracked: Tracked) -> None:
        self._manager = manager
        self._tracked = tracked
        self._planning = Planning()

    def save(self, crew: Crew, own: Any, step: int, epoch: int, **options: Any) -> SaveHandle:
        """Begin to save; returns when training may go on.

        All workers plan together, by collectives of the process group, and copy what falls to
        them; the rest happens in the background.
        """
        _check_group(crew)
        state: dict[str, Any] = {OWN: {_place(crew.index): _tensor(own)}}
        plain: dict[str, Any] = {}
        for name, form in self._forms().items():
            tensors, plain[name] = form.capture()
            if tensors:
                state[name] = tensors
        if crew.leads:
            state[PLAIN] = _tensor({"objects": plain, **self._tracked.capture_values()})
        return save_sharded(self._manager, state, step, epoch, planning=self._planning, **options)

    def restore(self, step: int) -> ShardedCheckpoint:
        """Put everything that is tracked into the state of a checkpoint."""
        found = ShardedCheckpoint(self._manager, step)
        kept = _unpacked(found, (PLAIN,))
        self._tracked.check(kept["objects"])
        values = self._tracked.checked_values(kept)
        saved = found.sizes.keys()
        targets: dict[str, Any] = {}
        forms = self._forms()
        for name, form in forms.items():
            paths = {path[1:] for path in saved if path[0] == name}
            targets[name] = form.targets(name, paths, kept["objects"][name])
        found.load_into({name: tensors for name, tensors in targets.items() if tensors})
        for name, form in forms.items():
            form.apply(_merged(kept["objects"][name], targets[name]))
        self._tracked.values.update(values)
        return found

    def own(self, found: ShardedCheckpoint, index: int, most: int) -> list[Any]:
        """What the workers saved of their own, by their place.

        When there were more than ``most``, only the first one's and that of a place are read, and
        others are ``None``.
        """
        count = sum(path[0] == OWN for path in found.sizes)
        wanted = range(count) if count <= most else {0, index}
        return [
            _unpacked(found, (OWN, _place(place))) if place in wanted else None
            for place in range(count)
        ]

    def _forms(self) -> dict[str, _Form]:
        objects = self._tracked.objects
        modules = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module)]
        return {name: _form_of(name, thing, modules) for name, thing in objects.items()}


class _Form:
    """An object with a state of its own kind; of its tensors only sharded ones are set apart."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def capture(self) -> tuple[dict[str, Any], Any]:
        """Its tensors as a nested dict, and the rest of its state."""
        return _split(self.thing.state_dict(), DTensor)

    def targets(self, name: str, saved: set[tuple[Any, ...]], plain: Any) -> dict[str, Any]:
        """Tensors to load those into that were saved under these paths."""
        tensors, _ = self.capture()
        _check_same(name, _paths(tensors), saved)
        return tensors

    def apply(self, state: Any) -> None:
        """Put it into a state that was captured."""
        self.thing.load_state_dict(state)


class _Module(_Form):
    """A module; the tensors are its parameters and buffers themselves."""

    def capture(self) -> tuple[dict[str, Any], Any]:
        return _split(get_model_state_dict(self.thing), torch.Tensor)

    def apply(self, state: Any) -> None:
        set_model_state_dict(self.thing, state)


class _Optimizer(_Form):
    """An optimizer, whose state is told by the names of its module's parameters."""

    def __init__(self, thing: Any, owner: Any) -> None:
        super().__init__(thing)
        self._owner = owner

    def capture(self) -> tuple[dict[str, Any], Any]:
        is_fresh = not self.thing.state
        state = get_optimizer_state_dict(self._owner, self.thing)
        if is_fresh:
            # To make it, torch has taken a step of length 0: which must not count as one.
            self.thing.state.clear()
            state["state"] = {}
        return _split(state, torch.Tensor)

    def targets(self, name: str, saved: set[tuple[Any, ...]], plain: Any) -> dict[str, Any]:
        if not plain["state"]:
            return {}
        tensors, _ = _split(get_optimizer_state_dict(self._owner, self.thing), torch.Tensor)
        # Parameters that had no gradient yet have no state either.
        tensors = _only(tensors, saved)
        _check_same(name, _paths(tensors), saved)
        return tensors

    def apply(self, state: Any) -> None:
        if state["state"]:
            state["state"] = {name: kept for name, kept in state["state"].items() if kept}
            set_optimizer_state_dict(self._owner, self.thing, state, options=_PARTIAL)
            return
        self.thing.state.clear()
        for group, kept in zip(self.thing.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in kept.items() if key != "params"})


def _form_of(name: str, thing: Any, modules: list[Any]) -> _Form:
    if isinstance(thing, torch.nn.Module):
        return _Module(thing) if any(True for _ in thing.parameters()) else _Form(thing)
    if not isinstance(thing, torch.optim.Optimizer):
        return _Form(thing)
    wanted = set(_parameters(thing))
    owners = [module for module in modules if wanted <= set(module.parameters())]
    if owners:
        return _Optimizer(thing, min(owners, key=lambda owner: len(list(owner.parameters()))))
    if is_sharded(thing):
        raise ValueError(
            f"cannot track the optimizer {name!r}: no tracked module has all its parameters, and "
            "their names are needed to shard its state anew; track the module that it trains (of "
            "several modules, a torch.nn.ModuleDict of them)"
        )
    return _Form(thing)


def _parameters(optimizer: Any) -> list[Any]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _check_group(crew: Crew) -> None:
    size = world_size()
    if size != crew.size:
        raise StrataError(
            f"a sharded model is saved by all processes of the process group together, and torch's "
            f"has {size} and the run {crew.size} workers: call torch.distributed."
            "init_process_group() in all workers, shard the model, and then enter the run with a "
            "coordinator (COORDINATOR_URL) and without process_group="
        )


# Nested states


def _split(state: Any, kind: type[Any]) -> tuple[dict[str, Any], Any]:
    """The tensors of a kind in nested dicts, and the state without them."""
    if not isinstance(state, Mapping):
        return {}, state
    tensors: dict[str, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in state.items():
        if isinstance(value, kind) or _is_shards(value):
            tensors[key] = value
        elif isinstance(value, Mapping):
            inner, rest[key] = _split(value, kind)
            if inner:
                tensors[key] = inner
        else:
            rest[key] = value
    return tensors, rest


def _is_shards(value: Any) -> bool:
    """Whether it is what FSDP made of a parameter before there were DTensors."""
    return type(value).__name__ == "ShardedTensor"


def _merged(rest: Any, tensors: dict[str, Any]) -> Any:
    """The state that `_split` took apart."""
    if not isinstance(rest, Mapping):
        return rest
    state = dict(rest)
    for key, value in tensors.items():
        state[key] = _merged(state.get(key, {}), value) if isinstance(value, dict) else value
    return state


def _paths(tensors: dict[str, Any], at: tuple[str, ...] = ()) -> set[tuple[Any, ...]]:
    found: set[tuple[Any, ...]] = set()
    for key, value in tensors.items():
        path = (*at, str(key))
        found |= _paths(value, path) if isinstance(value, dict) else {path}
    return found


def _only(
    tensors: dict[str, Any], wanted: set[tuple[Any, ...]], at: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Those tensors that have one of these paths."""
    kept: dict[str, Any] = {}
    for key, value in tensors.items():
        path = (*at, str(key))
        if isinstance(value, dict):
            inner = _only(value, wanted, path)
            if inner:
                kept[key] = inner
        elif path in wanted:
            kept[key] = value
    return kept


def _check_same(name: str, here: set[tuple[Any, ...]], saved: set[tuple[Any, ...]]) -> None:
    for paths, which in ((saved - here, "the checkpoint has"), (here - saved, "it has")):
        if paths:
            some = ", ".join(".".join(map(str, path)) for path in sorted(paths)[:4])
            raise ValueError(
                f"{name!r} is not what was saved: {which} {some}{' and more' * (len(paths) > 4)}, "
                "which the other has not; make it as it was, or start with another folder for "
                "checkpoints"
            )


# Arrays of bytes


def _place(index: int) -> str:
    return f"{index:05d}"


def _tensor(state: Any) -> Any:
    return torch.from_numpy(pack(state))


def _unpacked(found: ShardedCheckpoint, path: tuple[str, ...]) -> Any:
    size = found.sizes.get(path)
    if size is None:
        raise CheckpointDamagedError(
            f"the checkpoint has no {'.'.join(path)}: it was not saved by a run, or is damaged"
        )
    memory = torch.zeros(size, dtype=torch.uint8)
    state: Any = memory
    for key in reversed(path):
        state = {key: state}
    found.load_into(state)
    return unpack(memory.numpy(), ".".join(path))


BLOCK = 4096
"""Arrays are so many bytes long, or a multiple: a state that changes a little keeps its size."""


def pack(state: Any) -> NDArray[np.uint8]:
    """Put a state into bytes: the length of its description, that as JSON, and its arrays."""
    tree = flatten(state)
    head = json.dumps({"state": tree.skeleton, "sizes": [b.nbytes for b in tree.buffers]}).encode()
    length = 8 + len(head) + sum(buffer.nbytes for buffer in tree.buffers)
    packed = np.zeros(-(-length // BLOCK) * BLOCK, np.uint8)
    view = packed.data
    view[:8] = len(head).to_bytes(8, "little")
    at = 8 + len(head)
    view[8:at] = head
    for buffer in tree.buffers:
        buffer.copy_into(view[at : at + buffer.nbytes])
        at += buffer.nbytes
    return packed


def unpack(packed: NDArray[np.uint8], name: str) -> Any:
    """The state that `pack` was given; ``CheckpointDamagedError`` when it is none."""
    view = packed.data
    try:
        start = 8 + int.from_bytes(view[:8], "little")
        head = json.loads(bytes(view[8:start]))
        sizes = head["sizes"]
        offsets = [start + sum(sizes[:number]) for number in range(len(sizes))]

        def read(number: int, memory: memoryview) -> None:
            first = offsets[number]
            memory[:] = view[first : first + memory.nbytes]

        return rebuild(head["state"], read, map_location="cpu")
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise CheckpointDamagedError(f"{name} of the checkpoint is damaged: {exc}") from exc
