"""One save, from memory to a committed checkpoint."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from ..._background import deadline_after, time_left
from ..._shutdown import shutdown
from ...client import current_orchestrator
from ...errors import StorageError
from ...telemetry import EventLog
from ...telemetry.tracing import NO_SPAN, Span
from ...types import WorkerState, check_seconds, check_whole
from ..file_format.chunks import CHUNK, grouped
from ..file_format.manifest import digest_of
from .pack_writer import Group

log = EventLog("checkpoint")

_END = object()


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint, and what it took."""

    checkpoint_id: str
    step: int
    size_bytes: int
    written_bytes: int
    """What had to be stored; the rest was stored by earlier checkpoints."""
    stall_seconds: float
    """How long `save` kept the caller."""
    durable_seconds: float
    """From the call until it was committed."""


class Remote(Protocol):
    """What brings checkpoints from the local tier to the main storage."""

    def wait_for(self, checkpoint_id: str, timeout: float | None = None) -> None:
        """Wait until a checkpoint is there."""


class SaveHandle:
    """A save that is under way.

    `wait` and ``await`` return when the checkpoint is committed, and raise ``StorageError`` when it
    cannot be. With two tiers that is in the local one; `wait_uploaded` and ``await
    handle.uploaded`` return when it is in the main storage.
    """

    def __init__(
        self,
        step: int,
        checkpoint_id: str = "",
        remote: Remote | None = None,
        span: Span = NO_SPAN,
    ) -> None:
        self.step = step
        self.checkpoint_id = checkpoint_id
        self.future: Future[Saved] = Future()
        self.looked_at = False
        """Whether somebody has been told how it went."""
        self.started = time.perf_counter()
        self.stall_seconds = 0.0
        """How long `save` kept the caller."""
        self._remote = remote
        self.span = span
        """Ends when it is committed or has failed."""

    @property
    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self.future.done()

    @property
    def seconds(self) -> float | None:
        """From the call until it was committed; None while it is not."""
        return saved.durable_seconds if (saved := self._saved) else None

    @property
    def size_bytes(self) -> int | None:
        """How large the state is; None while it is not committed."""
        return saved.size_bytes if (saved := self._saved) else None

    @property
    def bytes_written(self) -> int | None:
        """What had to be stored of it; None while it is not committed."""
        return saved.written_bytes if (saved := self._saved) else None

    @property
    def uploaded(self) -> Awaitable[Saved]:
        """To be awaited: as `wait_uploaded`."""
        return _Uploaded(self)

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait until it is committed; ``TimeoutError`` when it takes longer."""
        try:
            with current_orchestrator.doing(WorkerState.CHECKPOINTING):
                saved = self.future.result(timeout)
        except TimeoutError:
            if not self.future.done():
                raise TimeoutError(
                    f"the checkpoint of step {self.step} is not committed after {timeout} s"
                ) from None
            self.looked_at = True
            raise
        except BaseException:
            self.looked_at = True
            raise
        self.looked_at = True
        return saved

    def wait_uploaded(self, timeout: float | None = None) -> Saved:
        """Wait until it is in the main storage; it is copied there even if it was not due.

        Without a local tier it is there when it is committed. ``StorageError`` when several
        attempts have failed meanwhile; more are made in the background all the same.
        """
        deadline = deadline_after(timeout)
        saved = self.wait(timeout)
        if self._remote is not None:
            self._remote.wait_for(saved.checkpoint_id, time_left(deadline))
        return saved

    @property
    def _saved(self) -> Saved | None:
        if not self.future.done() or self.future.exception() is not None:
            return None
        return self.future.result()

    def __await__(self) -> Generator[Any, None, Saved]:
        self.looked_at = True
        return asyncio.wrap_future(self.future).__await__()


class _Uploaded:
    """Waits for an upload in another thread, when it is awaited."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def __await__(self) -> Generator[Any, None, Saved]:
        return asyncio.to_thread(self._handle.wait_uploaded).__await__()


class LentGroups:
    """Groups whose memory is lent, and has to come back whatever happens."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._lock = threading.Lock()

    def track(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The same groups, taken note of as they come."""
        for group in groups:
            self.add(group)
            yield group

    def add(self, group: Group) -> None:
        """Take note of a group."""
        with self._lock:
            self._groups[group.start] = group

    def done(self, group: Group) -> None:
        """Give back a group's memory, once."""
        with self._lock:
            lent = self._groups.pop(group.start, None)
        if lent is not None:
            lent.done()
            shutdown.moved()

    def done_with_all(self) -> None:
        """Give back everything."""
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            self.done(group)


class GroupQueue:
    """Groups of chunks on their way from the caller to the writer.

    They are kept back until all are copied, or until the memory is needed: to digest and write them
    meanwhile takes bandwidth of memory from the caller, who waits.
    """

    def __init__(self) -> None:
        self._groups: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held: list[Group] | None = []
        self._ended = False

    def put(self, group: Group) -> None:
        """Hand over a group."""
        if self._held is None:
            self._groups.put(group)
        else:
            self._held.append(group)

    def let_go(self) -> None:
        """Keep nothing back any more."""
        held, self._held = self._held or [], None
        for group in held:
            self._groups.put(group)

    def end(self, error: BaseException | None = None) -> None:
        """There are no more, or there cannot be."""
        self.let_go()
        self._groups.put(error if error is not None else _END)

    def __iter__(self) -> Iterator[Group]:
        while not self._ended:
            item = self._groups.get()
            if isinstance(item, Group):
                yield item
                continue
            self._ended = True
            if isinstance(item, BaseException):
                raise item


def groups_of(view: memoryview, *, steady: bool = False) -> Iterator[Group]:
    """Memory that is saved where it lies; ``steady`` says that nobody can change it."""
    bounds = (*range(0, view.nbytes, CHUNK), view.nbytes)
    for group in grouped(bounds):
        yield Group(group[0], group, view[group[0] : group[-1]], steady=steady)


def watched(view: memoryview, groups: Iterator[Group], name: str) -> Iterator[Group]:
    """Groups of memory that its owner could change; raises at the end if that happened."""
    before = []
    for group in groups:
        before.append(digest_of(group.view))
        yield group
    for digest, group in zip(before, groups_of(view), strict=True):
        if digest_of(group.view) != digest:
            raise StorageError(
                f"{name} was changed while it was being saved, and is not committed: do not write "
                "to a buffer before the save's handle is done, or pass bytes"
            )


class JobThread:
    """Runs saves one after the other, in a thread of its own.

    The thread is a daemon: whoever submits a job sees to it that the process does not end before
    that is done.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = name
        self._idle = threading.Condition()
        self._pending = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job behind those that were submitted before.

        ``RuntimeError`` when the interpreter has ended so far that it starts no threads.
        """
        with self._idle:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._pending += 1
        self._jobs.put(job)

    @property
    def is_busy(self) -> bool:
        """Whether something is pending."""
        with self._idle:
            return self._pending > 0

    def close(self) -> None:
        """Let the thread end when everything submitted is done."""
        with self._idle:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as exc:
                # Jobs report what fails; the next save must not wait for a thread that is gone.
                log.error("checkpoint.job_failed", error=repr(exc))
            finally:
                del job  # and what it refers to, while this waits for the next
                shutdown.moved()
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()


class SavePolicy:
    """Every so many steps, or every so many seconds, whichever comes first."""

    def __init__(
        self,
        interval_steps: int | None,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``None``: not by this measure; not by any means never."""
        if interval_steps is not None:
            interval_steps = check_whole("interval_steps", interval_steps, 1)
        if interval_seconds is not None:
            interval_seconds = check_seconds("interval_seconds", interval_seconds)
        self._steps = interval_steps
        self._seconds = interval_seconds
        self._clock = clock
        self._last_time = clock()
        self._last_step = 0

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        if step == self._last_step:
            return False
        if self._steps is not None and step // self._steps > self._last_step // self._steps:
            return True
        return self._seconds is not None and self._clock() - self._last_time >= self._seconds

    def saved(self, step: int) -> None:
        """Note that there is a checkpoint of a step, taken or loaded just now."""
        self._last_step = step
        self._last_time = self._clock()


NEWEST = 0.4
"""How much the newest save counts; those before it share the rest in the same way."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What saves of one kind took, on average."""

    size: float
    written: float
    seconds: float

    def after(self, other: SaveCost) -> SaveCost:
        """The average with one more save."""
        return SaveCost(
            self.size + NEWEST * (other.size - self.size),
            self.written + NEWEST * (other.written - self.written),
            self.seconds + NEWEST * (other.seconds - self.seconds),
        )


class SaveEstimates:
    """How long the next save will take, by what the last ones took.

    Saves that stored everything and saves that stored what had changed are told apart.
    """

    def __init__(self) -> None:
        self._full: SaveCost | None = None
        self._partial: SaveCost | None = None
        self._size = 0
        self._lock = threading.Lock()

    def add(self, size: int, written: int, seconds: float, *, is_full: bool) -> None:
        """Take note of a save of a state of ``size`` bytes, of which some had to be written."""
        pace = SaveCost(size, written, seconds)
        with self._lock:
            self._size = size
            if is_full:
                self._full = self._full.after(pace) if self._full else pace
            else:
                self._partial = self._partial.after(pace) if self._partial else pace

    def seconds(self, *, is_full: bool) -> float | None:
        """How long a save of the last state takes; None when nothing tells."""
        with self._lock:
            if not is_full and self._partial is not None:
                return _scaled(self._partial, self._size, self._partial.size)
            if self._full is not None:
                return _scaled(self._full, self._size, self._full.size)
            if self._partial is not None and self._partial.written:
                # Rather too long: in that time the rest was compared, too.
                return _scaled(self._partial, self._size, self._partial.written)
            return None


def _scaled(pace: SaveCost, size: int, measured: float) -> float:
    return pace.seconds * size / measured if measured else pace.seconds
