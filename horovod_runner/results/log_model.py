"""Logs a run's model to MLflow: ``runner.last_run.log_model()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.scoring import logged_model
from horovod_runner.data.scoring.models.recognize import recognize
from horovod_runner.data.sources import Source
from horovod_runner.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo

    from horovod_runner.data.scoring.outputs import OutputSpec

_EXAMPLE_ROWS = 5


def log_model(
    name: str,
    *,
    checkpoint: Checkpoint | None,
    build: Callable[[], Any] | None,
    sources: Mapping[str, Source],
    data: str | None,
    feed: Mapping[str, Any],
    output: OutputSpec,
    registered_model_name: str | None,
) -> ModelInfo:
    """Log a run's model; see :meth:`horovod_runner.results.run.Run.log_model`.

    ``build`` returns the checkpoint's network, and ``feed`` says which columns become the model's
    inputs, and how.
    """
    if checkpoint is None:
        raise CheckpointError(
            "the run has no checkpoint to log a model from: call save_checkpoint in main"
        )
    chosen = data or next(iter(sources), None)
    if chosen is None or chosen not in sources:
        what = ", ".join(sources) or "none"
        raise DataError(
            f"the run had no dataset{f' {data!r}' if data else ''}, from whose rows signature and "
            f"example are made: its datasets are {what}. Log the model with the functions of MLflow"
        )
    kind, model = recognize(checkpoint, build)
    options = FeedOptions(framework=kind.framework, **feed)
    return logged_model.log_model(
        name,
        kind,
        model,
        options,
        example=sources[chosen].head(_EXAMPLE_ROWS),
        output=output,
        registered_model_name=registered_model_name,
    )
