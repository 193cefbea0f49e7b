"""The function that the ranks of a LightningEstimator run: ``Trainer.fit``."""

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
from horovod_runner.integrations.spark_ml.plan import Trained, TrainingPlan
from horovod_runner.integrations.spark_ml.torch_training import weights_of


def train(
    *,
    plan: TrainingPlan,
    model: Any,
    trainer_options: dict[str, Any],
    train: Shard,
    valid: Shard | None = None,
) -> Trained | None:
    """Train a Lightning module on this rank.

    Args:
        plan: how.
        model: the module.
        trainer_options: further arguments of ``Trainer``.
        train: the rows to train with.
        valid: the rows to validate with.

    Returns:
        The trained weights, on rank 0; None on other ranks.
    """
    hvd.init()
    framework.seed_everything(plan.seed + hvd.rank(), verbose=False)
    columns = list(dict.fromkeys(flat_names(plan.columns.values())))
    options: dict[str, Any] = {**plan.options, "columns": columns, "seed": plan.seed}
    batches = train.to_torch(plan.batch_size, shuffle=plan.shuffle, **options)
    checks = None if valid is None else valid.to_torch(plan.val_batch_size, **options)
    record = _History()
    trainer = framework.Trainer(
        **{
            "strategy": HorovodStrategy(),
            "max_epochs": plan.epochs,
            "limit_train_batches": plan.steps,
            "limit_val_batches": plan.val_steps,
            "accumulate_grad_batches": plan.backward_passes,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **trainer_options,
            "callbacks": [*plan.callbacks, record, ReportCallback(save_every=int(plan.saves))],
        }
    )
    trainer.fit(model, batches, checks, ckpt_path=resume_from())
    if hvd.rank():
        return None
    return Trained(weights_of(model), record.history)


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
