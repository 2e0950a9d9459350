"""The stream of data that the user iterates, such as a `DataLoader` of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..telemetry import EventLog
from .crew import Crew
from .streams import Stream
from .tracked_state import capture_rng, restore_rng

log = EventLog("run")


class UserStream(Stream):
    """Any iterable of batches, which has a position if it has ``state_dict``.

    Without one it is read again up to the position, with the random numbers of when the epoch
    began, from which a shuffled order is drawn.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._warned: set[str] = set()
        self._drawn_from: dict[str, Any] | None = None
        """The states of random number generators at the start of the epoch."""
        self.epoch = self._read = self._skip = 0
        self._resumed = False
        """Whether the loader's own state was loaded, which may be that of the end of an epoch."""

    def open(self, crew: Crew) -> None:
        """Start over."""
        self._start()
        if crew.size > 1 and crew.leads and not _divides(self._batches):
            self._warn(
                "run.data_is_not_divided",
                workers=crew.size,
                reason=f"every worker iterates all of this {type(self._batches).__name__}: divide "
                "it (by a DistributedSampler, or RANK and WORLD_SIZE), or give files or a source",
            )

    def batches(self) -> Iterator[tuple[Any, int]]:
        """One pass over the data."""
        skip, self._skip = self._skip, 0
        resumed, self._resumed = self._resumed, False
        _set_epoch(self._batches, self.epoch)
        is_empty = not (resumed or skip)
        for batch in self._resume(skip) if skip else self._begin():
            is_empty = False
            yield batch, _length(batch)
        if is_empty:
            raise self._empty()
        self.epoch += 1
        self._read, self._drawn_from = 0, None

    def used(self) -> None:
        """Count the batch."""
        self._read += 1

    def state(self) -> Any:
        """The position, and the loader's own state if it has one."""
        position = {"epoch": self.epoch, "read": self._read}
        if self._has_state:
            return {**position, "inner": self._batches.state_dict()}
        drawn_from = self._drawn_from if self._read else _generator_states(self._batches)
        return {**position, "inner": None, "drawn_from": drawn_from}

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Go on from this rank's state, or from the first one's."""
        state = states[index if index < len(states) else 0]
        self._start()
        self.epoch, self._read = state["epoch"], state["read"]
        if self.epoch and getattr(self._batches, "persistent_workers", False):
            self._warn(
                "run.worker_random_numbers_are_not_saved",
                epoch=self.epoch,
                reason="with persistent_workers the processes of a DataLoader go on from epoch to "
                "epoch with random numbers of their own, which no checkpoint has: if data depends "
                "on them, it is other data than without the restart. Seed by the epoch and the "
                "sample, or leave out persistent_workers",
            )
        if self._has_state and state["inner"] is not None:
            self._batches.load_state_dict(state["inner"])
            self._resumed = True
            self._follow()
            return
        self._skip = self._read
        self._drawn_from = state.get("drawn_from")
        if self._drawn_from is not None:
            _set_generators(self._batches, self._drawn_from)
        elif self._skip:
            self._warn(
                "run.order_is_not_saved",
                epoch=self.epoch,
                read=self._read,
                reason="the checkpoint does not say with which random numbers this epoch began: "
                "if they decide the order of the data, some of it comes twice and some not at all "
                "until the epoch ends",
            )

    @property
    def _has_state(self) -> bool:
        return hasattr(self._batches, "state_dict") and hasattr(self._batches, "load_state_dict")

    def _follow(self) -> None:
        """Follow the loader's epoch: behind the last batch of one it may be in the next."""
        counts_alike = hasattr(self._batches, "set_epoch")
        ahead = getattr(self._batches, "epoch", None) if counts_alike else None
        if isinstance(ahead, int) and ahead > self.epoch:
            self.epoch, self._read = ahead, 0

    def _start(self) -> None:
        self.epoch = self._read = self._skip = 0
        self._resumed = False
        self._drawn_from = None

    def _begin(self) -> Iterator[Any]:
        """A pass from its first batch, or from where the loader's own state says."""
        self._read = 0
        if not self._has_state:
            self._drawn_from = _origin(self._batches)
        return iter(self._batches)

    def _resume(self, skip: int) -> Iterator[Any]:
        """The pass that was interrupted, from behind the batches that were used."""
        now = capture_rng()
        if self._drawn_from is None:
            self._drawn_from = _origin(self._batches)
        _keep_workers(self._batches, keep=self._drawn_from["kept_workers"])
        _set_generators(self._batches, self._drawn_from)
        restore_rng(self._drawn_from["global"])
        passing: Iterator[Any] = iter(self._batches)
        for _ in islice(passing, skip):
            pass
        restore_rng(now)
        return passing

    def _empty(self) -> ValueError:
        kind = type(self._batches).__name__
        if self.epoch:
            return ValueError(
                f"the data has no batches in epoch {self.epoch}: this {kind} can be iterated once; "
                "give something that begins anew each time, as a list or a DataLoader does"
            )
        return ValueError(f"the data has no batches: this {kind} is empty")

    def _warn(self, event: str, **fields: Any) -> None:
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, **fields)


def _parts(batches: Any) -> list[Any]:
    """What decides the order: the loader and its samplers, as ``DataLoader`` names them."""
    inner = getattr(batches, "batch_sampler", None)
    parts = [batches, getattr(batches, "sampler", None), inner, getattr(inner, "sampler", None)]
    return [part for part in parts if part is not None]


def _set_epoch(batches: Any, epoch: int) -> None:
    """Set the epoch of the loader, or else of its sampler."""
    setters = [part.set_epoch for part in _parts(batches) if hasattr(part, "set_epoch")]
    for set_epoch in setters[:1]:
        set_epoch(epoch)


def _divides(batches: Any) -> bool:
    """Whether it is known to give each worker only a part."""
    parts = [*_parts(batches), getattr(batches, "loader", None), getattr(batches, "dataset", None)]
    counts = [getattr(part, name, 1) for part in parts for name in ("num_replicas", "world_size")]
    return any(isinstance(count, int) and count > 1 for count in counts)


def _generators(batches: Any) -> list[Any]:
    """torch's generators that were given to the loader or its sampler."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    generators = [getattr(part, "generator", None) for part in _parts(batches)]
    return list({id(one): one for one in generators if isinstance(one, torch.Generator)}.values())


def _origin(batches: Any) -> dict[str, Any]:
    """The random states that a pass which begins now draws its order from."""
    kept = {"kept_workers": _has_workers(batches), "global": capture_rng()}
    return {**_generator_states(batches), **kept}


def _has_workers(batches: Any) -> bool:
    """Whether a ``DataLoader`` keeps its processes, and so draws no other seed for them."""
    return getattr(batches, "persistent_workers", False) and batches._iterator is not None


def _keep_workers(batches: Any, *, keep: bool) -> None:
    """Start or drop a ``DataLoader``'s processes before it is iterated."""
    if keep and not _has_workers(batches) and getattr(batches, "persistent_workers", False):
        iter(batches)
    elif not keep and _has_workers(batches):
        batches._iterator = None


def _generator_states(batches: Any) -> dict[str, Any]:
    return {"generators": [one.get_state() for one in _generators(batches)]}


def _set_generators(batches: Any, states: Mapping[str, Any]) -> None:
    for one, state in zip(_generators(batches), states["generators"], strict=False):
        one.set_state(state.cpu())


def _length(batch: Any) -> int:
    """The number of samples in a batch: the length of its first part that has one."""
    if isinstance(batch, Mapping | tuple | list):
        values = batch.values() if isinstance(batch, Mapping) else batch
        parts = [value for value in values if _has_length(value)]
        if parts:
            return _length(parts[0])
        return min(1, len(batch)) if isinstance(batch, Mapping) else len(batch)
    return len(batch) if _has_length(batch) else 1


def _has_length(value: Any) -> bool:
    is_single = isinstance(value, str | bytes) or getattr(value, "shape", None) == ()
    return hasattr(value, "__len__") and not is_single
