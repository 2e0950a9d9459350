"""Iterations of a loader, of which only the newest goes on: there is one position to keep."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any, Protocol, Self, TypeVar, cast

from ..errors import StrataError, without_frames

T = TypeVar("T")
_END = object()


class Closeable(Protocol):
    """Something that an iteration uses."""

    def close(self) -> None:
        """Stop it."""


C = TypeVar("C", bound=Closeable)


class IterationWatch(Protocol):
    """Is told what iterations do with the time of the program."""

    def fetching(self) -> AbstractContextManager[None]:
        """A block in which a batch is waited for."""

    def handed_out(self, epoch: int, samples: int) -> None:
        """The program got a batch of an epoch."""

    def ended(self, epoch: int) -> None:
        """There are no more batches of an epoch."""


class Unwatched:
    """Nobody is told."""

    def fetching(self) -> AbstractContextManager[None]:
        """Nothing happens."""
        return nullcontext()

    def handed_out(self, epoch: int, samples: int) -> None:
        """Nothing happens."""

    def ended(self, epoch: int) -> None:
        """Nothing happens."""


class Iteration:
    """One iteration, and what it uses until it ends."""

    def __init__(self, watch: IterationWatch) -> None:
        self._watch = watch
        self._used = ExitStack()
        self._process = os.getpid()
        self._is_over = False

    def uses(self, part: C) -> C:
        """Close ``part`` when the iteration ends."""
        return self._used.enter_context(closing(part))

    def through(self, items: Iterable[T]) -> Iterator[T]:
        """The items, as long as this is the iteration that goes on.

        Errors of our own come without the frames of the threads and generators that they passed.
        """
        try:
            with closing(_generated(items)) as made:
                while True:
                    with self._watch.fetching():
                        item = next(made, _END)
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
                "this iteration has ended: meanwhile its loader was iterated anew, closed, or "
                "sent to another epoch or state. Go on with a new one, iter(loader): it begins "
                "where the loader is"
            )

    def end(self) -> None:
        """Close what it uses; what a process that forked this one uses is not ours to close."""
        self._is_over = True
        if self._process == os.getpid():
            self._used.close()


class LoaderBase:
    """What all loaders have: one iteration at a time, and who watches it.

    Sent to another process, a loader has neither there.
    """

    def __init__(self) -> None:
        self._iteration: Iteration | None = None
        self._watch: IterationWatch = Unwatched()

    def watched_by(self, watch: IterationWatch) -> Self:
        """Tell ``watch`` when the program waits for a batch, gets one, and has got all."""
        self._watch = watch
        return self

    def close(self) -> None:
        """End the iteration that is going on, and stop reading ahead."""
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
        """An iteration, which ends the one before it."""
        self.close()
        iteration = self._iteration = Iteration(self._watch)
        try:
            yield iteration
        finally:
            iteration.end()


def _generated(items: Iterable[T]) -> Generator[T, None, None]:
    """The items as something that can be closed."""
    yield from items
