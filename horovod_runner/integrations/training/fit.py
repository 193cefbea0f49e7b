"""fit: trains a network on a dataset, wherever both are, without a line of Horovod."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.common.arguments import did_you_mean, meant
from horovod_runner.common.options import CheckpointConfig, grouped, where_options_are
from horovod_runner.data.feed.part import check_validation
from horovod_runner.data.sources import DataFrameSource, source_of
from horovod_runner.integrations.training.arguments import (
    ALIASES,
    check_fitting,
    check_numbers,
    features_of,
    labels_of,
    watched,
)
from horovod_runner.integrations.training.checks import check_source
from horovod_runner.integrations.training.fitted import Fitted
from horovod_runner.integrations.training.metrics import metrics_of
from horovod_runner.integrations.training.network import Kind, kind_of, made, training_class
from horovod_runner.integrations.training.rows import only, split
from horovod_runner.integrations.training.schedules import Curve, Factor, schedule_of
from horovod_runner.integrations.training.training import Names, Precision, Training, train
from horovod_runner.integrations.training.where import Choice, Place, Ranks, choose
from horovod_runner.run.runner import HorovodRunner
from horovod_runner.sinks.terminal import TerminalSink

if TYPE_CHECKING:
    from horovod_runner.data.feed.options import Dtypes, PadRagged, Transform
    from horovod_runner.data.pack.images import Image

_NAMES: Final = Names("x", "y", "weight", "x=['age', 'income']")


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

    For example::

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
            that makes it, which is called with ``seed`` as the seed of its weights: once, or again
            if it is the first to import its framework.
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
        pad_ragged: for ragged columns, by input or label: a number that fills up short rows.
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
    runner_options = _runner_options(options)
    check_numbers(given)
    network = made(model, seed, precision)
    kind = kind_of(network)
    parameters = inspect.signature(fit).parameters
    check_fitting(kind, {**given, "network": network}, parameters)
    other = None
    if validation is not None and source_of(validation) is not None:
        validation, other = None, validation
    if validation is not None:
        check_validation(validation)
    if kind == "keras" and loss is None:
        loss = network.loss  # that it is compiled with
    named = metrics_of(kind, metrics, loss)
    best = watched(kind, monitor, named, validation is not None or other is not None)
    choice = choose(ranks, where, data)
    feed = {"dtypes": dtypes, "pad_ragged": pad_ragged, "images": images, "transform": transform}
    own: dict[Kind, dict[str, Any]] = {
        "torch": {"step": step},
        "lightning": {"pairs": x is not None, "trainer_options": trainer_options or {}},
    }
    saves = checkpoint_dir is not None or runner_options.get("max_restarts", 0) > 0
    training = training_class(kind)(
        model=network,
        features=features_of(x),
        labels=labels_of(y),
        weight=weight,
        options=feed,
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
        monitor=best,
        syncs_batch_norm=sync_batch_norm,
        names=_NAMES,
        **own.get(kind, {}),
    )
    datasets = _datasets(training, data, other, validation)
    runner = _runner(choice, runner_options, training, checkpoint_dir, resume)
    TerminalSink(1).notice(choice.why)
    trained = runner.run(train, training=training.for_ranks(), **datasets)
    assert runner.last_run is not None  # noqa: S101 - it has run
    return Fitted(training, trained, runner.last_run)


def _is_dataframe(data: Any) -> bool:
    return isinstance(source_of(data), DataFrameSource)


def _runner_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of HorovodRunner, or TypeError."""
    if "np" in options:
        raise TypeError("fit has no argument 'np': use ranks=, and where=")
    known = where_options_are()
    for name in options:
        if name not in known:
            own = inspect.signature(fit).parameters
            text = meant(name, own, ALIASES, {each: each for each in known})
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
