"""The plain description of a training, which travels to the ranks, and what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeAlias

from horovod_runner.data.feed.fields import flat_names
from horovod_runner.data.feed.options import Framework
from horovod_runner.data.place import place

if TYPE_CHECKING:
    from horovod_runner.data.shard import Shard


_BY_PART: Final = ("dtypes", "pad_ragged")  # options of feeds, by the name of a part

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Names:
    """What a caller calls the arguments that errors name; by default as the estimators do."""

    features: str = "feature_cols (or featuresCol)"
    labels: str = "label_cols (or labelCol)"
    weight: str = "sample_weight_col (or weightCol)"
    side_by_side: str = "feature_cols=[['age', 'income']]"  # one input, of several columns


@dataclass(frozen=True)
class Metric:
    """A metric of a torch model."""

    function: Callable[..., Any]  # of (output, label), tensors of shape (rows, ...)
    label: int = 0  # the number of the output and of the label that it takes


@dataclass(frozen=True)
class Trained:
    """What rank 0 returns."""

    weights: Any
    history: Mapping[str, Sequence[float]]  # the metrics of each epoch, by name
    # The state of the optimizer, if the training asks for it; the learning rate is not scaled.
    optimizer: Any = None


@dataclass(frozen=True, kw_only=True)
class Training(ABC):
    """What the ranks train, and how; each framework has a subclass.

    Fields that are not listed here mean what the Params of the estimators mean that have the same
    names.

    Attributes:
        features: the model's inputs, by name: a column, or columns side by side.
        labels: the label columns.
        weight: the column of the rows' weights; None without one.
        options: of the feeds: images, dtypes, pad_ragged, transform; by input or label, and images
            by column.
        global_batch: rows of a step over all ranks, in place of batch_size; a step has
            backward_passes_per_step passes over equal parts of them.
        saves: whether each epoch ends with a checkpoint.
        save_every: steps after which there is one, too; None for none.
        scales_learning_rate: whether the learning rate is multiplied by the number of ranks.
        validation: divides the rows, if there are none to validate with: see ``Shard.split``.
        schedule: the factor of the learning rate: a function of (steps done, all steps).
        clip_norm: the largest norm of all gradients together.
        precision: of the numbers that the model computes with; see :func:`horovod_runner.fit`.
        patience: epochs without a better ``monitor`` after which all ranks stop; None: never.
        monitor: the metric that says which epoch is better, and "min" or "max".
        syncs_batch_norm: whether batch normalization has the statistics of all ranks' rows.
        names: what errors call the arguments.

    Raises:
        ValueError: batch_size, epochs or backward_passes_per_step is below 1, or a label is there
            twice.
    """

    framework: ClassVar[Framework] = "torch"
    #: The module with Horovod's functions that the ranks use.
    library: ClassVar[str] = "horovod.torch"

    model: Any
    features: Mapping[str, str | list[str]]
    labels: Sequence[str]
    weight: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    learning_rate: float | None = None
    loss: Any = None
    loss_weights: Sequence[float] | None = None
    metrics: Any = None
    batch_size: int = 32
    val_batch_size: int | None = None
    epochs: int = 1
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    shuffle: bool = True
    random_seed: int = 0
    callbacks: Sequence[Any] = ()
    gradient_compression: Any = None
    backward_passes_per_step: int = 1
    verbose: int = 1
    global_batch: int | None = None
    saves: bool = False
    save_every: int | None = None
    scales_learning_rate: bool = False
    validation: float | str | None = None
    schedule: Callable[[int, int], float] | None = None
    clip_norm: float | None = None
    precision: Precision = "float32"
    patience: int | None = None
    monitor: tuple[str, Literal["min", "max"]] = ("loss", "min")
    syncs_batch_norm: bool = False
    names: Names = Names()

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "backward_passes_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in self.labels:
            if (count := self.labels.count(name)) > 1:
                raise ValueError(
                    f"{self.names.labels} has the column {name!r} {count} times: give each output "
                    "its own column, for example a copy under another name"
                )

    @property
    def columns(self) -> dict[str, str | list[str]]:
        """The parts of a batch: the features, the labels, and the weight where there is one."""
        parts = {**self.features, **{f"label {name}": name for name in self.labels}}
        return parts if self.weight is None else {**parts, "weight of the row": self.weight}

    @property
    def feed_options(self) -> dict[str, Any]:
        """The options of the feeds, with the labels by the names of their parts."""
        changed = dict(self.options)
        for option in _BY_PART:
            given = changed.get(option)
            if isinstance(given, Mapping):
                of_labels = {f"label {name}": given[name] for name in self.labels if name in given}
                kept = {
                    name: value
                    for name, value in given.items()
                    if name in self.features or name not in self.labels
                }
                changed[option] = {**kept, **of_labels}
        return changed

    @property
    def read_columns(self) -> set[str]:
        """The columns that a training reads; a dotted name is a field of a struct."""
        return set(flat_names(self.columns.values()))

    def split_parts(self, parts: Sequence[Any]) -> tuple[dict[str, Any], list[Any], Any]:
        """The parts of a batch as inputs by name, labels, and the weight or None."""
        inputs = dict(zip(self.features, parts, strict=False))
        labels = list(parts[len(inputs) :])
        weight = labels.pop() if self.weight is not None else None
        return inputs, labels, weight

    def check_outputs(self, count: int) -> None:
        """Check that a model returns one output for each label.

        Raises:
            ValueError: it does not.
        """
        if count != len(self.labels):
            raise ValueError(
                f"the model returns {count} outputs for {len(self.labels)} labels: "
                f"{self.names.labels} must name one label for each output"
            )

    def compression_of(self, horovod: Any) -> Any:
        """The class that compresses gradients, of a module of Horovod's names."""
        wanted = self.gradient_compression
        if wanted is None or isinstance(wanted, str):
            return getattr(horovod.Compression, wanted or "none")
        return wanted

    def feed(self, shard: Shard, *, is_training: bool) -> dict[str, Any]:
        """Arguments of ``Shard.to_torch`` and ``Shard.to_tf``.

        Where each rank has rows of its own, a step has ``global_batch`` divided by the ranks.
        """
        rows = {"batch_size": self.batch_size}
        if self.global_batch is not None:
            part = self.global_batch // self.backward_passes_per_step
            rows = {"global_batch": part}
            if shard.is_split_among_ranks:
                rows = {"batch_size": max(1, part // place()[1])}
        elif not is_training:
            rows = {"batch_size": self.val_batch_size or self.batch_size}
        return {
            **rows,
            "columns": self.columns,
            "shuffle": is_training and self.shuffle,
            "seed": self.random_seed,
            **self.feed_options,
        }

    @abstractmethod
    def check(self, first: Mapping[str, Any]) -> None:
        """Try the model in this process, on the parts of a small batch in the order of ``columns``.

        Raises:
            TypeError: model or optimizer is of another kind.
            ValueError: the model does not fit the rows; names the Param to change.
        """

    def for_ranks(self) -> Self:
        """The same training in a form that can be pickled."""
        return self

    @abstractmethod
    def train(self, train: Shard, valid: Shard | None) -> Trained | None:
        """Train on this rank; returns what was trained on rank 0, and None on other ranks."""

    @abstractmethod
    def trained_model(self, trained: Trained) -> Any:
        """A new model, on the driver, with the trained weights."""


def options_of_inputs(
    options: Mapping[str, Any], features: Mapping[str, str | list[str]], labels: Sequence[str]
) -> dict[str, Any]:
    """The options of feeds without those of labels, which are not there when rows are scored."""
    of_labels = {*labels, *(f"label {name}" for name in labels)}
    changed = dict(options)
    for option in (*_BY_PART, "images"):
        given = changed.get(option)
        if isinstance(given, Mapping):
            inputs = flat_names(features.values()) if option == "images" else features
            gone = of_labels.difference(inputs)
            changed[option] = {name: value for name, value in given.items() if name not in gone}
    return changed


def paired(inputs: dict[str, Any], labels: list[Any]) -> tuple[Any, Any]:
    """Inputs and labels as a user's step takes them: alone, or by name and as a list."""
    alone = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    return alone, labels[0] if len(labels) == 1 else labels


def train(*, training: Training, train: Shard, valid: Shard | None = None) -> Trained | None:
    """Train on this rank, as ``Training.train``: the function that all ranks run."""
    if training.validation is not None:
        train, valid = train.split(training.validation, seed=training.random_seed)
    return training.train(train, valid)
