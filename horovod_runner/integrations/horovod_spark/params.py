"""The Params of Horovod's estimators and models, with Horovod's names, setters and getters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark.ml.param import Params
from pyspark.ml.param.shared import HasOutputCols

from horovod_runner.integrations.spark_ml.params import (
    BOOL,
    INT,
    ROWS,
    TEXT,
    TEXTS,
    TRAINING,
    Declaration,
    with_params,
)

__all__ = ["EstimatorParams", "ModelParams"]

UNUSED: Final = "not used: the feed of the rows needs no such setting"

_ESTIMATOR: Final[Mapping[str, Declaration]] = {
    **TRAINING,
    **ROWS,
    "num_proc": "how many ranks; unset: as many as Spark has slots",
    "backend": "where the training runs, instead of num_proc",
    "store": "where checkpoints and logs go; unset: nowhere",
    "optimizer": "the optimizer; its learning rate is that of one rank",
    "metrics": "metrics to compute",
    "feature_cols": ("the columns of the model's inputs, in order", TEXTS),
    "label_cols": ("one column for each output of the model", TEXTS),
    "label_shapes": "the shape of each label, with -1 for the rows",
    "gradient_compression": "a class of hvd.Compression",
    "shuffle_buffer_size": ("0 does not shuffle", INT),
    "run_id": ("the training's folder in the store; it resumes from there", TEXT),
    "transformation_fn": (
        "called in training with each row, a dict by column; what it returns replaces the row"
    ),
    "data_module": "not supported: rows come from the DataFrame",
    "transformation_edit_fields": (
        "of a Lightning module: the columns that transformation_fn adds or changes, as tuples "
        "(name, NumPy type, shape, is nullable)"
    ),
    "transformation_removed_fields": (
        "of a Lightning module: the columns that transformation_fn does not return"
    ),
    "continuous_cols": (UNUSED, TEXTS),
    "categorical_cols": (UNUSED, TEXTS),
    "compress_sparse_cols": (UNUSED, BOOL),
    "partitions_per_process": (UNUSED, INT),
    "train_reader_num_workers": UNUSED,
    "val_reader_num_workers": UNUSED,
    "reader_pool_type": UNUSED,
    "inmemory_cache_all": (UNUSED, BOOL),
    "mp_start_method": (UNUSED, TEXT),
    "tensorflow_dataset_prefetch_buffer_size": (UNUSED, INT),
}
_ESTIMATOR_DEFAULTS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(_ESTIMATOR),
    "metrics": [],
    "callbacks": [],
    "batch_size": 32,
    "epochs": 1,
    "verbose": 1,
    "shuffle": True,
    "use_gpu": True,
    "backward_passes_per_step": 1,
    "partitions_per_process": 10,
    "train_reader_num_workers": 2,
    "val_reader_num_workers": 2,
    "reader_pool_type": "thread",
    "compress_sparse_cols": False,
    "inmemory_cache_all": False,
    "tensorflow_dataset_prefetch_buffer_size": 0,
}
_MODEL: Final[Mapping[str, Declaration]] = {
    "history": "metrics of the training, by epoch",
    "model": "the trained model",
    "feature_columns": "the columns of the model's inputs, in order",
    "label_columns": "one column for each output of the model",
    "run_id": ("the training's folder in the store", TEXT),
    "_metadata": "the types of the columns that the model was trained with",
}
# Horovod's other spellings of some accessors, without "get" and "set".
_SPELLINGS: Final = {
    "InMemoryCacheAll": "InmemoryCacheAll",
    "ShufflingBufferSize": "ShuffleBufferSize",
    "TrainReaderNumWorker": "TrainReaderNumWorkers",
    "ValReaderNumWorker": "ValReaderNumWorkers",
}


@with_params(_ESTIMATOR)
class EstimatorParams(Params):  # type: ignore[misc]
    """Params of all estimators of ``horovod.spark``."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**_ESTIMATOR_DEFAULTS)


for _other, _name in _SPELLINGS.items():
    for _verb in ("get", "set"):
        setattr(EstimatorParams, f"{_verb}{_other}", getattr(EstimatorParams, f"{_verb}{_name}"))


@with_params(_MODEL, also=("outputCols",))
class ModelParams(HasOutputCols):  # type: ignore[misc]
    """Params of all models of ``horovod.spark``."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**dict.fromkeys(_MODEL))

    def setLabelColoumns(self, value: Any) -> Any:  # noqa: N802 - Horovod's spelling
        """Set the Param ``label_columns``."""
        return self._set(label_columns=value)
