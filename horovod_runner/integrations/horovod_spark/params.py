"""The Params of Horovod's estimators and models, with Horovod's names, setters and getters."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Params, TypeConverters
from pyspark.ml.param.shared import HasOutputCols

from horovod_runner.integrations.spark_ml.params import declare, with_accessors

__all__ = ["EstimatorParams", "ModelParams"]

_INT, _BOOL, _TEXT = TypeConverters.toInt, TypeConverters.toBoolean, TypeConverters.toString
_TEXTS = TypeConverters.toListString
_UNUSED = "not used: the feed of the rows needs no such setting"


@with_accessors
class EstimatorParams(Params):  # type: ignore[misc]
    """Params of all estimators of ``horovod.spark``."""

    num_proc = declare("num_proc", "how many ranks; unset: as many as Spark has slots")
    backend = declare("backend", "where the training runs, instead of num_proc")
    store = declare("store", "where checkpoints and logs go; unset: nowhere")
    model = declare("model", "the model to train")
    optimizer = declare("optimizer", "the optimizer; its learning rate is that of one rank")
    loss = declare("loss", "the loss, or a list with one for each output")
    loss_weights = declare(
        "loss_weights", "the weight of each output's loss", TypeConverters.toListFloat
    )
    metrics = declare("metrics", "metrics to compute")
    sample_weight_col = declare("sample_weight_col", "the column of the rows' weights", _TEXT)
    feature_cols = declare("feature_cols", "the columns of the model's inputs, in order", _TEXTS)
    label_cols = declare("label_cols", "one column for each output of the model", _TEXTS)
    label_shapes = declare("label_shapes", "the shape of each label, with -1 for the rows")
    validation = declare(
        "validation",
        "the rows to validate with: a fraction, or a column that is True or 1 in them",
    )
    callbacks = declare("callbacks", "callbacks of the framework")
    batch_size = declare("batch_size", "rows per batch on each rank", _INT)
    val_batch_size = declare("val_batch_size", "for validation; unset: batch_size", _INT)
    epochs = declare("epochs", "how often the rows are trained with", _INT)
    train_steps_per_epoch = declare(
        "train_steps_per_epoch", "steps of an epoch; unset: all rows", _INT
    )
    validation_steps_per_epoch = declare(
        "validation_steps_per_epoch", "steps of a validation; unset: all rows", _INT
    )
    gradient_compression = declare("gradient_compression", "a class of hvd.Compression")
    backward_passes_per_step = declare(
        "backward_passes_per_step", "batches that one step of the optimizer adds up", _INT
    )
    random_seed = declare("random_seed", "of the shuffling, the split and the framework", _INT)
    shuffle = declare("shuffle", "shuffle the rows, differently in each epoch", _BOOL)
    shuffle_buffer_size = declare("shuffle_buffer_size", "0 does not shuffle", _INT)
    verbose = declare("verbose", "0 shows no progress", _INT)
    run_id = declare("run_id", "the training's folder in the store; it resumes from there", _TEXT)
    transformation_fn = declare(
        "transformation_fn",
        "called in training with each row, a dict by column; what it returns replaces the row",
    )
    use_gpu = declare("use_gpu", "train on GPUs where the hosts have them", _BOOL)
    data_module = declare("data_module", "not supported: rows come from the DataFrame")
    transformation_edit_fields = declare("transformation_edit_fields", _UNUSED)
    transformation_removed_fields = declare("transformation_removed_fields", _UNUSED)
    continuous_cols = declare("continuous_cols", _UNUSED, _TEXTS)
    categorical_cols = declare("categorical_cols", _UNUSED, _TEXTS)
    compress_sparse_cols = declare("compress_sparse_cols", _UNUSED, _BOOL)
    partitions_per_process = declare("partitions_per_process", _UNUSED, _INT)
    train_reader_num_workers = declare("train_reader_num_workers", _UNUSED)
    val_reader_num_workers = declare("val_reader_num_workers", _UNUSED)
    reader_pool_type = declare("reader_pool_type", _UNUSED)
    inmemory_cache_all = declare("inmemory_cache_all", _UNUSED, _BOOL)
    mp_start_method = declare("mp_start_method", _UNUSED, _TEXT)
    tensorflow_dataset_prefetch_buffer_size = declare(
        "tensorflow_dataset_prefetch_buffer_size", _UNUSED, _INT
    )

    def __init__(self) -> None:
        super().__init__()
        given = {
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
        self._setDefault(**{**dict.fromkeys(_names(EstimatorParams)), **given})

    def setParams(self, **params: Any) -> Any:  # noqa: N802 - Spark's name
        """Set several Params."""
        return self._set(**params)


@with_accessors
class ModelParams(HasOutputCols):  # type: ignore[misc]
    """Params of all models of ``horovod.spark``."""

    history = declare("history", "metrics of the training, by epoch")
    model = declare("model", "the trained model")
    feature_columns = declare("feature_columns", "the columns of the model's inputs, in order")
    label_columns = declare("label_columns", "one column for each output of the model")
    run_id = declare("run_id", "the training's folder in the store", _TEXT)
    _metadata = declare("_metadata", "the types of the columns that the model was trained with")

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**dict.fromkeys((*_names(ModelParams), "_metadata")))

    def setParams(self, **params: Any) -> Any:  # noqa: N802 - Spark's name
        """Set several Params."""
        return self._set(**params)

    def setOutputCols(self, value: list[str]) -> Any:  # noqa: N802 - Spark's name
        """Set the names of the prediction columns."""
        return self._set(outputCols=value)


def _names(kind: type[Any]) -> list[str]:
    """The Params that a class declares itself."""
    from pyspark.ml.param import Param

    return [name for name, value in vars(kind).items() if isinstance(value, Param)]


def _spell(kind: Any, others: dict[str, str]) -> None:
    """Add Horovod's other spellings of some accessors."""
    for other, name in others.items():
        setattr(kind, other, getattr(kind, name))


_spell(
    EstimatorParams,
    {
        "getInMemoryCacheAll": "getInmemoryCacheAll",
        "getShufflingBufferSize": "getShuffleBufferSize",
        "getTrainReaderNumWorker": "getTrainReaderNumWorkers",
        "getValReaderNumWorker": "getValReaderNumWorkers",
        "setInMemoryCacheAll": "setInmemoryCacheAll",
        "setShufflingBufferSize": "setShuffleBufferSize",
        "setTrainReaderNumWorker": "setTrainReaderNumWorkers",
        "setValReaderNumWorker": "setValReaderNumWorkers",
    },
)
_spell(ModelParams, {"setLabelColoumns": "setLabelColumns"})
