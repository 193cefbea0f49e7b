"""``model.fit`` on Keras 3, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras

import horovod_runner.integrations.keras as hvd
from horovod_runner.data.scoring.models.keras import arranged, input_names, readable
from horovod_runner.data.shard import Shard
from horovod_runner.integrations.keras.fitting.patch import feed_behind
from horovod_runner.integrations.keras.reporting import is_number
from horovod_runner.integrations.training.keras import KerasTraining, set_seed
from horovod_runner.integrations.training.schedules import Factor
from horovod_runner.integrations.training.training import Trained


def train(training: KerasTraining, train: Shard, valid: Shard | None) -> Trained | None:
    """Train a Keras model on this rank; see Training.train."""
    hvd.init()
    set_seed(training.random_seed + hvd.rank())  # ranks drop out different units
    network = training.read_model()
    if training.syncs_batch_norm and hvd.size() > 1:
        _synchronize_batch_norm(network)
    optimizer = keras.saving.deserialize_keras_object(training.optimizer)
    if training.learning_rate is not None:
        optimizer.learning_rate = training.learning_rate
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if training.scales_learning_rate and not isinstance(optimizer._learning_rate, schedule):
        optimizer.learning_rate = float(optimizer.learning_rate) * hvd.size()
    arguments: dict[str, Any] = {"compression": training.compression_of(hvd)}
    if training.backward_passes_per_step > 1:
        arguments["backward_passes_per_step"] = training.backward_passes_per_step
        arguments["average_aggregated_gradients"] = training.global_batch is not None
    if training.clip_norm is not None:
        optimizer.global_clipnorm = training.clip_norm
    network.compile(
        hvd.DistributedOptimizer(optimizer, **arguments),
        loss=training.loss,
        loss_weights=training.loss_weights,
        metrics=training.metrics or None,  # an own train_step need not update them
    )
    reports = hvd.callbacks.ReportCallback(save_every=int(training.saves))
    loaded = reports.load(network)  # now: Keras may take batches before it calls the callback
    before = {} if loaded is None else dict(loaded.metrics)
    done = int(before.pop("epoch", 0))
    arrange = partial(_arranged, training, input_names(network))
    scales = _scales(training, network, training.backward_passes_per_step)
    batches, steps = _batches(
        training, train, partial(arrange, scales), is_training=True, done=done
    )
    checks, val_steps = (None, None)
    if valid is not None:
        scales = _scales(training, network, 1)
        checks, val_steps = _batches(training, valid, partial(arrange, scales), is_training=False)
    history = network.fit(
        batches,
        epochs=training.epochs,
        steps_per_epoch=steps,
        validation_data=checks,
        validation_steps=val_steps,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *training.callbacks,
            *_policies(training, optimizer, steps),
            reports,
        ],
    )
    if hvd.rank():
        return None
    # A checkpoint has the metrics of its epoch only.
    values = {name: [float(value)] for name, value in before.items()}
    for name, of_epochs in history.history.items():
        if all(map(is_number, of_epochs)):
            values.setdefault(name, []).extend(map(float, of_epochs))
    return Trained(network.get_weights(), values)


def _policies(training: KerasTraining, optimizer: Any, steps: int) -> list[Any]:
    """The callbacks that change the learning rate and end the training."""
    made: list[Any] = []
    if training.schedule is not None:
        made.append(_Rates(training, training.schedule, optimizer, steps))
    if training.patience is not None:
        name, mode = training.monitor
        made.append(hvd.callbacks.EarlyStopping(name, patience=training.patience, mode=mode))
    return made


class _Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate before each step."""

    def __init__(self, training: KerasTraining, factor: Factor, optimizer: Any, steps: int) -> None:
        super().__init__()
        self._factor, self._optimizer, self._steps = factor, optimizer, steps
        self._start = float(optimizer.learning_rate)
        self._passes = training.backward_passes_per_step
        self._whole = -(-training.epochs * steps // self._passes)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        done = (self._epoch * self._steps + batch) // self._passes
        self._optimizer.learning_rate = self._start * self._factor(done, self._whole)


def _synchronize_batch_norm(network: Any) -> None:
    """Let the batch normalization of a model have the statistics of all ranks, in place."""
    from horovod_runner.integrations.keras.distributed.batch_norm import SyncBatchNormalization

    for layer in network._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization:
            layer.__class__ = SyncBatchNormalization
            layer._reduction_name = ""


def _batches(
    training: KerasTraining,
    shard: Shard,
    arrange: Callable[[Sequence[Any]], tuple[Any, ...]],
    *,
    is_training: bool,
    done: int = 0,
) -> tuple[Any, int]:
    """The batches that Keras iterates over, after some epochs, and their number in an epoch."""
    options = training.feed(shard, is_training=is_training)
    transform = options.pop("transform", None)
    wanted = training.train_steps_per_epoch if is_training else training.validation_steps_per_epoch
    if training.backend == "tensorflow" and transform is None:
        dataset = shard.to_tf(**options, sample_weights=True)
        count = len(dataset)
        if (source := feed_behind(dataset)) is not None:
            source.skip(done * count)
        steps = min(wanted or count, count)
        mapped = dataset.map(lambda *parts: arrange(parts))
        return (mapped.take(steps) if is_training and steps < count else mapped), steps
    if training.backend == "torch" and not is_training:
        # A feed and not a generator: the validation leaves its padding out.
        def changed(batch: Any) -> Any:
            return arrange([*(batch if transform is None else transform(batch)).values()])

        checks = shard.batches(**options, transform=changed, sample_weights=True)
        return checks, min(wanted or len(checks), len(checks))
    feed = shard.batches(**options, transform=transform, sample_weights=True)
    steps = min(wanted or len(feed), len(feed))
    feed.skip(done * steps)  # the next epoch goes on with what is left of one
    return _forever(feed, arrange), steps


def _forever(feed: Any, arrange: Callable[[Sequence[Any]], tuple[Any, ...]]) -> Iterator[Any]:
    while True:
        for batch in feed:
            yield arrange([*readable(batch).values()])


def _scales(training: KerasTraining, network: Any, passes: int) -> list[int]:
    """For each label, the factor of the weights of its rows.

    A step averages over the ranks and over its ``passes``. A loss that adds up rows is multiplied
    by both numbers, so that the average is the sum over all rows of the step.
    """
    loss = training.loss
    if isinstance(loss, Mapping):
        losses = [loss.get(name) for name in network.output_names]
    else:
        losses = list(loss) if isinstance(loss, list | tuple) else [loss] * len(training.labels)
    if training.global_batch is None:  # each rank has a batch of its own
        return [1] * len(losses)
    sums = [getattr(each, "reduction", "") == "sum" for each in losses]
    return [hvd.size() * passes if is_sum else 1 for is_sum in sums]


def _arranged(
    training: KerasTraining, names: Sequence[str], scales: Sequence[int], parts: Sequence[Any]
) -> tuple[Any, ...]:
    """The parts of a batch as Keras takes them: inputs, labels and weights."""
    *parts, is_real = parts
    inputs, labels, weight = training.split_parts(parts)
    weight = is_real if weight is None else weight * is_real
    x = arranged(inputs, names)
    if isinstance(x, list):  # which tf.data takes for one tensor
        x = tuple(x)
    weights = tuple(weight if scale == 1 else weight * scale for scale in scales)
    if len(labels) == 1:
        return x, labels[0], weights[0]
    return x, tuple(labels), weights
