"""The states of sharded models: each worker's share of the tensors, and plain values once.

Modules and optimizers are read and restored by ``torch.distributed.checkpoint.state_dict``, which
identifies parameters by name and not by number, so that a state fits any sharding. Everything else
(schedulers, parameter groups, values) is packed into one array of bytes, which the first worker
saves, and each worker's own state into another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
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
"""What a checkpoint has beside the tracked objects."""
_PARTIAL = StateDictOptions(strict=False)

Path = tuple[Any, ...]
"""The keys that lead to a tensor in nested dicts; in a checkpoint all of them are strings."""


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

        All workers plan together, by collectives of the process group, and copy their shares; the
        rest happens in the background.
        """
        _check_group(crew)
        state: dict[str, Any] = {OWN: {_place(crew.index): _tensor(own)}}
        plain: dict[str, Any] = {}
        for name, form in self._forms().items():
            tensors, plain[name] = form.capture()
            if tensors:
                state[name] = _merged({}, tensors)
        if crew.leads:
            state[PLAIN] = _tensor({"objects": plain, **self._tracked.capture_values()})
        return save_sharded(self._manager, state, step, epoch, planning=self._planning, **options)

    def restore(self, step: int) -> ShardedCheckpoint:
        """Put everything that is tracked into the state of a checkpoint."""
        checkpoint = ShardedCheckpoint(self._manager, step)
        plain = _unpacked(checkpoint, (PLAIN,))
        objects = plain["objects"]
        self._tracked.check(objects)
        values = self._tracked.checked_values(plain)
        forms, targets, saved = self._forms(), {}, checkpoint.sizes.keys()
        for name, form in forms.items():
            paths = {path[1:] for path in saved if path[0] == name}
            targets[name] = form.targets(name, paths, objects[name])
        checkpoint.load_into({name: _merged({}, found) for name, found in targets.items() if found})
        for name, form in forms.items():
            form.apply(_merged(objects[name], targets[name]))
        self._tracked.values.update(values)
        return checkpoint

    def own(self, checkpoint: ShardedCheckpoint, index: int, most: int) -> list[Any]:
        """Each worker's own state, by its index.

        Of more than ``most`` workers only the first one's and that of ``index`` are read; others
        are None.
        """
        count = sum(path[0] == OWN for path in checkpoint.sizes)
        read = range(count) if count <= most else {0, index}
        return [
            _unpacked(checkpoint, (OWN, _place(place))) if place in read else None
            for place in range(count)
        ]

    def _forms(self) -> dict[str, _Form]:
        objects = self._tracked.objects
        modules = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module)]
        return {name: _form_of(name, thing, modules) for name, thing in objects.items()}


class _Form:
    """Any object with a state; only its sharded tensors are saved as such."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def capture(self) -> tuple[dict[Path, Any], Any]:
        """Its tensors by path, and the rest of its state."""
        return _split(self.thing.state_dict(), DTensor)

    def targets(self, name: str, saved: Set[Path], plain: Any) -> dict[Path, Any]:
        """The tensors to load the saved paths into."""
        tensors, _ = self.capture()
        _check_same(name, {_text(path) for path in tensors}, saved)
        return tensors

    def apply(self, state: Any) -> None:
        """Restore a state that was captured."""
        self.thing.load_state_dict(state)


class _Module(_Form):
    """A module; the tensors are its parameters and buffers themselves."""

    def capture(self) -> tuple[dict[Path, Any], Any]:
        return _split(get_model_state_dict(self.thing), torch.Tensor)

    def apply(self, state: Any) -> None:
        set_model_state_dict(self.thing, state)


class _Optimizer(_Form):
    """An optimizer, whose state is named by its module's parameters."""

    def __init__(self, thing: Any, owner: Any) -> None:
        super().__init__(thing)
        self._owner = owner

    def capture(self) -> tuple[dict[Path, Any], Any]:
        is_fresh = not self.thing.state
        state = get_optimizer_state_dict(self._owner, self.thing)
        if is_fresh:
            # To make the state, torch has taken a step of length 0, which must not count.
            self.thing.state.clear()
            state["state"] = {}
        return _split(state, torch.Tensor)

    def targets(self, name: str, saved: Set[Path], plain: Any) -> dict[Path, Any]:
        if not plain["state"]:
            return {}
        tensors, _ = _split(get_optimizer_state_dict(self._owner, self.thing), torch.Tensor)
        # Parameters that had no gradient yet have no state either.
        tensors = {path: tensor for path, tensor in tensors.items() if _text(path) in saved}
        _check_same(name, {_text(path) for path in tensors}, saved)
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
    parameters = set(_parameters(thing))
    owners = [module for module in modules if parameters <= set(module.parameters())]
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


def _split(state: Any, kind: type[Any], at: Path = ()) -> tuple[dict[Path, Any], Any]:
    """The tensors of a kind by their paths, and the state without them."""
    if not isinstance(state, Mapping):
        return {}, state
    tensors: dict[Path, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in state.items():
        path = (*at, key)
        # Before there were DTensors, FSDP made ShardedTensors of parameters.
        if isinstance(value, kind) or type(value).__name__ == "ShardedTensor":
            tensors[path] = value
        else:
            inner, rest[key] = _split(value, kind, path)
            tensors |= inner
    return tensors, rest


def _merged(rest: Any, tensors: Mapping[Path, Any]) -> Any:
    """The state that `_split` took apart; of nothing but tensors, nested dicts."""
    if not isinstance(rest, Mapping):
        return rest
    state = {key: _merged(value, {}) for key, value in rest.items()}
    for (*parents, last), tensor in tensors.items():
        place = state
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = tensor
    return state


def _text(path: Path) -> Path:
    return tuple(map(str, path))


def _check_same(name: str, here: Set[Path], saved: Set[Path]) -> None:
    for paths, which in ((saved - here, "the checkpoint has"), (here - saved, "it has")):
        if paths:
            some = ", ".join(".".join(path) for path in sorted(paths)[:4])
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


def _unpacked(checkpoint: ShardedCheckpoint, path: Path) -> Any:
    size = checkpoint.sizes.get(path)
    if size is None:
        raise CheckpointDamagedError(
            f"the checkpoint has no {'.'.join(path)}: it was not saved by a run, or is damaged"
        )
    memory = torch.zeros(size, dtype=torch.uint8)
    checkpoint.load_into(_merged({}, {path: memory}))
    return unpack(memory.numpy(), ".".join(path))


BLOCK = 4096
"""The length of arrays is a multiple of this: a state that changes a little keeps its size."""


def pack(state: Any) -> NDArray[np.uint8]:
    """A state as bytes: the length of its description, the description as JSON, and its arrays."""
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
    """The state that `pack` was given; ``CheckpointDamagedError`` if it cannot be read."""
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
