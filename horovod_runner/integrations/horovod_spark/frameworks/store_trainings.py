"""Trainings with Horovod's callbacks: they save models and write logs, which go into the store.

The frameworks are imported by the methods: a rank reads this file before the user's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_runner.host.scratch import temporary_folder
from horovod_runner.integrations.horovod_spark.store import copy_to_store
from horovod_runner.integrations.training.keras import KerasTraining
from horovod_runner.integrations.training.lightning import LightningTraining
from horovod_runner.integrations.training.training import Trained
from horovod_runner.worker.api import current_rank

if TYPE_CHECKING:
    from horovod_runner.data.shard import Shard


@dataclass(frozen=True, kw_only=True)
class StoreKerasTraining(KerasTraining):
    """A training of a Keras model; returns the model that the callback saved last, if it did."""

    checkpoint_callback: Any = None  # saves models on rank 0
    logs: str | None = None  # the folder or URL for TensorBoard's logs; None keeps them nowhere

    def train(self, train: Shard, valid: Shard | None) -> Trained | None:
        """See Training."""
        self.use_backend()
        with temporary_folder("keras") as name:
            folder = Path(name)
            # Keras accepts no other endings.
            only_weights = getattr(self.checkpoint_callback, "save_weights_only", False)
            saved = folder / ("checkpoint.weights.h5" if only_weights else "checkpoint.keras")
            callbacks = self._callbacks(folder / "logs", saved)
            trained = KerasTraining.train(replace(self, callbacks=callbacks), train, valid)
            if trained is not None and saved.exists():
                network = self.read_model()
                network.load_weights(str(saved))
                trained = replace(trained, weights=network.get_weights())
            copy_to_store(folder / "logs", self.logs)
            return trained

    def _callbacks(self, logs: Path, saved: Path) -> list[Any]:
        """The callbacks of this rank: those that write do so on rank 0 alone, where they should."""
        import keras

        board_class = keras.callbacks.TensorBoard
        boards = [callback for callback in self.callbacks if isinstance(callback, board_class)]
        others = [callback for callback in self.callbacks if callback not in boards]
        if current_rank() != 0:
            return others
        for board in boards:
            board.log_dir = str(logs)
        if self.checkpoint_callback is None:
            return [*others, *boards]
        self.checkpoint_callback.filepath = str(saved)
        return [*others, *boards, self.checkpoint_callback]


@dataclass(frozen=True, kw_only=True)
class StoreLightningTraining(LightningTraining):
    """A training of a module that may be written for Lightning 1: see lightning_1.py."""

    logs: str | None = None  # as above
    doubles: Sequence[str] = ()  # the columns that stay float64, by name

    def feed(self, shard: Shard, *, is_training: bool) -> dict[str, Any]:
        """See Training."""
        dtypes = dict.fromkeys(self.doubles, "float64")
        return {**super().feed(shard, is_training=is_training), "dtypes": dtypes}

    def train(self, train: Shard, valid: Shard | None) -> Trained | None:
        """See Training; returns the best model if a ModelCheckpoint callback monitors one."""
        from horovod_runner.integrations.horovod_spark.frameworks import lightning_1

        with lightning_1.saver_of(self.callbacks) as saver, lightning_1.logger(self.logs) as logger:
            options = {"logger": logger, **self.trainer_options}
            if saver is not None:
                options.setdefault("enable_checkpointing", True)
            changed = replace(
                self,
                model=lightning_1.with_old_hooks(self.model),
                callbacks=[*self.callbacks, lightning_1.OldHooks(self.callbacks)],
                trainer_options=options,
            )
            trained = LightningTraining.train(changed, train, valid)
            path = "" if saver is None else str(saver.best_model_path)
            # After a restart Lightning restores the path in a folder that is gone.
            if trained is None or not Path(path).is_file():
                return trained
            return replace(trained, weights=lightning_1.weights_in(path, self.model))
