"""The Params of the estimators and their models, as tables: each gets a setter and a getter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypedDict, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasWeightCol,
)

T = TypeVar("T", bound=type[Any])
#: What a Param means; or that, and what converts its value.
Declaration: TypeAlias = "str | tuple[str, Callable[[Any], Any]]"

INT, BOOL, TEXT = TypeConverters.toInt, TypeConverters.toBoolean, TypeConverters.toString
FLOATS, TEXTS = TypeConverters.toListFloat, TypeConverters.toListString


class _Options(TypedDict, total=False):
    """The arguments of estimators and of models; each is a Param, which documents it."""

    model: Any
    feature_cols: Sequence[str | Sequence[str]]
    label_cols: Sequence[str]
    featuresCol: str
    labelCol: str
    predictionCol: str
    probabilityCol: str
    transformation_fn: Callable[[Any], Any]
    images: Mapping[str, Any]
    dtypes: Mapping[str, str] | str
    pad_ragged: Mapping[str, Any]
    task: str


class EstimatorOptions(_Options, total=False):
    """The arguments of all estimators."""

    optimizer: Any
    learning_rate: float
    loss: Any
    loss_weights: Sequence[float]
    metrics: Any
    sample_weight_col: str
    weightCol: str
    validation: float | str
    batch_size: int
    val_batch_size: int
    epochs: int
    train_steps_per_epoch: int
    validation_steps_per_epoch: int
    shuffle: bool
    random_seed: int
    callbacks: Sequence[Any]
    gradient_compression: Any
    backward_passes_per_step: int
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


class ModelOptions(_Options, total=False):
    """The arguments of all models."""

    output_cols: Sequence[str]
    transform_batch_size: int
    loss_name: str


def to_columns(value: Any) -> list[str | list[str]]:
    """Convert names of columns, or lists of names that lie side by side."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"it must be a list of column names, not {value!r}")
    return [name if isinstance(name, str) else TEXTS(name) for name in value]


#: How a model is trained: the fields of Training that have the same names. `horovod.spark`'s
#: estimators have them, too.
TRAINING: Final[Mapping[str, Declaration]] = {
    "model": "the model to train; the object itself stays as it is",
    "optimizer": "an optimizer, or a function from the model's parameters to an optimizer",
    "loss": "a function of (output, label), or a list with one for each output",
    "loss_weights": ("the weight of each output's loss", FLOATS),
    "metrics": "functions of (output, label), as a list or by name",
    "batch_size": ("rows per batch on each rank", INT),
    "val_batch_size": ("for validation; unset: batch_size", INT),
    "epochs": ("how often the rows are trained with", INT),
    "train_steps_per_epoch": ("steps of an epoch; unset: all rows", INT),
    "validation_steps_per_epoch": ("steps of a validation; unset: all rows", INT),
    "shuffle": ("shuffle the rows, differently in each epoch", BOOL),
    "random_seed": ("of the shuffling, the split and the framework", INT),
    "callbacks": "the framework's callbacks, on each rank",
    "gradient_compression": "'fp16', or a class of hvd.Compression; unset: none",
    "backward_passes_per_step": ("batches that one step of the optimizer adds up", INT),
    "verbose": ("0 shows no progress", INT),
}
#: Further Params that estimators of `horovod.spark` have with the same meaning.
ROWS: Final[Mapping[str, Declaration]] = {
    "sample_weight_col": ("the column of the rows' weights", TEXT),
    "validation": (
        "the rows to validate with: a fraction from 0 to 1, or a column that is True or 1 in them"
    ),
    "use_gpu": ("train on GPUs where the hosts have them", BOOL),
}
#: Params of estimators alone.
_OWN: Final[Mapping[str, Declaration]] = {
    "learning_rate": ("instead of the optimizer's learning rate", TypeConverters.toFloat),
    "np": ("how many ranks, as in HorovodRunner", INT),
    "checkpoint_dir": ("as in HorovodRunner", TEXT),
    "resume": ("as in HorovodRunner", BOOL),
    "max_restarts": ("as in HorovodRunner", INT),
    "sinks": "as in HorovodRunner",
    "weight_check": ("as in horovod_runner.DebugConfig", TEXT),
    "runner_options": (
        "further options of HorovodRunner and its groups, by name: {'hang_timeout': 600}"
    ),
    "run_id": ("the folder in checkpoint_dir for this training's checkpoints", TEXT),
}
#: Params of estimators and of models.
_COLUMNS: Final[Mapping[str, Declaration]] = {
    "feature_cols": (
        "the model's inputs: column names, or lists of names of columns side by side. Unset: "
        "featuresCol alone",
        to_columns,
    ),
    "label_cols": ("one label for each output of the model. Unset: labelCol alone", TEXTS),
    "output_cols": (
        "the columns of the predictions, one for each label. Unset: predictionCol, followed by "
        "the label's name where there are several",
        TEXTS,
    ),
    "task": (
        "what outputs mean: 'classification' (scores of classes: predictionCol is the class, and "
        "probabilityCol the probabilities), 'regression' (predictionCol is the output), or 'auto', "
        "which decides by the loss",
        TEXT,
    ),
    "images": "what columns of images become, by column: horovod_runner.data.Image",
    "dtypes": "NumPy types to convert numbers to, by column, or one for all",
    "pad_ragged": "for ragged columns: a number that fills up short rows",
    "transformation_fn": (
        "called with each batch, a dict of NumPy arrays by column, in training and scoring; what "
        "it returns replaces the batch"
    ),
}
_SPARKS: Final = ("featuresCol", "labelCol", "predictionCol", "probabilityCol")
#: Params that a trained model takes over from its estimator.
COPIED: Final = (*_COLUMNS, *_SPARKS)
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


def with_params(*tables: Mapping[str, Declaration], also: Sequence[str] = ()) -> Callable[[T], T]:
    """Declare Params of a class, with ``setBatchSize`` and ``getBatchSize`` for ``batch_size``.

    The class has ``setParams``, too.

    Args:
        tables: the Params, by name.
        also: Params of a base of Spark's that get a setter.
    """
    declared = {name: value for table in tables for name, value in table.items()}

    def add(cls: T) -> T:
        for name, declaration in declared.items():
            doc, convert = (declaration, None) if isinstance(declaration, str) else declaration
            setattr(cls, name, Param(Params._dummy(), name, doc, convert))
            setattr(cls, f"get{_words(name)}", _getter(name))
        for name in (*declared, *also):
            setattr(cls, f"set{_words(name)}", _setter(name))
        cls.setParams = _set_params
        return cls

    return add


def _words(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _set_params(self: Any, **params: Any) -> Any:
    """Set several Params."""
    return self._set(**params)


def _setter(name: str) -> Callable[..., Any]:
    def set_(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_.__name__, set_.__doc__ = f"set{_words(name)}", f"Set the Param ``{name}``."
    return set_


def _getter(name: str) -> Callable[..., Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    get.__name__ = f"get{_words(name)}"
    get.__doc__ = f"The value of the Param ``{name}``, or its default."
    return get


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


def training_arguments(holder: Any) -> dict[str, Any]:
    """The arguments of Training that are Params in TRAINING and are set, or have a default."""
    given = {
        name: holder.getOrDefault(name)
        for name in (*TRAINING, "learning_rate")
        if holder.hasParam(name) and holder.isDefined(name)
    }
    return {name: value for name, value in given.items() if value is not None}


@with_params(_COLUMNS, also=_SPARKS)
class ColumnParams(
    HasFeaturesCol,  # type: ignore[misc]
    HasLabelCol,  # type: ignore[misc]
    HasPredictionCol,  # type: ignore[misc]
    HasProbabilityCol,  # type: ignore[misc]
):
    """Which columns are read and written; Params of estimators and of models."""

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

    @property
    def feed_options(self) -> dict[str, Any]:
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


@with_params(TRAINING, ROWS, _OWN, also=("weightCol",))
class TrainingParams(ColumnParams, HasWeightCol):  # type: ignore[misc]
    """How a model is trained; Params of estimators."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)

    @property
    def weight(self) -> str | None:
        """The name of the column of weights; None without one."""
        name: str | None = self.value_of("sample_weight_col") or self.value_of("weightCol")
        return name
