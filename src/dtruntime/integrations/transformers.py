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
    """Keeps what a ``Trainer`` saves, reports its progress, and obeys requests and notices.

    Each folder that the trainer writes is stored in the background, with digests and one commit;
    files that have not changed are not stored again. It is stored as the trainer made it: the
    library's own files, which it alone reads. Data order and resuming stay the trainer's.

    On SIGTERM, on a drain and on a stop request all ranks save after the same step and end.
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
        """``options`` go to `CheckpointManager`; a coordinator is used as `Run` does."""
        self._member = WorkerSession(
            coordinator_url, job, preemption_file=preemption_file, handle_signals=handle_signals
        )
        self._metrics: dict[str, float] = {}
        if isinstance(checkpoints, CheckpointManager):
            self.checkpoints = checkpoints
        else:
            self.checkpoints = CheckpointManager(checkpoints, **{"incremental": True, **options})

    def restore(self, output_dir: str | os.PathLike[str]) -> str | None:
        """Put the newest checkpoint where the trainer looks for it; its path, if there is one.

        A folder that lies there already and is as new is used as it is.
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

    # What the trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Register."""
        self._member.begin(state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Remember what is logged, for the next report."""
        numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, int | float)}
        self._metrics.update({name: float(value) for name, value in numbers.items()})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report, and pass on what is asked for."""
        wish = self._member.after_step(state.global_step, int(state.epoch or 0), self._metrics)
        control.should_save = control.should_save or wish.save
        control.should_training_stop = control.should_training_stop or wish.stop

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the folder that was just written."""
        step = state.global_step
        self._member.gather(step)
        if self._member.is_first:
            folder = Path(args.output_dir) / f"checkpoint-{step}"
            metrics = {k: v for k, v in self._metrics.items() if k in {"loss", "eval_loss"}}
            epoch = int(state.epoch or 0)
            handle = self.checkpoints.save(read_folder(folder), step, epoch, metrics=metrics)
            if control.should_training_stop:
                handle.wait()
        self._member.saved(step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for what is being stored, and leave."""
        self.checkpoints.wait()
        self._member.end()


FILES = "files"


def read_folder(folder: Path) -> dict[str, Any]:
    """The state of a folder: its files, mapped into memory."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = _mapped(path) if path.stat().st_size else np.empty(0, np.uint8)
    return {FILES: files}


def write_folder(state: Any, folder: Path) -> None:
    """Make a folder of its state; a folder of that name is replaced when everything is there."""
    files = state.get(FILES) if isinstance(state, dict) else None
    if not isinstance(files, dict):
        raise CheckpointDamagedError(f"{folder} cannot be made: the checkpoint is not of a folder")
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
    """Its bytes, which stay readable when the file is deleted."""
    return np.memmap(path, np.uint8, mode="r")


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise CheckpointDamagedError(f"the checkpoint has a file that is to lie outside: {name!r}")
    return path
