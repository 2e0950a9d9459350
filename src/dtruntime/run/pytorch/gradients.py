"""Averaging of gradients, so that all workers of a run train the same model.

At the end of each ``backward`` the workers exchange which gradients they have (the *header*), and
sum those that at least one has, weighted by the samples of each worker's batch. So whatever comes
after ``backward`` (clipping, scaling, accumulation) sees the gradients of the global batch.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ConfigError, StrataError
from ...telemetry import EventLog
from ..crew import Crew
from ..tracked_state import Tracked
from .process_group import is_initialized

log = EventLog("run")

BUCKET_BYTES = 32 * 2**20
COMMUTATIVE_WORLD = 2
"""Up to this many workers, a sum does not depend on the order of its terms."""
_NONE, _SPARSE, _DENSE = range(3)
"""The kinds of gradients that a worker may have for a parameter."""
_CHOICES = (
    "let the run average gradients (process_group='auto'), wrap the module in "
    "DistributedDataParallel before it is tracked, call run.average_gradients(module) after "
    "backward() in a process group that was made before the run was entered, or pass "
    "independent=True if the run should leave gradients alone: its checkpoints then have what the "
    "first worker trained"
)


class Gradients:
    """Averages the gradients of tracked objects, or makes sure that the program does."""

    def __init__(
        self,
        tracked: Tracked,
        *,
        automatic: bool,
        independent: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``automatic``: average at the end of each ``backward``; else the program has to.

        ``independent``: do neither. ``waiting`` is entered while this worker waits for others.
        """
        self._tracked = tracked
        self._automatic = automatic and not independent
        self._independent = independent
        self._waiting = waiting
        self._lock = threading.Lock()
        self._crew: Crew | None = None
        self._has_begun = False
        self._trained: dict[Any, str] = {}
        """Parameters that are trained, with the name of the object that has them."""
        self._foreign: set[Any] = set()
        """Other parameters of optimizers."""
        self._hooks: dict[Any, Any] = {}
        self._optimizers: Any = None
        """The hook on the steps of all optimizers."""
        self._tasks: set[int] = set()
        """The runs of ``backward`` at whose end gradients will be averaged."""
        self._fresh: set[Any] = set()
        """Parameters whose gradients ``backward`` has changed since they were averaged."""
        self._averaged: set[Any] = set()
        """Parameters whose gradients are the same on all workers, until an optimizer steps."""
        self._versions: dict[Any, int] = {}
        """The versions of parameters when the step began."""
        self._step = self._samples = self._rounds = 0

    # The life of a crew

    def check(self, workers: int) -> None:
        """``ConfigError`` if so many workers would each train a model of its own."""
        if workers == 1 or self._independent or self._automatic or is_initialized():
            return
        names = sorted({name for tensor, name in self._find().items() if tensor.requires_grad})
        if names:
            raise ConfigError(
                f"{workers} workers train the tracked {_quoted(names)}, and nobody averages "
                f"gradients: each would train a model of its own. Choose: {_CHOICES}"
            )

    def begin(self, crew: Crew) -> None:
        """A crew trains from now on, with a process group if it has several workers."""
        self.end()
        if self._has_begun:
            self._drop()
        self._crew, self._has_begun = crew, True
        self._step = self._samples = self._rounds = 0
        if crew.size > 1:
            for name, wrapper in self._wrappers():
                fix_buckets(name, wrapper)
        if crew.size > 1 and not self._independent:
            self._trained = self._find()
            self._listen()
            self._optimizers = register_optimizer_step_pre_hook(self._before_optimizer)

    def end(self) -> None:
        """Nobody trains: ``backward`` concerns this process alone."""
        self._crew = None
        for hook in self._hooks.values():
            hook.remove()
        if self._optimizers is not None:
            self._optimizers.remove()
            self._optimizers = None
        for state in (self._hooks, self._trained, self._versions):
            state.clear()
        for parameters in (self._tasks, self._fresh, self._averaged, self._foreign):
            parameters.clear()

    def begin_step(self, step: int, samples: int) -> None:
        """A step begins with a batch of so many samples."""
        self._step, self._samples, self._rounds = step, samples, 0
        if not self._trained and self._optimizers is None:
            return
        self._listen()
        if not self._automatic:
            self._versions = {tensor: tensor._version for tensor in self._trained}

    def end_step(self) -> None:
        """``StrataError`` if gradients that were not averaged changed parameters."""
        changed = [
            tensor
            for tensor in self._fresh
            if tensor not in self._averaged
            and self._versions.get(tensor, tensor._version) != tensor._version
        ]
        if changed and not self._automatic:
            raise self._not_averaged(changed)

    def average(self, parameters: Iterable[Any]) -> None:
        """Average the gradients of these parameters, unless that has been done."""
        crew = self._crew
        if crew is None or crew.size == 1:
            return
        given = [tensor for tensor in parameters if tensor.requires_grad]
        if not is_initialized():
            raise ConfigError(
                "averaging gradients needs a process group: Run(..., process_group='auto') makes "
                "one, or call torch.distributed.init_process_group() before the run is entered"
            )
        self._listen()
        loose = {t for t in given if t.grad is not None and t not in self._averaged}
        is_known = all(tensor in self._trained for tensor in given)
        if is_known and self._rounds and not loose and self._averaged.issuperset(given):
            return
        # A worker that did not call backward() takes part here in the averaging of the others.
        everything = self._automatic and is_known
        self._round(list(self._trained) if everything else given, self._fresh | loose)

    def _drop(self) -> None:
        """Drop the gradients of a step that was undone: a replacement has none of them."""
        for thing in self._tracked.objects.values():
            if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
                thing.zero_grad(set_to_none=True)

    # What is trained

    def _find(self) -> dict[Any, str]:
        """The parameters whose gradients torch does not average, with their objects' names."""
        names: dict[Any, str] = {}
        elsewhere: set[Any] = set()
        reduced = self._tracked.reduced_by_torch
        for name, thing in self._tracked.objects.items():
            if not isinstance(thing, torch.nn.Module):
                continue
            if name in reduced:
                elsewhere.update(thing.parameters())
                continue
            wrapped = (part.parameters() for part in thing.modules() if _is_wrapper(part))
            elsewhere.update(itertools.chain.from_iterable(wrapped))
            for tensor in thing.parameters():
                names.setdefault(tensor, name)
        if names or self._automatic:
            for name, thing in self._tracked.objects.items():
                if isinstance(thing, torch.optim.Optimizer) and name not in reduced:
                    for tensor in _stepped_by(thing):
                        names.setdefault(tensor, name)
        return {tensor: name for tensor, name in names.items() if tensor not in elsewhere}

    def _wrappers(self) -> Iterator[tuple[str, Any]]:
        """DDP's wrappers of tracked modules, and of parts of them."""
        yield from self._tracked.wrappers.items()
        for name, thing in self._tracked.objects.items():
            if isinstance(thing, torch.nn.Module):
                yield from ((name, part) for part in thing.modules() if _is_wrapper(part))

    def _follow_changes(self, stepped: Iterable[Any]) -> None:
        """Notice parameters that were thawed, or added to modules and optimizers."""
        others = [t for t in stepped if t not in self._trained and t not in self._foreign]
        if others:
            # In the order in which a process that starts now would have them.
            self._trained = self._find() | self._trained
            self._foreign.update(tensor for tensor in others if tensor not in self._trained)
        self._listen()

    def _listen(self) -> None:
        """Put hooks on all parameters that are trained, also on those thawed since."""
        if len(self._hooks) == len(self._trained):
            return
        for tensor in self._trained:
            if tensor.requires_grad and tensor not in self._hooks:
                self._hooks[tensor] = tensor.register_post_accumulate_grad_hook(self._changed)
                if tensor.grad is not None:
                    self._fresh.add(tensor)

    # Hooks of autograd and optimizers

    def _changed(self, parameter: Any) -> None:
        """``backward`` has changed a gradient."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            self._fresh.add(parameter)
            self._averaged.discard(parameter)
            is_first = self._automatic and task not in self._tasks
            if is_first:
                self._tasks.add(task)
        if is_first:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._after_backward(task))

    def _after_backward(self, task: int) -> None:
        self._tasks.discard(task)
        if self._crew is not None:
            self._listen()
            self._round(list(self._trained), self._fresh)

    def _before_optimizer(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Make sure that the gradients an optimizer uses are averaged."""
        stepped = list(_stepped_by(optimizer))
        self._follow_changes(stepped)
        used = [tensor for tensor in stepped if tensor in self._trained]
        if not used:
            return
        loose = {t for t in used if t.grad is not None and t not in self._averaged}
        if loose and not self._automatic:
            raise self._not_averaged(loose)
        has_closure = any(map(callable, (*arguments, *options.values())))
        if loose or (self._automatic and not self._rounds and not has_closure):
            self._round(list(self._trained), self._fresh | loose)
        self._averaged.difference_update(used)

    def _not_averaged(self, tensors: Iterable[Any]) -> StrataError:
        names = sorted({self._trained[tensor] for tensor in tensors})
        return ConfigError(
            f"the gradients of the tracked {_quoted(names)} were used before they were averaged: "
            f"each worker would train a model of its own. Choose: {_CHOICES}"
        )

    # Averaging

    def _round(self, parameters: list[Any], fresh: set[Any]) -> None:
        """Average the gradients that are fresh on any worker; all workers take part."""
        if not parameters:
            return
        self._rounds += 1
        kinds = [_kind_of(tensor.grad) if tensor in fresh else _NONE for tensor in parameters]
        try:
            with self._waiting(), torch.no_grad():
                self._reduce(parameters, kinds)
        except RuntimeError as exc:
            raise RuntimeError(
                f"the gradients of step {self._step} could not be averaged: a worker was lost, or "
                "did not call backward() in this step within collective_seconds; all have to call "
                f"it equally often ({exc})"
            ) from exc
        self._averaged.update(tensor for tensor in parameters if tensor in self._hooks)
        self._fresh.difference_update(parameters)

    def _reduce(self, parameters: list[Any], kinds: list[int]) -> None:
        device = _header_device(parameters[0].device)
        digest = zlib.crc32(bytes(kinds))
        own = [self._step, self._rounds, self._samples, _layout(parameters), digest]
        headers = _gathered(own, device)
        self._check_lockstep(headers)
        if len({header[-1] for header in headers}) > 1:
            most = torch.tensor(kinds, dtype=torch.uint8, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            kinds = most.tolist()
        samples = [header[2] for header in headers]
        # Outside of steps nobody has samples, and all count the same.
        share = self._samples / sum(samples) if sum(samples) else 1 / len(samples)
        for tensor, kind in zip(parameters, kinds, strict=True):
            if kind != _NONE:
                tensor.grad = _prepared(tensor, kind, is_empty=not share)
        dense = [t.grad for t, kind in zip(parameters, kinds, strict=True) if kind == _DENSE]
        for bucket in _buckets(dense):
            _average_dense(bucket, share)
        for tensor, kind in zip(parameters, kinds, strict=True):
            if kind == _SPARSE:
                tensor.grad = _average_sparse(tensor.grad, share)

    def _check_lockstep(self, headers: Sequence[Sequence[int]]) -> None:
        """``StrataError`` if the workers average different things."""
        here = headers[dist.get_rank()]
        for place, there in enumerate(headers):
            if there[:2] != here[:2]:
                raise StrataError(
                    "not all workers take part in the same backward(): the worker at place "
                    f"{dist.get_rank()} is in round {here[1]} of step {here[0]}, and the one at "
                    f"place {place} in round {there[1]} of step {there[0]}; all "
                    "have to call backward() equally often in each step, also with an empty batch"
                )
            if there[3] != here[3]:
                raise StrataError(
                    f"the workers at places {dist.get_rank()} and {place} train different "
                    "parameters: all have to make the same modules and track them in one order"
                )


def devices_of(tracked: Tracked) -> set[str]:
    """The kinds of devices that tracked parameters are on."""
    kinds: set[str] = set()
    for thing in tracked.objects.values():
        if isinstance(thing, torch.nn.Module):
            kinds.update(tensor.device.type for tensor in thing.parameters())
        elif isinstance(thing, torch.optim.Optimizer):
            kinds.update(tensor.device.type for tensor in _stepped_by(thing))
    return kinds - {"meta"}


def _stepped_by(optimizer: Any) -> Iterator[Any]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


def _is_wrapper(module: Any) -> bool:
    return type(module).__name__ == "DistributedDataParallel"


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(map(repr, names))


# Headers


def _header_device(default: Any, group: Any = None) -> Any:
    """Where small tensors are exchanged: on the CPU, if the group can."""
    return torch.device("cpu") if "cpu:" in str(dist.get_backend_config(group)) else default


def _gathered(numbers: list[int], device: Any) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    rows: list[list[int]] = torch.stack(parts).tolist()
    return rows


def _layout(parameters: Iterable[Any]) -> int:
    """A digest of the parameters' sizes."""
    return zlib.crc32(repr([(t.numel(), t.element_size()) for t in parameters]).encode())


# Gradients of several workers


def _kind_of(gradient: Any) -> int:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE


def _prepared(parameter: Any, kind: int, *, is_empty: bool) -> Any:
    """This worker's term of a sum: zeros if it has no gradient, or no sample."""
    gradient = None if is_empty else parameter.grad
    if gradient is None:
        zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return zeros if kind == _DENSE else zeros.to_sparse()
    return gradient.to_dense() if kind == _DENSE and gradient.is_sparse else gradient


def _average_dense(bucket: list[Any], share: float) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    flat.mul_(share)
    dist.all_reduce(flat)
    at = 0
    for gradient in bucket:
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


def _average_sparse(gradient: Any, share: float) -> Any:
    """Merge the rows of all workers, summed in the order of the workers."""
    own = gradient.coalesce()
    indices, values = own.indices(), own.values() * share
    counts = [row[0] for row in _gathered([indices.shape[1]], indices.device)]
    most = max(counts)
    parts = zip(_padded(indices.t().contiguous(), most), _padded(values, most), counts, strict=True)
    cut = [(rows[:count], summands[:count]) for rows, summands, count in parts]
    rows, summands = (torch.cat(column) for column in zip(*cut, strict=True))
    merged = torch.sparse_coo_tensor(rows.t(), summands, gradient.shape, check_invariants=False)
    return merged.coalesce()


def _padded(rows: Any, length: int) -> list[Any]:
    """The rows of all workers, each padded with zeros to a length."""
    own = rows.new_zeros((length, *rows.shape[1:]))
    own[: len(rows)] = rows
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    if length:
        dist.all_gather(gathered, own)
    return gathered


def _buckets(gradients: list[Any]) -> Iterator[list[Any]]:
    """Successive gradients of one type and device, up to a size."""
    for _, group in itertools.groupby(gradients, lambda one: (one.dtype, one.device)):
        bucket: list[Any] = []
        size = 0
        for gradient in group:
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
        yield bucket


# Buckets of DistributedDataParallel


def fix_buckets(name: str, wrapper: Any) -> None:
    """Make DDP lay out its final buckets before the first step; on all ranks of its group.

    In the first step of a process DDP reduces gradients in one bucket, from the second step on in
    buckets by the order in which they came. In another bucket the terms of three or more workers
    are summed in another order, so that a restarted process would round its first step differently
    from one that was not restarted. Gradients of zero in the order of ``backward``, the last
    parameter first, take the place of the first step. They cost one reduction, and change neither
    weights nor buffers nor random numbers.
    """
    if wrapper.process_group.size() <= COMMUTATIVE_WORLD:
        return
    parameters = [
        tensor
        for key, tensor in wrapper.module.named_parameters()
        if tensor.requires_grad and key not in wrapper.parameters_to_ignore
    ]
    keeps = _keeps_buckets(wrapper)
    reason = "" if keeps else _unfit_for_zeros(wrapper, parameters)
    if _is_true_anywhere(bool(keeps or reason), wrapper):
        if keeps:
            return
        reason = reason or "that of another worker cannot be given gradients of zero"
        log.warning(
            "run.ddp_buckets_not_fixed",
            module=name,
            reason=reason,
            detail="weights may differ in their last bits from those of a run that was not "
            "restarted; find_unused_parameters=True or Run(process_group=...) prevent that",
        )
        return
    wrapper.reducer.prepare_for_backward([])
    for tensor in reversed(parameters):
        torch.autograd.backward([tensor], [torch.zeros_like(tensor)])
    for tensor in parameters:
        tensor.grad = None
    wrapper.reducer._rebuild_buckets()


def _is_true_anywhere(here: bool, wrapper: Any) -> bool:
    """Whether something holds on any rank of DDP's group, so that all ranks do the same."""
    device = _header_device(wrapper.device, wrapper.process_group)
    flag = torch.tensor([int(here)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=wrapper.process_group)
    return bool(flag.item())


def _keeps_buckets(wrapper: Any) -> bool:
    """Whether DDP never changes its buckets, or has done so after a step before the run."""
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return True
    if wrapper._get_ddp_logging_data().get("has_rebuilt_buckets"):
        return True
    return bool(wrapper.reducer._rebuild_buckets())


def _unfit_for_zeros(wrapper: Any, parameters: Sequence[Any]) -> str:
    """Why DDP cannot be given gradients of zero without side effects; empty if it can."""
    count = wrapper._get_ddp_logging_data().get("num_parameter_tensors")
    states = [state for _, state in getattr(wrapper, "_comm_hooks", ())]
    reasons = {
        "static_graph=True counts gradients in the first step": wrapper.static_graph,
        "mixed_precision= is used": getattr(wrapper, "mixed_precision", None) is not None,
        "its communication hook has a state": any(map(_is_state, states)),
        "parameters have hooks": any(map(_has_hooks, parameters)),
        "it has gradients already": any(tensor.grad is not None for tensor in parameters),
        "it has sparse gradients": any(getattr(m, "sparse", False) for m in wrapper.modules()),
        "parameters were frozen, thawed or added since it was made": count != len(parameters),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_state(state: Any) -> bool:
    return state is not None and not isinstance(state, dist.ProcessGroup)


def _has_hooks(tensor: Any) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
