"""``Trainer.fit`` on one rank."""

from __future__ import annotations

import copy
from typing import Any, Final

import horovod.torch as hvd

from horovod_runner.data.feed.fields import flat_names
from horovod_runner.data.shard import Shard
from horovod_runner.integrations.lightning import (
    HorovodStrategy,
    ReportCallback,
    framework,
    resume_from,
)
from horovod_runner.integrations.training import batch_norm
from horovod_runner.integrations.training.lightning import LightningTraining
from horovod_runner.integrations.training.torch_loop import weights_of
from horovod_runner.integrations.training.training import Trained, paired

_PRECISIONS: Final = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


def train(training: LightningTraining, train: Shard, valid: Shard | None) -> Trained | None:
    """Train a Lightning module on this rank; see Training.train."""
    hvd.init()
    framework.seed_everything(training.random_seed + hvd.rank(), verbose=False)
    batches = _feed(training, train, is_training=True)
    checks = None if valid is None else _feed(training, valid, is_training=False)
    reports = _Reports(save_every=int(training.saves), save_steps=training.save_every or 0)
    callbacks: list[Any] = [reports]
    if training.patience is not None:
        name, mode = training.monitor
        stop = framework.callbacks.EarlyStopping
        callbacks.append(stop(name, patience=training.patience, mode=mode))
    if hvd.size() > 1:
        rows = batch_norm.CountedRows()
        if training.syncs_batch_norm:
            rows = batch_norm.synchronize(training.model)
        counted = _CountedRows(rows, batches, checks)
        _log_means_over_ranks(training.model, counted)
        callbacks.append(counted)
    further = training.trainer_options.get("callbacks") or []
    trainer = framework.Trainer(
        **{
            "strategy": HorovodStrategy(),
            "max_epochs": training.epochs,
            "limit_train_batches": training.train_steps_per_epoch,
            "limit_val_batches": training.validation_steps_per_epoch,
            "accumulate_grad_batches": training.backward_passes_per_step,
            "gradient_clip_val": training.clip_norm,
            "precision": _PRECISIONS[training.precision],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **training.trainer_options,
            "callbacks": [
                *training.callbacks,
                *(further if isinstance(further, list) else [further]),
                *callbacks,
            ],
        }
    )
    trainer.fit(training.model, batches, checks, ckpt_path=resume_from())
    if hvd.rank():
        return None
    return Trained(weights_of(training.model), reports.history)


def _feed(training: LightningTraining, shard: Shard, *, is_training: bool) -> Any:
    """Batches of (inputs, labels), or dicts by column where inputs and labels have no names."""
    options = training.feed(shard, is_training=is_training)
    if not training.pairs:
        flat = dict.fromkeys(flat_names(training.columns.values()))
        return shard.to_torch(**{**options, "columns": list(flat) or None})
    before = options.get("transform")

    def pair(batch: dict[str, Any]) -> tuple[Any, Any]:
        changed = batch if before is None else before(batch)
        inputs, labels, _ = training.split_parts(list(changed.values()))
        return paired(inputs, labels)

    if len(training.features) > 1 or len(training.labels) > 1:
        options["transform"] = pair
    return shard.to_torch(**options)


def _log_means_over_ranks(module: Any, counted: _CountedRows) -> None:
    """Let ``self.log`` average the metrics of an epoch over the rows of all ranks.

    Also without sync_dist, which ``self.log_dict`` always sets. A rank without rows in a batch
    computes with a row that does not count. A metric that is logged between two batches, as in
    ``on_train_epoch_end``, is one of the epoch.
    """
    plain = module.log

    def log(name: str, value: Any, *args: Any, **options: Any) -> Any:
        is_of_epoch = options.get("on_epoch")
        if is_of_epoch or (is_of_epoch is None and not counted.is_step):
            options["sync_dist"] = not options.get("rank_zero_only")
        if not counted.rows.count:
            options["batch_size"] = 0
        return plain(name, value, *args, **options)

    module.log = log


class _CountedRows(framework.Callback):  # type: ignore[misc]
    """Tells batch normalization and metrics whether a rank has rows in a batch."""

    def __init__(self, rows: batch_norm.CountedRows, batches: Any, checks: Any) -> None:
        self.rows = rows
        self.is_step = False  # whether a batch is under way that is trained with
        self._batches = batches
        self._checks = checks
        self._states: list[tuple[Any, dict[str, Any]]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.is_step = True
        self._begin(pl_module, self._batches.real_rows(batch_idx))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin(pl_module, self._checks.real_rows(batch_idx))

    def _begin(self, module: Any, count: int) -> None:
        self.rows.count = count > 0
        if not count:  # a row that does not count must not stay in the states of torchmetrics
            metrics = [each for each in module.modules() if hasattr(each, "metric_state")]
            self._states = [(each, copy.deepcopy(each.metric_state)) for each in metrics]

    def on_train_batch_end(self, *_: Any) -> None:
        self.is_step = False
        self.rows.count = True  # what is logged at the end of an epoch counts
        for metric, state in self._states:
            for name, value in state.items():
                setattr(metric, name, value)
        self._states = []

    on_validation_batch_end = on_train_batch_end


class _Reports(ReportCallback):
    """Keeps the logged metrics of each epoch, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.history: dict[str, list[float]] = {}

    def _end_epoch(self, trainer: Any, pl_module: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            self.history.setdefault(name, []).append(float(value))
        super()._end_epoch(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = state["history"]
