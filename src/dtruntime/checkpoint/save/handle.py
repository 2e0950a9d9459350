"""Saves under way: requests, handles, the thread that runs them, and how long they take."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..._background import deadline_after, time_left
from ..._shutdown import shutdown
from ...client import current_orchestrator
from ...errors import StorageError
from ...telemetry import EventLog, tracing
from ...types import WorkerState, check_seconds, check_whole

if TYPE_CHECKING:
    from ..upload.uploader import Uploader
    from .commit import CheckpointCoordinator

log = EventLog("checkpoint")

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the caller says about a checkpoint."""

    step: int
    epoch: int
    is_full: bool
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    coordinator: CheckpointCoordinator | None = None
    """The coordinator at the time of the call, which the checkpoint is committed through."""
    began: float = field(default_factory=time.perf_counter, compare=False)
    """When the save was called, by ``time.perf_counter``."""


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


def check_named(what: str, given: Any, kind: Callable[[Any], R]) -> dict[str, R]:
    """Metrics or metadata: a dict whose values are of one kind, and can be stored."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a dict, not {type(given).__name__}")
    checked = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise TypeError(f"names in {what} must be str, not {name!r:.80}")
        checked[name] = kind(value)
        try:
            f"{name}{checked[name]}".encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{what} {name!r:.80} is not text that can be stored as UTF-8"
            ) from None
    return checked


class SaveHandle:
    """A save that is under way.

    `wait` and ``await`` return when the checkpoint is committed, and raise ``StorageError`` when it
    cannot be. With two tiers that is in the local one; `wait_uploaded` and ``await
    handle.uploaded`` return when it is in the main storage.
    """

    def __init__(
        self,
        request: SaveRequest,
        checkpoint_id: str = "",
        wait_for_upload: Callable[[str, float | None], None] | None = None,
    ) -> None:
        self.request = request
        self.step = request.step
        self.checkpoint_id = checkpoint_id
        self.future: Future[Saved] = Future()
        self.looked_at = False
        """Whether somebody has seen the outcome."""
        self.started = time.perf_counter()
        self.stall_seconds = 0.0
        """How long `save` kept the caller."""
        self._wait_for_upload = wait_for_upload
        self.span = _span(request) if tracing.is_on() else tracing.NO_SPAN
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
        if self._wait_for_upload is not None:
            self._wait_for_upload(saved.checkpoint_id, time_left(deadline))
        return saved

    @contextmanager
    def staging(self) -> Iterator[None]:
        """The part of a save that keeps the caller; what fails here ends the save."""
        try:
            with (
                current_orchestrator.doing(WorkerState.CHECKPOINTING),
                self.span.current(),
                tracing.span("save.stage", step=self.step),
            ):
                yield
        except BaseException as exc:
            self.span.fail(exc)
            self.span.end()
            raise

    def end_span(self, size: int, written: int) -> None:
        """Record that it is committed."""
        self.span.set(checkpoint_id=self.checkpoint_id, size_bytes=size, written_bytes=written)
        self.span.end()

    @property
    def _saved(self) -> Saved | None:
        if not self.future.done() or self.future.exception() is not None:
            return None
        return self.future.result()

    def __await__(self) -> Generator[Any, None, Saved]:
        self.looked_at = True
        return asyncio.wrap_future(self.future).__await__()


def _span(request: SaveRequest) -> tracing.Span:
    """The span of a save, with the identity of the worker."""
    worker = current_orchestrator.current()
    identity = {} if worker is None or not worker.is_registered else worker.described()
    return tracing.span(
        "save", step=request.step, epoch=request.epoch, is_full=request.is_full, **identity
    )


class _Uploaded:
    """Waits for an upload in another thread, when it is awaited."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def __await__(self) -> Generator[Any, None, Saved]:
        return asyncio.to_thread(self._handle.wait_uploaded).__await__()


class JobThread:
    """Runs jobs one after the other, in a thread of its own.

    The thread is a daemon: whoever submits a job sees to it that the process does not end before
    that is done.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | _LastJob | None] = queue.SimpleQueue()
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
    def is_started(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running or waiting."""
        with self._idle:
            return self._pending > 0

    def close(self) -> None:
        """Let the thread end when everything submitted is done."""
        with self._idle:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def end_with(self, job: Callable[[], None]) -> None:
        """Let a started thread end with a job, without waiting.

        It takes no lock, so that the garbage collector may call it wherever it runs.
        """
        self._jobs.put(_LastJob(job))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _LastJob):
                _attempt(job.job)
                return
            _attempt(job)
            del job  # and what it refers to, while this waits for the next
            shutdown.moved()
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()


@dataclass(frozen=True, slots=True)
class _LastJob:
    job: Callable[[], None]


def _attempt(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception as exc:
        # Jobs report their own failures; the next one must not wait for a thread that is gone.
        log.error("checkpoint.job_failed", error=repr(exc))


class SaveQueue:
    """The saves under way of one engine: its thread, their handles, and the uploads that follow.

    While something is under way, or has failed unseen, `shutdown` holds it as work that has to be
    finished before the process ends, whether or not anybody else has it.
    """

    def __init__(self, url: str, uploads: Uploader | None, exit_seconds: float) -> None:
        self.url = url
        self.exit_seconds = exit_seconds
        self._uploads = uploads
        self._not_uploaded: list[str] = []
        self._thread = JobThread("strata-save")
        self._handles: list[SaveHandle] = []
        self._lock = threading.Lock()
        if uploads is not None:
            uploads.on_busy = _holding(self)

    @property
    def is_used(self) -> bool:
        """Whether a save has been submitted."""
        return self._thread.is_started

    def check_accepted(self, step: int) -> None:
        """Raise ``StorageError`` when the process is ending, and cannot finish a save."""
        if why := shutdown.refusal():
            self._refuse(step, why)

    def add(self, handle: SaveHandle, job: Callable[[], None]) -> None:
        """Run the background part of a save behind those that are under way."""
        with self._lock:
            self._handles = [h for h in self._handles if not (h.done and h.looked_at)]
            self._handles.append(handle)
        try:
            self._submit(job)
        except RuntimeError as exc:
            handle.looked_at = True
            self._refuse(handle.step, f"the program has ended ({exc}): save before that")

    def run(self, job: Callable[[], R]) -> Future[R]:
        """Run any job behind the saves that are under way."""
        # The thread must keep nothing of the caller's alive afterwards.
        jobs, outcome = [job], Future[R]()

        def run() -> None:
            try:
                outcome.set_result(jobs.pop()())
            except BaseException as exc:
                outcome.set_exception(exc)

        self._submit(run)
        return outcome

    @contextmanager
    def listed(self, handle: SaveHandle) -> Iterator[None]:
        """List a save whose caller waits for it, and so sees the outcome."""
        handle.looked_at = True
        with self._lock:
            self._handles.append(handle)
        try:
            yield
        finally:
            with self._lock:
                self._handles.remove(handle)

    def wait_for_saves(self, timeout: float | None = None) -> bool:
        """Wait until no save is under way; whether that is so."""
        with current_orchestrator.doing(WorkerState.CHECKPOINTING):
            return self._thread.wait(timeout)

    def raise_failure(self) -> None:
        """Raise the error of a save that failed and that nobody looked at."""
        for handle in self._unseen():
            handle.wait()

    def close(self) -> None:
        """Wait for the saves, and end the thread."""
        self._thread.close()

    def end_with(self, job: Callable[[], None]) -> None:
        """Let the thread end with a job, without waiting and without a lock."""
        self._thread.end_with(job)

    @property
    def is_busy(self) -> bool:
        """Whether a save or an upload is under way."""
        return self._thread.is_busy or (self._uploads is not None and self._uploads.is_busy)

    @property
    def is_needed(self) -> bool:
        """Whether something is under way, has failed unseen, or is to be uploaded at the end."""
        left = self._uploads is not None and self._uploads.is_needed
        return left or self.is_busy or bool(self._unseen())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is under way; whether that is so."""
        deadline = deadline_after(timeout)
        if not self._thread.wait(timeout):
            return False
        return self._uploads is None or self._uploads.idle(time_left(deadline))

    def finish(self) -> None:
        """Wait for the saves, and bring the newest checkpoint to the main storage."""
        self._thread.wait()
        if self._uploads is None or not self._uploads.is_needed:
            return
        try:
            self._uploads.flush()
        except Exception as exc:
            self._not_uploaded.append(str(exc))
            log.error("checkpoint.not_uploaded", place=self.url, reason=str(exc))
            self._uploads.give_up()

    def unfinished(self) -> list[str]:
        """What is under way."""
        with self._lock:
            saves = [handle.step for handle in self._handles if not handle.done]
        uploads = self._uploads.steps() if self._uploads is not None else []
        return [f"the checkpoint of step {step} in {self.url}" for step in saves] + [
            f"the upload of the checkpoint of step {step}" for step in uploads
        ]

    def failures(self) -> list[str]:
        """What has failed, and nobody has seen."""
        sentences = []
        for handle in self._unseen():
            handle.looked_at = True
            sentences.append(self._not_stored(handle.step, handle.future.exception()))
        uploads, self._not_uploaded = self._not_uploaded, []
        return sentences + uploads

    def _unseen(self) -> list[SaveHandle]:
        with self._lock:
            ended = [handle for handle in self._handles if handle.done and not handle.looked_at]
        return [handle for handle in ended if handle.future.exception() is not None]

    def _submit(self, job: Callable[[], None]) -> None:
        self._thread.submit(job)
        shutdown.hold(self)

    def _refuse(self, step: int, why: str) -> NoReturn:
        sentence = self._not_stored(step, why)
        shutdown.lose(sentence)
        raise StorageError(sentence)

    def _not_stored(self, step: int, why: object) -> str:
        return f"the checkpoint of step {step} is not in {self.url}: {why}"


def _holding(saves: SaveQueue) -> Callable[[], None]:
    """A function that makes `shutdown` hold a queue, without keeping the queue alive itself."""
    reference = weakref.ref(saves)

    def hold() -> None:
        if (alive := reference()) is not None:
            shutdown.hold(alive)

    return hold


class SavePolicy:
    """Every so many steps, or every so many seconds, whichever comes first."""

    def __init__(
        self,
        interval_steps: int | None,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``None`` switches a measure off; without either, nothing is ever due."""
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
"""The weight of the newest save in a moving average."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Moving averages over saves of one kind."""

    size: float
    written: float
    seconds: float

    def after(self, other: SaveCost) -> SaveCost:
        """The averages with one more save."""
        return SaveCost(
            self.size + NEWEST * (other.size - self.size),
            self.written + NEWEST * (other.written - self.written),
            self.seconds + NEWEST * (other.seconds - self.seconds),
        )


class SaveEstimates:
    """How long the next save will take, by what the last ones took.

    Full saves and saves of what had changed are averaged apart.
    """

    def __init__(self) -> None:
        self._full: SaveCost | None = None
        self._partial: SaveCost | None = None
        self._size = 0
        self._lock = threading.Lock()

    def add(self, size: int, written: int, seconds: float, *, is_full: bool) -> None:
        """Count a save of a state of ``size`` bytes, of which some had to be written."""
        cost = SaveCost(size, written, seconds)
        with self._lock:
            self._size = size
            if is_full:
                self._full = self._full.after(cost) if self._full else cost
            else:
                self._partial = self._partial.after(cost) if self._partial else cost

    def seconds(self, *, is_full: bool) -> float | None:
        """The estimate for a state as large as the last; None before the first save."""
        with self._lock:
            if not is_full and self._partial is not None:
                return _scaled(self._partial, self._size, self._partial.size)
            if self._full is not None:
                return _scaled(self._full, self._size, self._full.size)
            if self._partial is not None and self._partial.written:
                # An upper bound: that time includes comparing the rest.
                return _scaled(self._partial, self._size, self._partial.written)
            return None


def _scaled(cost: SaveCost, size: int, measured: float) -> float:
    return cost.seconds * size / measured if measured else cost.seconds
