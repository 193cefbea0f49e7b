"""The function that the ranks of a KerasEstimator run: ``model.fit`` on Keras 3."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from horovod_runner.data.scoring.models.keras import input_names, read_model
from horovod_runner.data.shard import Shard
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.integrations.spark_ml.plan import Trained, TrainingPlan


def set_seed(seed: int) -> None:
    """Seed what Keras draws from: Python's random numbers, NumPy's and those of its backend.

    ``keras.utils.set_random_seed`` imports TensorFlow wherever it is installed (Keras 3.15,
    utils/rng_utils.py), which costs a rank on torch 3 s of a core.
    """
    import keras

    if keras.backend.backend() != "torch":
        keras.utils.set_random_seed(seed)
        return
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(
    *,
    plan: TrainingPlan,
    model: bytes,
    backend: str,
    compiled: dict[str, Any],
    train: Shard,
    valid: Shard | None = None,
) -> Trained | None:
    """Train a Keras model on this rank.

    Args:
        plan: how.
        model: the content of a file of KerasKind.
        backend: Keras's backend.
        compiled: the arguments of ``model.compile``: optimizer, loss, metrics, as Keras's configs.
        train: the rows to train with.
        valid: the rows to validate with.

    Returns:
        The trained weights, on rank 0; None on other ranks.
    """
    os.environ.setdefault("KERAS_BACKEND", backend)
    import keras

    import horovod_runner.integrations.keras as hvd

    hvd.init()
    set_seed(plan.seed + hvd.rank())  # ranks drop out different units
    with temporary_folder("keras") as folder:
        path = Path(folder) / "model"
        path.write_bytes(model)
        network = read_model(path)
    optimizer = keras.saving.deserialize_keras_object(compiled["optimizer"])
    if plan.learning_rate is not None:
        optimizer.learning_rate = plan.learning_rate
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if plan.scales_learning_rate and not isinstance(optimizer._learning_rate, schedule):
        optimizer.learning_rate = float(optimizer.learning_rate) * hvd.size()
    arguments: dict[str, Any] = {"compression": plan.compression_of(hvd)}
    if plan.backward_passes > 1:
        arguments["backward_passes_per_step"] = plan.backward_passes
    network.compile(
        hvd.DistributedOptimizer(optimizer, **arguments),
        loss=plan.loss,
        loss_weights=plan.loss_weights,
        metrics=compiled["metrics"],
        weighted_metrics=[],
    )
    names = input_names(network)
    batches, steps = _batches(plan, train, names, backend, is_training=True)
    checks, val_steps = (None, None)
    if valid is not None:
        checks, val_steps = _batches(plan, valid, names, backend, is_training=False)
    history = network.fit(
        batches,
        epochs=plan.epochs,
        steps_per_epoch=steps,
        validation_data=checks,
        validation_steps=val_steps,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *plan.callbacks,
            hvd.callbacks.ReportCallback(save_every=int(plan.saves)),
        ],
    )
    if hvd.rank():
        return None
    values = {name: [float(value) for value in values] for name, values in history.history.items()}
    return Trained(network.get_weights(), values)


def _batches(
    plan: TrainingPlan, shard: Shard, names: Sequence[str], backend: str, *, is_training: bool
) -> tuple[Any, int]:
    """The batches that Keras iterates over, and their number in an epoch."""
    batch_size = plan.batch_size if is_training else plan.val_batch_size
    options = plan.feed(shuffle=is_training and plan.shuffle, batch_size=batch_size)
    transform = options.pop("transform")
    wanted = plan.steps if is_training else plan.val_steps
    if backend == "tensorflow" and transform is None:
        dataset = shard.to_tf(**options, sample_weights=True)
        count = len(dataset)
        steps = min(wanted or count, count)
        mapped = dataset.map(lambda *parts: _arranged(plan, names, parts))
        return (mapped.take(steps) if steps < count else mapped), steps
    feed = shard.batches(**options, transform=transform, sample_weights=True)
    steps = min(wanted or len(feed), len(feed))
    return _forever(plan, names, feed), steps


def _forever(plan: TrainingPlan, names: Sequence[str], feed: Any) -> Iterator[Any]:
    while True:
        for batch in feed:
            yield _arranged(plan, names, list(batch.values()))


def _arranged(plan: TrainingPlan, names: Sequence[str], parts: Sequence[Any]) -> tuple[Any, ...]:
    """The parts of a batch as Keras takes them: inputs, labels and weights."""
    inputs: Any = dict(zip(plan.features, parts, strict=False))
    behind = list(parts[len(inputs) :])
    is_real = behind.pop()
    weight = behind.pop() * is_real if plan.weight is not None else is_real
    if len(inputs) == 1:
        inputs = next(iter(inputs.values()))
    elif set(inputs) != set(names):
        inputs = tuple(inputs.values())
    labels = behind[0] if len(behind) == 1 else tuple(behind)
    weights = weight if len(behind) == 1 else tuple(weight for _ in behind)
    return inputs, labels, weights
