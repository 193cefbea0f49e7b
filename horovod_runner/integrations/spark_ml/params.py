"""The Params of the estimators and their models, with a setter and a getter for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypedDict, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasWeightCol,
)

T = TypeVar("T", bound=type[Any])


class EstimatorOptions(TypedDict, total=False):
    """The arguments of all estimators; each is a Param, which documents it."""

    model: Any
    optimizer: Any
    learning_rate: float
    loss: Any
    loss_weights: Sequence[float]
    metrics: Any
    feature_cols: Sequence[str | Sequence[str]]
    label_cols: Sequence[str]
    sample_weight_col: str
    featuresCol: str
    labelCol: str
    weightCol: str
    predictionCol: str
    probabilityCol: str
    validation: float | str
    batch_size: int
    val_batch_size: int
    epochs: int
    train_steps_per_epoch: int
    validation_steps_per_epoch: int
    shuffle: bool
    random_seed: int
    callbacks: Sequence[Any]
    transformation_fn: Callable[[Any], Any]
    images: Mapping[str, Any]
    dtypes: Mapping[str, str] | str
    pad_ragged: Mapping[str, Any]
    gradient_compression: Any
    backward_passes_per_step: int
    task: str
    verbose: int
    np: int
    use_gpu: bool
    checkpoint_dir: str
    resume: bool
    max_restarts: int
    sinks: Sequence[Any]
    weight_check: str
    runner_options: Mapping[str, Any]
    run_id: str


def with_accessors(cls: T) -> T:
    """Give a class ``setBatchSize`` and ``getBatchSize`` for its Param ``batch_size``."""
    for name, param in list(vars(cls).items()):
        if isinstance(param, Param):
            words = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
            setattr(cls, f"set{words}", _setter(name, f"set{words}"))
            setattr(cls, f"get{words}", _getter(name, f"get{words}"))
    return cls


def _setter(name: str, called: str) -> Callable[..., Any]:
    def set_(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_.__name__, set_.__doc__ = called, f"Set the Param ``{name}``."
    return set_


def _getter(name: str, called: str) -> Callable[..., Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    get.__name__, get.__doc__ = called, f"The value of the Param ``{name}``, or its default."
    return get


def declare(name: str, doc: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """Declare a Param of a class."""
    return Param(Params._dummy(), name, doc, convert)


def set_named(holder: Any, params: Mapping[str, Any]) -> None:
    """Set Params by name, as the arguments of a class.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """
    for name in params:
        if not holder.hasParam(name):
            raise TypeError(
                f"{type(holder).__name__} has no argument {name!r}: it has "
                f"{', '.join(param.name for param in holder.params)}"
            )
    holder._set(**params)


def to_columns(value: Any) -> list[str | list[str]]:
    """Convert names of columns, or lists of names that lie side by side."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"it must be a list of column names, not {value!r}")
    return [name if isinstance(name, str) else TypeConverters.toListString(name) for name in value]


@with_accessors
class ColumnParams(
    HasFeaturesCol,  # type: ignore[misc]
    HasLabelCol,  # type: ignore[misc]
    HasPredictionCol,  # type: ignore[misc]
    HasProbabilityCol,  # type: ignore[misc]
):
    """Which columns are read and written; Params of estimators and of models."""

    feature_cols = declare(
        "feature_cols",
        "the model's inputs: column names, or lists of names of columns side by side. Unset: "
        "featuresCol alone",
        to_columns,
    )
    label_cols = declare(
        "label_cols",
        "one label for each output of the model. Unset: labelCol alone",
        TypeConverters.toListString,
    )
    output_cols = declare(
        "output_cols",
        "the columns of the predictions, one for each label. Unset: predictionCol, followed by "
        "the label's name where there are several",
        TypeConverters.toListString,
    )
    task = declare(
        "task",
        "what outputs mean: 'classification' (scores of classes: predictionCol is the class, and "
        "probabilityCol the probabilities), 'regression' (predictionCol is the output), or 'auto', "
        "which decides by the loss",
        TypeConverters.toString,
    )
    images = declare(
        "images", "what columns of images become, by column: horovod_runner.data.Image"
    )
    dtypes = declare("dtypes", "NumPy types to convert numbers to, by column, or one for all")
    pad_ragged = declare("pad_ragged", "for ragged columns: a number that fills up short rows")
    transformation_fn = declare(
        "transformation_fn",
        "called with each batch, a dict of NumPy arrays by column, in training and scoring; what "
        "it returns replaces the batch",
    )

    def value_of(self, name: str) -> Any:
        """The value of a Param; None if it is neither set nor has a default."""
        return self.getOrDefault(name) if self.isDefined(name) else None

    @property
    def features(self) -> dict[str, str | list[str]]:
        """The model's inputs, by name."""
        named: Sequence[str | list[str]] | None = self.value_of("feature_cols")
        if named is None:
            named = [self.getFeaturesCol()]
        return {name if isinstance(name, str) else "+".join(name): name for name in named}

    @property
    def labels(self) -> list[str]:
        """The names of the label columns."""
        labels: list[str] | None = self.value_of("label_cols")
        return [self.getLabelCol()] if labels is None else labels

    def _feed_options(self) -> dict[str, Any]:
        """The options of the feeds, by their names in Shard's methods."""
        named = {name: self.value_of(name) for name in ("images", "dtypes", "pad_ragged")}
        return {**named, "transform": self.value_of("transformation_fn")}

    @property
    def outputs(self) -> list[str]:
        """The names of the prediction columns, one for each label."""
        outputs: list[str] | None = self.value_of("output_cols")
        if outputs is not None:
            return outputs
        prediction, labels = self.getPredictionCol(), self.labels
        if len(labels) == 1:
            return [prediction]
        return [f"{prediction}_{label}" for label in labels]

    def setFeaturesCol(self, value: str) -> Any:  # noqa: N802 - Spark's name
        """Set the Param ``featuresCol``."""
        return self._set(featuresCol=value)

    def setLabelCol(self, value: str) -> Any:  # noqa: N802
        """Set the Param ``labelCol``."""
        return self._set(labelCol=value)

    def setPredictionCol(self, value: str) -> Any:  # noqa: N802
        """Set the Param ``predictionCol``."""
        return self._set(predictionCol=value)

    def setProbabilityCol(self, value: str) -> Any:  # noqa: N802
        """Set the Param ``probabilityCol``."""
        return self._set(probabilityCol=value)


_INT, _BOOL, _TEXT = TypeConverters.toInt, TypeConverters.toBoolean, TypeConverters.toString


@with_accessors
class TrainingParams(ColumnParams, HasWeightCol):  # type: ignore[misc]
    """How a model is trained; Params of estimators."""

    model = declare("model", "the model to train; the object itself stays as it is")
    optimizer = declare(
        "optimizer", "an optimizer, or a function from the model's parameters to an optimizer"
    )
    learning_rate = declare(
        "learning_rate", "instead of the optimizer's learning rate", TypeConverters.toFloat
    )
    loss = declare("loss", "a function of (output, label), or a list with one for each output")
    loss_weights = declare(
        "loss_weights", "the weight of each output's loss", TypeConverters.toListFloat
    )
    metrics = declare("metrics", "functions of (output, label), as a list or by name")
    sample_weight_col = declare("sample_weight_col", "the column of the rows' weights", _TEXT)
    validation = declare(
        "validation",
        "the rows to validate with: a fraction from 0 to 1, or a column that is True or 1 in them",
    )
    batch_size = declare("batch_size", "rows per batch on each rank", _INT)
    val_batch_size = declare("val_batch_size", "for validation; unset: batch_size", _INT)
    epochs = declare("epochs", "how often the rows are trained with", _INT)
    train_steps_per_epoch = declare(
        "train_steps_per_epoch", "steps of an epoch; unset: all rows", _INT
    )
    validation_steps_per_epoch = declare(
        "validation_steps_per_epoch", "steps of a validation; unset: all rows", _INT
    )
    shuffle = declare("shuffle", "shuffle the rows, differently in each epoch", _BOOL)
    random_seed = declare("random_seed", "of the shuffling, the split and the framework", _INT)
    callbacks = declare("callbacks", "the framework's callbacks, on each rank")
    gradient_compression = declare(
        "gradient_compression", "'fp16', or a class of hvd.Compression; unset: none"
    )
    backward_passes_per_step = declare(
        "backward_passes_per_step", "batches that one step of the optimizer adds up", _INT
    )
    verbose = declare("verbose", "0 shows no progress", _INT)
    np = declare("np", "how many ranks, as in HorovodRunner", _INT)
    use_gpu = declare("use_gpu", "train on GPUs where the hosts have them", _BOOL)
    checkpoint_dir = declare("checkpoint_dir", "as in HorovodRunner", _TEXT)
    resume = declare("resume", "as in HorovodRunner", _BOOL)
    max_restarts = declare("max_restarts", "as in HorovodRunner", _INT)
    sinks = declare("sinks", "as in HorovodRunner")
    weight_check = declare("weight_check", "as in horovod_runner.DebugConfig", _TEXT)
    runner_options = declare(
        "runner_options",
        "further options of HorovodRunner and its groups, by name: {'hang_timeout': 600}",
    )
    run_id = declare(
        "run_id", "the folder in checkpoint_dir for this training's checkpoints", _TEXT
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)

    def setWeightCol(self, value: str) -> Any:  # noqa: N802 - Spark's name
        """Set the Param ``weightCol``."""
        return self._set(weightCol=value)

    @property
    def weight(self) -> str | None:
        """The name of the column of weights; None without one."""
        name: str | None = self.value_of("sample_weight_col") or self.value_of("weightCol")
        return name


DEFAULTS: Final[Mapping[str, Any]] = {
    "batch_size": 32,
    "epochs": 1,
    "shuffle": True,
    "random_seed": 0,
    "backward_passes_per_step": 1,
    "verbose": 1,
    "np": 1,
    "use_gpu": True,
    "resume": False,
    "max_restarts": 0,
    "task": "auto",
}
