"""PyTorch Lightning: `StrataCheckpointIO` and `StrataCallback`.

::

    storage = StrataCheckpointIO("s3://bucket/run")
    trainer = Trainer(plugins=[storage], callbacks=[ModelCheckpoint(...), StrataCallback()])
    trainer.fit(model, ckpt_path=storage.newest())
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.plugins.io import CheckpointIO

from ..checkpoint import CheckpointManager
from ..errors import CheckpointNotFoundError
from .worker_session import WorkerSession

_ALL = 1_000_000
"""Retention is left to Lightning's own callbacks."""


class StrataCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Stores Lightning's checkpoints in the background, with digests and without pickle.

    Lightning's names are kept; the files are Strata's. Saving returns once the state has been
    copied. Values that would need pickle are refused by name.
    """

    def __init__(
        self, checkpoints: str | os.PathLike[str] | CheckpointManager, **options: Any
    ) -> None:
        """``options`` go to `CheckpointManager`."""
        if isinstance(checkpoints, CheckpointManager):
            self.checkpoints = checkpoints
        else:
            self.checkpoints = CheckpointManager(checkpoints, **{"keep_count": _ALL, **options})

    def newest(self) -> str | None:
        """The ``ckpt_path`` for ``fit`` that resumes training; None at the first start."""
        newest = self.checkpoints.latest()
        return None if newest is None else newest.metadata.get("name", str(newest.step))

    # Called by Lightning

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Start storing a checkpoint."""
        step, epoch = int(checkpoint.get("global_step", 0)), int(checkpoint.get("epoch", 0))
        self.checkpoints.save(checkpoint, step, epoch, metadata={"name": _name(path)})

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint by the name it was saved under."""
        where = None if callable(map_location) else map_location
        engine = self.checkpoints.engine
        loaded: dict[str, Any] = engine.load(
            self._id(_name(path)), lambda copy: engine.loader.state_of(copy, where, None)
        )
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, and the chunks that only it needs."""
        name = _name(path)
        engine = self.checkpoints.engine

        def drop() -> None:
            catalog = engine.store.catalog
            named = [e for e, m in catalog.readable() if m.metadata.get("name") == name]
            catalog.drop(named)
            catalog.point_to_newest()
            engine.cleanup.clean()

        engine.run_after_saves(drop)

    def teardown(self) -> None:
        """Wait for saves under way."""
        self.checkpoints.wait()

    def _id(self, name: str) -> str:
        """The id of the newest checkpoint of a name; a step may be saved under several names."""
        for info in reversed(self.checkpoints.checkpoints()):
            if info.metadata.get("name", str(info.step)) == name:
                return info.checkpoint_id
        raise CheckpointNotFoundError(f"there is no checkpoint named {name!r}")


class StrataCallback(Callback):  # type: ignore[misc]
    """Reports a trainer's progress, and acts on requests and preemption notices.

    On SIGTERM, a drain or a stop request, all ranks save after the same batch and end.
    """

    def __init__(
        self,
        *,
        coordinator_url: str | None = None,
        job: str | None = None,
        preemption_file: str | os.PathLike[str] | None = None,
        handle_signals: bool = True,
    ) -> None:
        self._session = WorkerSession(
            coordinator_url, job, preemption_file=preemption_file, handle_signals=handle_signals
        )
        self._began = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register."""
        self._session.begin(trainer.global_step)
        self._began = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the batch, then save or stop if requested."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        request = self._session.after_step(trainer.global_step, trainer.current_epoch, metrics)
        if request.save:
            folder = trainer.default_root_dir
            trainer.save_checkpoint(os.path.join(folder, f"asked-step={trainer.global_step}.ckpt"))
            self._session.saved(trainer.global_step)
        if request.stop:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the job."""
        self._end("")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the job, and say why."""
        self._end(f"failed: {type(exception).__name__}")

    def _end(self, reason: str) -> None:
        if self._began:
            self._began = False
            self._session.end(reason)


def _name(path: Any) -> str:
    return PurePath(os.fspath(path)).name
