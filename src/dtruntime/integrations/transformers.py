"""Hugging Face ``Trainer``: `StrataCallback`.

::

    strata = StrataCallback("s3://bucket/run", keep_count=3)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[strata])
    trainer.train(resume_from_checkpoint=strata.restore(arguments.output_dir))
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoint import CheckpointManager
from ..errors import CheckpointDamagedError
from ..telemetry import EventLog
from .worker_session import WorkerSession

log = EventLog("run")


class StrataCallback(TrainerCallback):  # type: ignore[misc]
    """Stores a ``Trainer``'s checkpoints, reports its progress, and acts on requests and notices.

    Each checkpoint folder that the trainer writes is stored as it is, in the background, with
    digests; files that have not changed are not stored again. Data order and resuming stay the
    trainer's business.

    On SIGTERM, a drain or a stop request, all ranks save after the same step and end.
    """

    def __init__(
        self,
        checkpoints: str | os.PathLike[str] | CheckpointManager,
        *,
        coordinator_url: str | None = None,
        job: str | None = None,
        preemption_file: str | os.PathLike[str] | None = None,
        handle_signals: bool = True,
        **options: Any,
    ) -> None:
        """``options`` go to `CheckpointManager`; a coordinator is found as by `Run`."""
        self._session = WorkerSession(
            coordinator_url, job, preemption_file=preemption_file, handle_signals=handle_signals
        )
        self._metrics: dict[str, float] = {}
        if isinstance(checkpoints, CheckpointManager):
            self.checkpoints = checkpoints
        else:
            self.checkpoints = CheckpointManager(checkpoints, **{"incremental": True, **options})

    def restore(self, output_dir: str | os.PathLike[str]) -> str | None:
        """Put the newest checkpoint where the trainer looks for it; returns its path, or None.

        A folder that is already there and as new is used as it is.
        """
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        there: str | None = get_last_checkpoint(str(folder))
        newest = self.checkpoints.latest()
        if newest is None or (there and int(there.rpartition("-")[2]) >= newest.step):
            return there
        place = folder / f"checkpoint-{newest.step}"
        write_folder(self.checkpoints.load_state(newest.step), place)
        log.info("run.restored", step=newest.step, folder=str(place))
        return str(place)

    # Called by the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Register."""
        self._session.begin(state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep logged metrics for the next report."""
        numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, int | float)}
        self._metrics.update({name: float(value) for name, value in numbers.items()})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and pass on requests to save or stop."""
        request = self._session.after_step(state.global_step, int(state.epoch or 0), self._metrics)
        control.should_save = control.should_save or request.save
        control.should_training_stop = control.should_training_stop or request.stop

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the folder that was just written."""
        step = state.global_step
        self._session.gather(step)
        if self._session.is_first:
            folder = Path(args.output_dir) / f"checkpoint-{step}"
            metrics = {k: v for k, v in self._metrics.items() if k in {"loss", "eval_loss"}}
            epoch = int(state.epoch or 0)
            handle = self.checkpoints.save(read_folder(folder), step, epoch, metrics=metrics)
            if control.should_training_stop:
                handle.wait()
        self._session.saved(step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for saves under way, and leave the job."""
        self.checkpoints.wait()
        self._session.end()


FILES = "files"


def read_folder(folder: Path) -> dict[str, Any]:
    """A folder as a state dict: its files, mapped into memory."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = _mapped(path) if path.stat().st_size else np.empty(0, np.uint8)
    return {FILES: files}


def write_folder(state: Any, folder: Path) -> None:
    """Write a folder from its state dict; an existing one is replaced once all is written."""
    files = state.get(FILES) if isinstance(state, dict) else None
    if not isinstance(files, dict):
        raise CheckpointDamagedError(f"{folder} cannot be written: the checkpoint holds no folder")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, content in files.items():
        path = unfinished / _checked(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(memoryview(content))
            file.flush()
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _mapped(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The file's bytes, which stay readable when it is deleted."""
    return np.memmap(path, np.uint8, mode="r")


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise CheckpointDamagedError(f"the checkpoint has a file outside of its folder: {name!r}")
    return path
