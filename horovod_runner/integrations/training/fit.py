"""fit: trains a network on a dataset, wherever both are, without a line of Horovod."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from horovod_runner.common.arguments import did_you_mean, meant
from horovod_runner.common.options import ALIASES, CheckpointConfig, grouped, where_options_are
from horovod_runner.data.feed.fields import flat_names
from horovod_runner.data.shard import check_validation
from horovod_runner.data.sources import DataFrameSource, source_of
from horovod_runner.integrations.training.checks import check_source
from horovod_runner.integrations.training.fitted import Fitted
from horovod_runner.integrations.training.metrics import metrics_of
from horovod_runner.integrations.training.rows import only, split
from horovod_runner.integrations.training.schedules import Curve, Factor, schedule_of
from horovod_runner.integrations.training.training import Names, Precision, Training, train
from horovod_runner.integrations.training.where import Choice, Place, Ranks, choose
from horovod_runner.run.runner import HorovodRunner
from horovod_runner.sinks.terminal import TerminalSink

if TYPE_CHECKING:
    from horovod_runner.data.feed.options import Dtypes, PadRagged, Transform
    from horovod_runner.data.pack.images import Image

Kind = Literal["torch", "keras", "lightning"]
_NAMES: Final = Names("x", "y", "weight")
_GREATER_IS_BETTER: Final = ("acc", "auc", "f1", "precision", "recall", "r2")


def fit(
    model: Any,
    data: Any,
    *,
    x: str | Sequence[str] | Mapping[str, str | list[str]] | None = None,
    y: str | Sequence[str] | None = None,
    loss: Any = None,
    optimizer: Any = None,
    global_batch: int = 32,
    epochs: int = 1,
    validation: float | str | Any = None,
    metrics: Sequence[Any] | Mapping[str, Any] = (),
    weight: str | None = None,
    ranks: Ranks | None = None,
    where: Place | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_every: int | None = None,
    schedule: Curve | Factor | None = None,
    warmup: int = 0,
    clip_norm: float | None = None,
    accumulate: int = 1,
    precision: Precision = "float32",
    patience: int | None = None,
    monitor: str | None = None,
    step: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] = (),
    shuffle: bool = True,
    seed: int = 0,
    sync_batch_norm: bool = True,
    dtypes: Dtypes | None = None,
    pad_ragged: PadRagged | None = None,
    images: Mapping[str, Image] | None = None,
    transform: Transform | None = None,
    trainer_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Fitted:
    """Train a network on a dataset, and return it with its metrics.

        result = fit(
            Net, digits, x="image", y="label", loss=CrossEntropyLoss(),
            optimizer=lambda parameters: Adam(parameters, 3e-3), global_batch=64, epochs=5,
            validation=0.2, metrics=["accuracy"], ranks=2,
        )
        result.model, result.metrics, result.plot(), result.predict(df)

    The weights do not depend on the number of ranks, but for rounding and for what a network draws
    at random in training (dropout): each step is one over ``global_batch`` rows, and batch
    normalization has the statistics of all of them. They do where Spark divides a DataFrame among
    hosts that share no folder (``shared_dir``).

    Args:
        model: a torch module, a Keras 3 model or a Lightning module; or its class, or a function
            that makes it, which is called once, with ``seed`` as the seed of its weights.
        data: the rows: a DataFrame of Spark or pandas, an Arrow table, or one of
            :mod:`horovod_runner.data`, such as ``parquet(...)``.
        x: the columns of the network's input: one, or a list of columns side by side; or a dict
            with several inputs, by the names of the parameters of ``forward`` or of Keras's input
            layers. A Lightning module gets batches (inputs, labels), and without ``x`` and ``y`` a
            dict of all columns.
        y: the column of the labels; a list with one column for each output of the network.
        loss: torch: a function of (output, label), or a list with one for each output. Keras: as
            for ``compile``. A Lightning module has its own, as it has its optimizer.
        optimizer: torch: an optimizer of the model's parameters, or a function from parameters to
            one. Keras: an optimizer or its name.
        global_batch: rows of a step, over all ranks.
        epochs: how often all rows are trained with.
        validation: the fraction of the rows to validate with after each epoch, drawn by ``seed``;
            or the column that is true in those rows; or another dataset. None: none.
        metrics: torch: "accuracy", "mae", "mse", or functions of (output, label) that return a mean
            over rows; a dict gives them names. Keras: as for ``compile``.
        weight: a column with the weight of each row.
        ranks: how many processes train; or the least and the most, ``(2, 8)``, of which those that
            are there take part. None: one for each GPU of this machine, or each task of a Slurm
            allocation, and otherwise one.
        where: "local", "spark" or "slurm". None: Slurm in an allocation of several tasks, Spark if
            the session of ``data``, or the active one, is on a cluster, and otherwise this machine.
        checkpoint_dir: where a checkpoint is saved after each epoch: a path or URL.
        resume: whether to continue from the latest checkpoint there, if there is one.
        save_every: also save after this many steps.
        schedule: how the learning rate falls after the warm-up: "constant", "linear" or "cosine"
            (both to 0 at the end); or a function of (steps done, all steps) that returns its
            factor.
        warmup: steps in which the learning rate rises from 0.
        clip_norm: the largest norm of all gradients together.
        accumulate: divide a step's rows into this many parts, one after the other, to save memory.
        precision: "bfloat16" or "float16" compute layers in that type; weights stay float32.
        patience: end after this many epochs in which ``monitor`` did not improve.
        monitor: the metric that tells the best epoch and checkpoint. None: "val_loss", or "loss"
            without validation. Greater is better if its name has acc, auc, f1, precision, recall or
            r2 in it.
        step: torch: a function of (model, inputs, labels) that returns the mean loss, or the loss
            and the outputs, in place of calling the network and ``loss``.
        callbacks: torch: objects with ``on_epoch_end(epoch, metrics)``, and if they like
            ``on_step_end(step, loss)``; called on each rank. Keras, Lightning: their callbacks.
        shuffle: whether to shuffle the rows, differently in each epoch.
        seed: of the weights, the shuffling, the rows to validate with, and dropout.
        sync_batch_norm: whether batch normalization of torch and Keras has the statistics of all
            ranks' rows.
        dtypes: types to convert numbers to, by input or label, or one for all.
        pad_ragged: for ragged columns: a number that fills up short rows.
        images: for columns of images: what they become, by column.
        transform: called with each batch, a dict of NumPy arrays; what it returns replaces it.
        trainer_options: Lightning: further arguments of its Trainer.
        options: of :class:`horovod_runner.HorovodRunner` and its groups, by name: ``max_restarts``,
            ``sinks``, ``gpus_per_rank``, ``hang_timeout`` and others.

    Returns:
        The trained network, and what was measured.

    Raises:
        DataError: a column does not exist or cannot become a tensor, or a part has no rows.
        TypeError: an argument has the wrong type, or there is no such argument.
        ValueError: an argument is out of range, is missing, or does not fit the others.
        Exception: as :meth:`horovod_runner.HorovodRunner.run` says.
    """
    __tracebackhide__ = True
    given = dict(locals())
    given.pop("options")
    runner_options = _runner_options(options)
    _check_numbers(given)
    network = made(model, seed, precision)
    kind = kind_of(network)
    _check_fitting(kind, {**given, "network": network})
    other = None
    if validation is not None and source_of(validation) is not None:
        validation, other = None, validation
    if validation is not None:
        check_validation(validation)
    named = metrics_of(kind, metrics)
    watched = _watched(kind, monitor, named, validation is not None or other is not None)
    choice = choose(ranks, where, data)
    saves = checkpoint_dir is not None or runner_options.get("max_restarts", 0) > 0
    training = _training_class(kind)(
        model=network,
        features=features_of(x),
        labels=labels_of(y),
        weight=weight,
        options={
            "dtypes": dtypes,
            "pad_ragged": pad_ragged,
            "images": images,
            "transform": transform,
        },
        optimizer=optimizer,
        loss=loss,
        metrics=named,
        global_batch=global_batch,
        epochs=epochs,
        backward_passes_per_step=accumulate,
        shuffle=shuffle,
        random_seed=seed,
        callbacks=tuple(callbacks),
        saves=saves or isinstance(ranks, tuple),
        save_every=save_every,
        # Spark finds the rows of a column by itself.
        validation=None if _is_dataframe(data) and isinstance(validation, str) else validation,
        schedule=schedule_of(schedule, warmup),
        clip_norm=clip_norm,
        precision=precision,
        patience=patience,
        monitor=watched,
        syncs_batch_norm=sync_batch_norm,
        names=_NAMES,
        **({"step": step} if kind == "torch" else {}),
        **_of_lightning(kind, x, trainer_options),
    )
    datasets = _datasets(training, data, other, validation)
    runner = _runner(choice, runner_options, training, checkpoint_dir, resume)
    TerminalSink(1).notice(choice.why)
    trained = runner.run(train, training=training.for_ranks(), **datasets)
    assert runner.last_run is not None  # noqa: S101 - it has run
    return Fitted(training, trained, runner.last_run)


def _of_lightning(kind: Kind, x: Any, trainer_options: Any) -> dict[str, Any]:
    if kind != "lightning":
        return {}
    return {"pairs": x is not None, "trainer_options": trainer_options or {}}


def _is_dataframe(data: Any) -> bool:
    """Whether it is a DataFrame of Spark."""
    return isinstance(source_of(data), DataFrameSource)


def _watched(
    kind: Kind, monitor: str | None, metrics: Any, has_validation: bool
) -> tuple[str, Literal["min", "max"]]:
    """The metric that tells the best epoch, and whether it is low or high there.

    Raises:
        ValueError: there is no such metric.
    """
    name = monitor or ("val_loss" if has_validation else "loss")
    if kind == "torch":
        known = ["loss", *metrics]
        known += [f"val_{each}" for each in known] if has_validation else []
        if name not in known:
            raise ValueError(f"monitor={name!r}, and the metrics are {', '.join(known)}")
    return name, "max" if any(mark in name.lower() for mark in _GREATER_IS_BETTER) else "min"


def made(model: Any, seed: int, precision: Precision = "float32") -> Any:
    """The model, made if ``model`` is a class or a function that makes it.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(model, type) and _bases(model) & {"Module", "Model"}:
        return model
    if not callable(model):
        raise TypeError(
            "model must be a torch module, a Keras model or a Lightning module, or a class or "
            f"function that makes it, not {model!r}"
        )
    with _seeded(seed), _policy(precision):
        return model()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed what networks draw their weights from; Python's and NumPy's state return afterwards."""
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "keras" in sys.modules:
        from horovod_runner.integrations.training.keras_loop import set_seed

        set_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def _policy(precision: Precision) -> Iterator[None]:
    """Let the layers of Keras that are made meanwhile compute in a type of numbers."""
    keras = sys.modules.get("keras")
    if keras is None or precision == "float32":
        yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{precision}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _bases(model: Any) -> set[str]:
    """The names of the classes of frameworks that a model is of."""
    homes = ("torch.", "keras.", "lightning.", "pytorch_lightning.")
    return {
        base.__name__ for base in type(model).__mro__ if f"{base.__module__}.".startswith(homes)
    }


def kind_of(model: Any) -> Kind:
    """Which framework a model is of.

    Raises:
        TypeError: of none.
    """
    bases = _bases(model)
    if "LightningModule" in bases:
        return "lightning"
    if "Model" in bases:  # before torch: a model of Keras on torch is a module, too
        return "keras"
    if "Module" in bases:
        return "torch"
    raise TypeError(
        "model must be a torch module, a Keras model or a Lightning module, or a class or function "
        f"that makes it; it made {model!r}"
    )


def _training_class(kind: Kind) -> type[Any]:
    if kind == "torch":
        from horovod_runner.integrations.training.torch import TorchTraining

        return TorchTraining
    if kind == "keras":
        from horovod_runner.integrations.training.keras import KerasTraining

        return KerasTraining
    from horovod_runner.integrations.training.lightning import LightningTraining

    return LightningTraining


def features_of(x: Any) -> dict[str, str | list[str]]:
    """The inputs of the network, by name.

    Raises:
        TypeError: ``x`` names no columns.
    """
    if x is None:
        return {}
    named: dict[str, str | list[str]] = {}
    if isinstance(x, str):
        named = {x: x}
    elif isinstance(x, Mapping):
        named = {name: c if isinstance(c, str) else list(c) for name, c in x.items()}
    elif isinstance(x, Sequence):
        named = {"+".join(map(str, x)): list(x)}
    flat = flat_names(named.values())
    if not flat or not all(isinstance(name, str) for name in flat):
        raise TypeError(
            "x must name columns: 'image'; or ['age', 'income'] for columns side by side; or "
            f"{{'first': 'image', 'second': ['age', 'income']}} for several inputs; not {x!r}"
        )
    return named


def labels_of(y: Any) -> list[str]:
    """The columns of the labels.

    Raises:
        TypeError: ``y`` names no columns.
    """
    if y is None:
        return []
    names = list(y) if isinstance(y, Sequence) and not isinstance(y, str) else [y]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"y must name the column of the labels, or a list of columns, not {y!r}")
    return names


@dataclass(frozen=True)
class _Rule:
    """Which arguments a kind of model needs, and which do not fit it."""

    needs: Sequence[str]
    refuses: Mapping[str, str]


_OWN = "a Lightning module has its own"
_OF_TRAINER = "it is for Lightning's Trainer"
_RULES: Final[Mapping[Kind, _Rule]] = {
    "torch": _Rule(("x", "y", "loss", "optimizer"), {"trainer_options": _OF_TRAINER}),
    "keras": _Rule(
        ("x", "y"),
        {
            "step": "it replaces the step of a torch module; override train_step of the model",
            "save_every": "Keras models are saved at the ends of epochs",
            "trainer_options": _OF_TRAINER,
        },
    ),
    "lightning": _Rule(
        (),
        {
            "loss": f"{_OWN}, in training_step",
            "optimizer": f"{_OWN}, in configure_optimizers",
            "schedule": f"{_OWN}, in configure_optimizers",
            "warmup": f"{_OWN}, in configure_optimizers",
            "metrics": f"{_OWN}: log them with self.log",
            "step": f"{_OWN}, training_step",
            "weight": "name the column in x, and use it in training_step",
        },
    ),
}
_EXAMPLES: Final = {
    "x": "x='image', the column of the network's input",
    "y": "y='label', the column of the labels",
    "loss": "loss=torch.nn.CrossEntropyLoss()",
    "optimizer": "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)",
}


def _check_fitting(kind: Kind, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an argument is missing, or is not for this kind of model."""
    rule, called = _RULES[kind], f"a {kind.capitalize()} model"
    for name in rule.needs:
        if given[name] is None and not (name == "loss" and given["step"] is not None):
            raise ValueError(f"fit requires {name} for {called}: {_EXAMPLES[name]}")
    for name, why in rule.refuses.items():
        if given[name] != inspect.signature(fit).parameters[name].default:
            raise ValueError(f"{name} is not for {called}: {why}")
    if kind == "keras" and given["precision"] != "float32" and given["network"] is given["model"]:
        raise ValueError(
            f"precision={given['precision']!r}: the layers of a Keras model get their precision "
            "when they are made, so give a function that makes the model"
        )
    if given["resume"] and given["checkpoint_dir"] is None:
        raise ValueError(
            "resume=True continues from the latest checkpoint in checkpoint_dir: name the folder"
        )
    if (given["x"] is None) != (given["y"] is None):
        raise ValueError("give x and y, or neither: a Lightning module then gets all columns")


_AT_LEAST_1: Final = ("global_batch", "epochs", "accumulate", "save_every", "patience")


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name in (*_AT_LEAST_1, "warmup", "seed"):
        value = given[name]
        if value is None and name in ("save_every", "patience"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, not {value!r}")
        if value < (name in _AT_LEAST_1):
            raise ValueError(f"{name} must be {int(name in _AT_LEAST_1)} or more, not {value}")
    if given["global_batch"] % given["accumulate"]:
        raise ValueError(
            f"accumulate={given['accumulate']} does not divide global_batch="
            f"{given['global_batch']} into equal parts: change one of them"
        )
    if given["precision"] not in get_args(Precision):
        raise ValueError(
            f"precision must be 'float32', 'bfloat16' or 'float16', not {given['precision']!r}"
        )
    clip = given["clip_norm"]
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float)):
        raise TypeError(f"clip_norm must be a number, not {clip!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip_norm must be above 0, not {clip}")
    if given["monitor"] is not None and not isinstance(given["monitor"], str):
        raise TypeError(f"monitor must be the name of a metric, not {given['monitor']!r}")


_ALIASES: Final = {
    **ALIASES,
    **dict.fromkeys(("features", "feature_cols", "inputs", "X", "featuresCol"), "x"),
    **dict.fromkeys(("labels", "label_cols", "target", "targets", "labelCol"), "y"),
    **dict.fromkeys(("batch_size", "batch"), "global_batch"),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("np", "num_proc", "num_workers", "world_size", "size", "n"), "ranks"),
    **dict.fromkeys(("val", "validation_data", "validation_split", "valid"), "validation"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clip"), "clip_norm"),
    **dict.fromkeys(("accumulation", "accumulate_grad_batches"), "accumulate"),
    **dict.fromkeys(("early_stopping", "early_stopping_rounds"), "patience"),
    **dict.fromkeys(("sample_weight", "weights", "weight_col", "weightCol"), "weight"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    **dict.fromkeys(("amp", "mixed_precision", "fp16", "bf16"), "precision"),
}


def _runner_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of HorovodRunner.

    Raises:
        TypeError: there is no option of a name, or fit has an argument for it.
    """
    if "np" in options:
        raise TypeError("fit has no argument 'np': use ranks=, and where=")
    known = where_options_are()
    for name in options:
        if name not in known:
            own = inspect.signature(fit).parameters
            text = meant(name, own, _ALIASES, {each: each for each in known})
            raise TypeError(f"fit has no argument {name!r}.{did_you_mean(text)}")
    return grouped(options)


def _datasets(training: Training, data: Any, other: Any, held_out: Any) -> dict[str, Any]:
    """The datasets as arguments of ``run``, checked on their first rows."""
    given = {"train": data}
    if other is not None:
        given["valid"] = other
    for name, value in given.items():
        source = source_of(value)
        if source is None:
            called = "data" if name == "train" else "validation"
            raise TypeError(
                f"{called} must be a DataFrame of Spark or pandas, an Arrow table, or one of "
                f"horovod_runner.data (parquet, delta, petastorm), not {type(value).__name__}"
            )
        check_source(training, source)
    if _is_dataframe(data) and isinstance(held_out, str):
        given["train"], given["valid"] = split(data, held_out, training.random_seed)
    return {
        name: only(value, training.read_columns)
        if _is_dataframe(value) and training.features
        else value
        for name, value in given.items()
    }


def _runner(
    choice: Choice,
    options: Mapping[str, Any],
    training: Training,
    checkpoint_dir: str | os.PathLike[str] | None,
    resume: bool,
) -> HorovodRunner:
    metric, mode = training.monitor
    config = options.get("checkpoint_config", CheckpointConfig())
    if config.metric is None:
        config = replace(config, metric=metric, mode=mode)
    given = grouped({**options, "checkpoint_config": config, **choice.options})
    return HorovodRunner(np=choice.np, checkpoint_dir=checkpoint_dir, resume=resume, **given)
