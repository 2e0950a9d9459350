"""The gradients of a run's models, averaged so that all workers train the same model.

At the end of each ``backward`` the workers tell each other what they have (the *header*), and sum
what at least one of them has, each weighted by the samples of its batch. So whatever comes after
``backward`` (clipping, scaling, accumulation) sees the gradients of the global batch.
"""

from __future__ import annotations

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

log = EventLog("run")

BUCKET_BYTES = 32 * 2**20
COMMUTATIVE_WORLD = 2
"""So many workers have one sum, in whatever order it is added up."""
_NONE, _SPARSE, _DENSE = range(3)
"""What a worker has of a parameter's gradient."""
_CHOICES = (
    "let the run average gradients (process_group='auto'), wrap the module in "
    "DistributedDataParallel before it is tracked, call run.average_gradients(module) after "
    "backward() in a process group that was made before the run was entered, or say "
    "independent=True if gradients are no business of the run: its checkpoints then have what "
    "the first worker trained"
)


class Gradients:
    """Averages the gradients of what is tracked, or sees to it that the program does."""

    def __init__(
        self,
        tracked: Tracked,
        *,
        automatic: bool,
        independent: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``automatic``: average at the end of each ``backward``; else whoever steps must have.

        ``independent``: do neither. ``waiting`` surrounds the time that others are waited for.
        """
        self._tracked = tracked
        self._automatic = automatic and not independent
        self._independent = independent
        self._waiting = waiting
        self._lock = threading.Lock()
        self._crew: Crew | None = None
        self._has_begun = False
        self._known: dict[Any, str] = {}
        """Parameters that are trained, with the name of what has them."""
        self._foreign: set[Any] = set()
        """Parameters of optimizers that are none of these."""
        self._hooks: dict[Any, Any] = {}
        self._optimizers: Any = None
        """The hook that sees all optimizers step."""
        self._tasks: set[int] = set()
        """Runs of ``backward`` at whose end gradients will be averaged."""
        self._fresh: set[Any] = set()
        """Parameters whose gradients ``backward`` has changed since they were averaged."""
        self._averaged: set[Any] = set()
        """Parameters whose gradients are the same on all workers, until an optimizer steps."""
        self._versions: dict[Any, int] = {}
        """Of parameters, when the step began."""
        self._step = self._samples = self._rounds = 0

    # The life of a crew

    def check(self, workers: int) -> None:
        """``ConfigError`` when so many workers would each train a model of its own."""
        if workers == 1 or self._independent or self._automatic or _has_group():
            return
        names = sorted({name for tensor, name in self._find().items() if tensor.requires_grad})
        if names:
            raise ConfigError(
                f"{workers} workers train the tracked {_quoted(names)}, and nobody averages "
                f"gradients: each would train a model of its own. Choose: {_CHOICES}"
            )

    def begin(self, crew: Crew) -> None:
        """A crew trains from here on, with a process group if it is of several workers."""
        self.end()
        if self._has_begun:
            self._drop()
        self._crew, self._has_begun = crew, True
        self._step = self._samples = self._rounds = 0
        if crew.size > 1:
            for name, wrapper in self._wrappers():
                fix_buckets(name, wrapper)
        if crew.size > 1 and not self._independent:
            self._known = self._find()
            self._listen()
            self._optimizers = register_optimizer_step_pre_hook(self._before_optimizer)

    def end(self) -> None:
        """Nobody trains: ``backward`` is a matter of this process alone."""
        self._crew = None
        for hook in self._hooks.values():
            hook.remove()
        if self._optimizers is not None:
            self._optimizers.remove()
            self._optimizers = None
        for kept in (self._hooks, self._known, self._versions):
            kept.clear()
        for marked in (self._tasks, self._fresh, self._averaged, self._foreign):
            marked.clear()

    def begin_step(self, step: int, samples: int) -> None:
        """A step begins, with a batch of so many samples."""
        self._step, self._samples, self._rounds = step, samples, 0
        if not self._known and self._optimizers is None:
            return
        self._listen()
        if not self._automatic:
            self._versions = {tensor: tensor._version for tensor in self._known}

    def end_step(self) -> None:
        """``StrataError`` when parameters were changed by gradients that were not averaged."""
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
        if not _has_group():
            raise ConfigError(
                "averaging gradients needs a process group: Run(..., process_group='auto') makes "
                "one, or call torch.distributed.init_process_group() before the run is entered"
            )
        self._listen()
        loose = {t for t in given if t.grad is not None and t not in self._averaged}
        is_known = all(tensor in self._known for tensor in given)
        if is_known and self._rounds and not loose and self._averaged.issuperset(given):
            return
        # A worker that had no reason for backward() meets those here that average in theirs.
        everything = self._automatic and is_known
        self._round(list(self._known) if everything else given, self._fresh | loose)

    def _drop(self) -> None:
        """Forget the gradients of a step that was undone: a replacement has none of them."""
        for thing in self._tracked.objects.values():
            if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
                thing.zero_grad(set_to_none=True)

    # What is trained

    def _find(self) -> dict[Any, str]:
        """The parameters that this class looks after, with the names of what has them."""
        found: dict[Any, str] = {}
        elsewhere: set[Any] = set()
        reduced = self._tracked.reduced_by_torch
        for name, thing in self._tracked.objects.items():
            if not isinstance(thing, torch.nn.Module):
                continue
            if name in reduced:
                elsewhere.update(thing.parameters())
                continue
            elsewhere.update(_wrapped_within(thing))
            found.update({tensor: name for tensor in thing.parameters() if tensor not in found})
        if found or self._automatic:
            for name, thing in self._tracked.objects.items():
                if isinstance(thing, torch.optim.Optimizer) and name not in reduced:
                    found.update({t: name for t in _stepped_by(thing) if t not in found})
        return {tensor: name for tensor, name in found.items() if tensor not in elsewhere}

    def _wrappers(self) -> Iterator[tuple[str, Any]]:
        """DDP's wrappers around tracked modules, and inside of them."""
        yield from self._tracked.wrappers.items()
        for name, thing in self._tracked.objects.items():
            if isinstance(thing, torch.nn.Module):
                yield from ((name, part) for part in thing.modules() if _is_wrapper(part))

    def _follow_changes(self, stepped: Iterable[Any]) -> None:
        """Parameters may be thawed, or added to modules and optimizers, while the run goes on."""
        others = [t for t in stepped if t not in self._known and t not in self._foreign]
        if others:
            # In the order that a process has which finds all of them when it starts.
            self._known = self._find() | self._known
            self._foreign.update(tensor for tensor in others if tensor not in self._known)
        self._listen()

    def _listen(self) -> None:
        """Be told of gradients of all parameters that are trained, also of those thawed since."""
        if len(self._hooks) == len(self._known):
            return
        for tensor in self._known:
            if tensor.requires_grad and tensor not in self._hooks:
                self._hooks[tensor] = tensor.register_post_accumulate_grad_hook(self._changed)
                if tensor.grad is not None:
                    self._fresh.add(tensor)

    # What autograd and optimizers tell

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
            self._round(list(self._known), self._fresh)

    def _before_optimizer(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """What an optimizer uses has been averaged, whoever has made it."""
        stepped = list(_stepped_by(optimizer))
        self._follow_changes(stepped)
        used = [tensor for tensor in stepped if tensor in self._known]
        if not used:
            return
        loose = {t for t in used if t.grad is not None and t not in self._averaged}
        if loose and not self._automatic:
            raise self._not_averaged(loose)
        has_closure = any(map(callable, (*arguments, *options.values())))
        if loose or (self._automatic and not self._rounds and not has_closure):
            self._round(list(self._known), self._fresh | loose)
        self._averaged.difference_update(used)

    def _not_averaged(self, tensors: Iterable[Any]) -> StrataError:
        names = sorted({self._known[tensor] for tensor in tensors})
        return ConfigError(
            f"the gradients of the tracked {_quoted(names)} were used before they were averaged: "
            f"each worker would train a model of its own. Choose: {_CHOICES}"
        )

    # Averaging

    def _round(self, parameters: list[Any], fresh: set[Any]) -> None:
        """Average the gradients of those that are fresh on any worker; all take part."""
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
                "has not called backward() in this step within collective_seconds, as all have to "
                f"equally often ({exc})"
            ) from exc
        self._averaged.update(tensor for tensor in parameters if tensor in self._hooks)
        self._fresh.difference_update(parameters)

    def _reduce(self, parameters: list[Any], kinds: list[int]) -> None:
        device = _header_device(parameters)
        headers = _gathered(
            [self._step, self._rounds, self._samples, _layout(parameters), _digest(kinds)], device
        )
        self._check_lockstep(headers)
        if len({header[-1] for header in headers}) > 1:
            most = torch.tensor(kinds, dtype=torch.uint8, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            kinds = most.tolist()
        samples = [header[2] for header in headers]
        # Outside the steps nobody has samples: everybody counts the same.
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
        """All workers average the same thing."""
        here = headers[dist.get_rank()]
        for place, there in enumerate(headers):
            if there[:2] != here[:2]:
                raise StrataError(
                    "not all workers take part in the same backward(): the worker at place "
                    f"{dist.get_rank()} averages gradients for time {here[1]} in step {here[0]}, "
                    f"and the one at place {place} for time {there[1]} in step {there[0]}; all "
                    "have to call backward() equally often in each step, also with an empty batch"
                )
            if there[3] != here[3]:
                raise StrataError(
                    f"the workers at places {dist.get_rank()} and {place} train different "
                    "parameters: all have to make the same modules and track them in one order"
                )


def devices_of(tracked: Tracked) -> set[str]:
    """The kinds of devices that tracked parameters are on."""
    found: set[str] = set()
    for thing in tracked.objects.values():
        if isinstance(thing, torch.nn.Module):
            found.update(tensor.device.type for tensor in thing.parameters())
        elif isinstance(thing, torch.optim.Optimizer):
            found.update(tensor.device.type for tensor in _stepped_by(thing))
    return found - {"meta"}


def _stepped_by(optimizer: Any) -> Iterator[Any]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


def _wrapped_within(module: Any) -> Iterator[Any]:
    """The parameters of those parts of a module that are in DDP's wrapper."""
    for part in module.modules():
        if _is_wrapper(part):
            yield from part.parameters()


def _is_wrapper(module: Any) -> bool:
    return type(module).__name__ == "DistributedDataParallel"


def _has_group() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(map(repr, names))


# Headers


def _header_device(parameters: Sequence[Any]) -> Any:
    """Where small tensors are exchanged: on the processor, if the group can."""
    backends = str(dist.get_backend_config())
    return torch.device("cpu") if "cpu:" in backends else parameters[0].device


def _gathered(numbers: list[int], device: Any) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    found: list[list[int]] = torch.stack(parts).tolist()
    return found


def _layout(parameters: Iterable[Any]) -> int:
    """A number that differs when parameters do."""
    return zlib.crc32(repr([(t.numel(), t.element_size()) for t in parameters]).encode())


def _digest(kinds: list[int]) -> int:
    return zlib.crc32(bytes(kinds))


# Gradients of several workers


def _kind_of(gradient: Any) -> int:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE


def _prepared(parameter: Any, kind: int, *, is_empty: bool) -> Any:
    """The gradient that takes part in a sum: zeros where there is none, or no sample."""
    gradient = None if is_empty else parameter.grad
    if kind == _DENSE:
        if gradient is None:
            return torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return gradient.to_dense() if gradient.is_sparse else gradient
    if gradient is None:
        return torch.zeros_like(parameter).to_sparse()
    return gradient


def _average_dense(bucket: list[Any], share: float) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    flat.mul_(share)
    dist.all_reduce(flat)
    at = 0
    for gradient in bucket:
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


def _average_sparse(gradient: Any, share: float) -> Any:
    """Rows that one worker has meet those of the others; summed in the order of the workers."""
    own = gradient.coalesce()
    indices, values = own.indices(), own.values() * share
    counts = [row[0] for row in _gathered([indices.shape[1]], indices.device)]
    most = max(counts)
    parts = zip(_padded(indices.t().contiguous(), most), _padded(values, most), counts, strict=True)
    kept = [(rows[:count], found[:count]) for rows, found, count in parts]
    rows, found = (torch.cat(column) for column in zip(*kept, strict=True))
    merged = torch.sparse_coo_tensor(rows.t(), found, gradient.shape, check_invariants=False)
    return merged.coalesce()


def _padded(rows: Any, length: int) -> list[Any]:
    """The rows of all workers, each with zeros behind them up to a length."""
    own = rows.new_zeros((length, *rows.shape[1:]))
    own[: len(rows)] = rows
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    if length:
        dist.all_gather(found, own)
    return found


def _buckets(gradients: list[Any]) -> Iterator[list[Any]]:
    """Gradients of one type and device together, up to a size."""
    bucket: list[Any] = []
    size = 0
    for gradient in gradients:
        other = bucket and (
            gradient.dtype != bucket[0].dtype or gradient.device != bucket[0].device
        )
        if bucket and (other or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket


# Buckets of DistributedDataParallel


def fix_buckets(name: str, wrapper: Any) -> None:
    """Let DDP lay out its buckets for good before the first step; all ranks of its group call it.

    DDP sends gradients in one bucket in the first step of a process, and from the second step on
    in buckets by the order in which they came. In another bucket the numbers of three or more
    workers are added up in another order, so a process that was started again in the middle would
    round its first step otherwise than one that was not. Gradients of zero in the order of
    ``backward``, the last parameter first, take the place of the first step. They cost one
    reduction, and leave no trace in weights, buffers or random numbers.
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
    """Whether something holds on any rank of DDP's group: all do the same then."""
    backends = str(dist.get_backend_config(wrapper.process_group))
    device = "cpu" if "cpu:" in backends else wrapper.device
    flag = torch.tensor([int(here)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=wrapper.process_group)
    return bool(flag.item())


def _keeps_buckets(wrapper: Any) -> bool:
    """Whether DDP never lays out its buckets anew, or has done so after a step before the run."""
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return True
    if wrapper._get_ddp_logging_data().get("has_rebuilt_buckets"):
        return True
    return bool(wrapper.reducer._rebuild_buckets())


def _unfit_for_zeros(wrapper: Any, parameters: Sequence[Any]) -> str:
    """Why DDP cannot be given gradients of zero unnoticed; empty if it can."""
    known = wrapper._get_ddp_logging_data().get("num_parameter_tensors")
    states = [state for _, state in getattr(wrapper, "_comm_hooks", ())]
    reasons = {
        "static_graph=True counts gradients in the first step": wrapper.static_graph,
        "mixed_precision= is used": getattr(wrapper, "mixed_precision", None) is not None,
        "its communication hook has a state": any(map(_is_state, states)),
        "parameters have hooks": any(map(_has_hooks, parameters)),
        "it has gradients already": any(tensor.grad is not None for tensor in parameters),
        "it has sparse gradients": any(getattr(m, "sparse", False) for m in wrapper.modules()),
        "parameters were frozen, thawed or added since it was made": known != len(parameters),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_state(state: Any) -> bool:
    return state is not None and not isinstance(state, dist.ProcessGroup)


def _has_hooks(tensor: Any) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
