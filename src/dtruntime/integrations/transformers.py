"""Hugging Face ``Trainer``: `StrataCallback`.

::

    strata = StrataCallback("s3://bucket/run", keep_count=3)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[strata])
    trainer.train(resume_from_checkpoint=strata.restore(arguments.output_dir))
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoint import CheckpointManager
from ..telemetry import EventLog
from .folders import read_folder, write_folder
from .worker_session import Member

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
        self._member = Member(
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
