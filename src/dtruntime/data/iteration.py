"""Iterations of a loader: only the newest one is valid, because a loader has one position."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any, Protocol, Self, TypeVar, cast

from ..errors import StrataError, without_frames

T = TypeVar("T")
_END = object()


class Closeable(Protocol):
    """A resource of an iteration."""

    def close(self) -> None:
        """Release it."""


C = TypeVar("C", bound=Closeable)


class IterationWatch(Protocol):
    """Observes iterations."""

    def fetching(self) -> AbstractContextManager[None]:
        """A block during which the program waits for a batch."""
        return nullcontext()

    def handed_out(self, epoch: int, samples: int) -> None:
        """The program got a batch."""
        return

    def ended(self, epoch: int) -> None:
        """The program got the last batch of an epoch."""
        return


class Unwatched(IterationWatch):
    """Ignores everything."""


class Iteration:
    """One iteration, and the resources that it uses until it ends."""

    def __init__(self, watch: IterationWatch) -> None:
        self._watch = watch
        self._used = ExitStack()
        self._process = os.getpid()
        self._is_over = False

    def uses(self, resource: C) -> C:
        """Close a resource when the iteration ends."""
        return self._used.enter_context(closing(resource))

    def through(self, items: Iterable[T]) -> Iterator[T]:
        """The items, while this is the newest iteration.

        Strata's own errors are raised without the frames of threads and generators they passed.
        """
        try:
            with closing(item for item in items) as generator:
                while True:
                    with self._watch.fetching():
                        item = next(generator, _END)
                    if item is _END:
                        break
                    yield cast("T", item)
                    self.check()
        except StrataError as exc:
            raise without_frames(exc)  # noqa: B904 - it is the same error
        self.check()

    def check(self) -> None:
        """Raise ``RuntimeError`` when it has ended."""
        if self._is_over:
            raise RuntimeError(
                "this iteration has ended: its loader was iterated again, closed, or moved to "
                "another epoch or state. Start a new one with iter(loader): it continues at the "
                "loader's position"
            )

    def end(self) -> None:
        """Close its resources, unless they belong to the process that this one was forked from."""
        self._is_over = True
        if self._process == os.getpid():
            self._used.close()


class LoaderBase:
    """What all loaders have: one iteration at a time, and an observer of it.

    A loader that is sent to another process loses both.
    """

    def __init__(self) -> None:
        self._iteration: Iteration | None = None
        self._watch: IterationWatch = Unwatched()

    def watched_by(self, watch: IterationWatch) -> Self:
        """Notify ``watch`` when the program waits for a batch, gets one, and ends an epoch."""
        self._watch = watch
        return self

    def close(self) -> None:
        """End the current iteration, and stop prefetching."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None, "_watch": Unwatched()}

    @contextmanager
    def _begin(self) -> Iterator[Iteration]:
        """Begin an iteration, which ends the previous one."""
        self.close()
        iteration = self._iteration = Iteration(self._watch)
        try:
            yield iteration
        finally:
            iteration.end()
