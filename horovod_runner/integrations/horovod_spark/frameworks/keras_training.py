"""The function that the ranks of Horovod's KerasEstimator run: `ml`'s, with Horovod's callbacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod_runner.data.scoring.models.keras import read_model
from horovod_runner.data.shard import Shard
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.integrations.horovod_spark.frameworks.logs import copy_to_store
from horovod_runner.integrations.spark_ml import keras_training
from horovod_runner.integrations.spark_ml.plan import Trained, TrainingPlan
from horovod_runner.worker.api import current_rank


def train(
    *,
    plan: TrainingPlan,
    model: bytes,
    backend: str,
    compiled: dict[str, Any],
    train: Shard,
    valid: Shard | None = None,
    checkpoint_callback: Any = None,
    logs: str | None = None,
) -> Trained | None:
    """Train a Keras model on this rank; the other arguments are those of `ml`'s function.

    Args:
        plan: how.
        model: the content of a file of KerasKind.
        backend: Keras's backend.
        compiled: the arguments of ``model.compile``.
        train: the rows to train with.
        valid: the rows to validate with.
        checkpoint_callback: saves models on rank 0.
        logs: the folder or URL for TensorBoard's logs; None keeps them nowhere.

    Returns:
        The weights of the model that the callback saved last, or of the trained one, on rank 0;
        None on other ranks.
    """
    os.environ.setdefault("KERAS_BACKEND", backend)
    with _own_callbacks(plan, checkpoint_callback, logs) as (own_plan, saved):
        trained = keras_training.train(
            plan=own_plan,
            model=model,
            backend=backend,
            compiled=compiled,
            train=train,
            valid=valid,
        )
        if trained is None or not saved.exists():
            return trained
        return replace(trained, weights=_weights(model, saved))


@contextmanager
def _own_callbacks(
    plan: TrainingPlan, checkpoint_callback: Any, logs: str | None
) -> Iterator[tuple[TrainingPlan, Path]]:
    """The plan with callbacks that write where they should, and the file of saved models."""
    import keras

    is_first = current_rank() == 0
    boards = [
        callback for callback in plan.callbacks if isinstance(callback, keras.callbacks.TensorBoard)
    ]
    others = [callback for callback in plan.callbacks if callback not in boards]
    with temporary_folder("keras") as name:
        folder = Path(name)
        saved = folder / "checkpoint.keras"
        callbacks = others
        if is_first:
            for board in boards:
                board.log_dir = str(folder / "logs")
            callbacks = [*others, *boards]
            if checkpoint_callback is not None:
                checkpoint_callback.filepath = str(saved)
                callbacks.append(checkpoint_callback)
        yield replace(plan, callbacks=callbacks), saved
        copy_to_store(folder / "logs", logs)


def _weights(model: bytes, saved: Path) -> Any:
    """The weights in a file of Keras's, of the model that is to be trained."""
    with temporary_folder("keras") as folder:
        path = Path(folder) / "model"
        path.write_bytes(model)
        network = read_model(path)
    network.load_weights(str(saved))
    return network.get_weights()
