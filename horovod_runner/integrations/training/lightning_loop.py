"""``Trainer.fit`` on one rank."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd

from horovod_runner.data.feed.fields import flat_names
from horovod_runner.data.shard import Shard
from horovod_runner.integrations.lightning import (
    HorovodStrategy,
    ReportCallback,
    framework,
    resume_from,
)
from horovod_runner.integrations.training.lightning import LightningTraining
from horovod_runner.integrations.training.torch_loop import weights_of
from horovod_runner.integrations.training.training import Trained


def train(training: LightningTraining, train: Shard, valid: Shard | None) -> Trained | None:
    """Train a Lightning module on this rank; see Training.train."""
    hvd.init()
    framework.seed_everything(training.random_seed + hvd.rank(), verbose=False)
    columns = {"columns": list(dict.fromkeys(flat_names(training.columns.values())))}
    batches = train.to_torch(**{**training.feed(is_training=True), **columns})
    checks = None
    if valid is not None:
        checks = valid.to_torch(**{**training.feed(is_training=False), **columns})
    record = _History()
    trainer = framework.Trainer(
        **{
            "strategy": HorovodStrategy(),
            "max_epochs": training.epochs,
            "limit_train_batches": training.train_steps_per_epoch,
            "limit_val_batches": training.validation_steps_per_epoch,
            "accumulate_grad_batches": training.backward_passes_per_step,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **training.trainer_options,
            "callbacks": [
                *training.callbacks,
                record,
                ReportCallback(save_every=int(training.saves)),
            ],
        }
    )
    trainer.fit(training.model, batches, checks, ckpt_path=resume_from())
    if hvd.rank():
        return None
    return Trained(weights_of(training.model), record.history)


class _History(framework.Callback):  # type: ignore[misc]
    """Keeps the logged metrics of each epoch."""

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """As in Lightning's Callback."""
        for name, value in trainer.callback_metrics.items():
            self.history.setdefault(name, []).append(float(value))

    def state_dict(self) -> dict[str, Any]:
        """The history, for checkpoints."""
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the history of a checkpoint."""
        self.history = state["history"]
