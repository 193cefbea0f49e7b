"""The training loop of PyTorch on one rank."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.data.feed.feed import Feed
from horovod_runner.data.scoring.models.torch import caller
from horovod_runner.data.shard import Shard
from horovod_runner.integrations.training.torch import TorchTraining
from horovod_runner.integrations.training.training import Trained
from horovod_runner.worker.api import check_weights, load_checkpoint, report, save_checkpoint

_CLASS_LOSSES = ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss", "cross_entropy", "nll_loss")


@dataclass
class Batch:
    """One batch on this rank.

    Attributes:
        inputs: the model's inputs, by name.
        labels: one tensor for each label.
        weight: the rows' weights; None without a column of weights.
        share: this rank's real rows times the number of ranks, over the real rows of all ranks:
            with it the average over the ranks is the mean over all rows.
    """

    inputs: dict[str, Any]
    labels: list[torch.Tensor]
    weight: torch.Tensor | None
    share: float


def train(training: TorchTraining, train: Shard, valid: Shard | None) -> Trained | None:
    """Train a module on this rank; see Training.train."""
    model = training.model
    hvd.init()
    device = torch.device("cuda", torch.cuda.current_device()) if _has_gpu() else "cpu"
    if _has_gpu():
        torch.cuda.manual_seed(training.random_seed)
    torch.manual_seed(training.random_seed + hvd.rank())  # ranks drop out different units
    model.to(device)
    made = make_optimizer(model, training.optimizer, training.learning_rate)
    if training.scales_learning_rate:
        _scale(made.param_groups, hvd.size())
    distributed = _distributed(model, made, training)
    history: dict[str, list[float]] = {}
    done = _resume(training, model, distributed, history)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(distributed, root_rank=0)
    batches = train.to_torch(**training.feed(is_training=True))
    checks, val_steps = None, training.validation_steps_per_epoch
    if valid is not None:
        checks = valid.to_torch(**training.feed(is_training=False))
    wanted = training.train_steps_per_epoch
    steps = len(batches) if wanted is None else min(wanted, len(batches))
    batches.skip(done * len(batches))
    for epoch in range(done, training.epochs):
        model.train()
        sums = _epoch(
            training,
            model,
            distributed,
            islice(_batches(training, batches), steps),
            epoch=epoch,
            steps=steps,
        )
        numbers = _means(sums)
        if checks is not None:
            model.eval()
            with torch.no_grad():
                sums = _measure(training, model, islice(_batches(training, checks), val_steps))
            numbers.update({f"val_{name}": value for name, value in _means(sums).items()})
        for name, value in numbers.items():
            history.setdefault(name, []).append(value)
        _end_epoch(training, model, distributed, history, numbers, epoch=epoch, steps=steps)
    if hvd.rank():
        return None
    state = None
    if training.returns_optimizer:
        state = distributed.state_dict()
        if training.scales_learning_rate:
            _scale(state["param_groups"], 1 / hvd.size())
    return Trained(weights_of(model), history, state)


def _scale(groups: Sequence[dict[str, Any]], factor: float) -> None:
    """Multiply the learning rates of an optimizer's groups."""
    for group in groups:
        group["lr"] *= factor


def weights_of(model: torch.nn.Module) -> bytes:
    """The state of a module, in torch's format."""
    saved = io.BytesIO()
    torch.save(model.cpu().state_dict(), saved)
    return saved.getvalue()


def _has_gpu() -> bool:
    return bool(torch.cuda.is_available())


def make_optimizer(model: torch.nn.Module, optimizer: Any, learning_rate: float | None) -> Any:
    """The optimizer of a model.

    Raises:
        TypeError: it is neither an optimizer nor a function that returns one.
        ValueError: it holds the parameters of another model, in several groups.
    """
    made = optimizer
    if not isinstance(made, torch.optim.Optimizer):
        made = optimizer(model.parameters()) if callable(optimizer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer must be an optimizer of torch, or a function from the model's parameters to "
            f"one, lambda parameters: torch.optim.SGD(parameters, lr=0.1), not {optimizer!r}"
        )
    of_model = {id(parameter) for parameter in model.parameters()}
    of_optimizer = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if not of_optimizer <= of_model:
        if len(made.param_groups) > 1:
            raise ValueError(
                "optimizer holds the parameters of another model than model, in "
                f"{len(made.param_groups)} groups: pass a function from the model's parameters to "
                "an optimizer instead"
            )
        settings = {name: v for name, v in made.param_groups[0].items() if name in made.defaults}
        made = type(made)(model.parameters(), **settings)
    if learning_rate is not None:
        for group in made.param_groups:
            group["lr"] = learning_rate
    return made


def _distributed(model: torch.nn.Module, optimizer: Any, training: TorchTraining) -> Any:
    distributed = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=training.compression_of(hvd),
        backward_passes_per_step=training.backward_passes_per_step,
    )
    # Horovod makes a new optimizer of the groups alone: momentum that there is would be lost.
    distributed.load_state_dict(optimizer.state_dict())
    return distributed


def _resume(
    training: TorchTraining, model: torch.nn.Module, optimizer: Any, history: dict[str, list[float]]
) -> int:
    """Load the checkpoint to resume from; returns the number of epochs that are done."""
    loaded = load_checkpoint()
    if loaded is None:
        return 0
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    if training.scales_learning_rate:  # the checkpoint may come from another number of ranks
        _scale(optimizer.param_groups, hvd.size() / loaded.state["ranks"])
    history.update(loaded.state["history"])
    return int(loaded.state["epoch"])


def _batches(training: TorchTraining, feed: Feed[Any]) -> Iterator[Batch]:
    """The batches of the next epoch, without rows that only pad the last ones."""
    real = torch.tensor([feed.real_rows(step) for step in range(len(feed))], dtype=torch.float64)
    if hvd.size() > 1:
        real = hvd.allreduce(real, op=hvd.Sum, name="horovod_runner.integrations.spark_ml.rows")
    for step, parts in enumerate(feed):
        rows = feed.real_rows(step)
        share = rows * hvd.size() / float(real[step])
        # A rank without rows takes part with a row that counts nothing.
        inputs, labels, weight = training.split_parts([part[: max(1, rows)] for part in parts])
        yield Batch(inputs, labels, weight, share)


def _epoch(
    training: TorchTraining,
    model: torch.nn.Module,
    optimizer: Any,
    batches: Iterator[Batch],
    *,
    epoch: int,
    steps: int,
) -> dict[str, torch.Tensor]:
    """Train with some batches; returns the sums of the metrics over rows."""
    call = caller(model)
    sums: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        if training.minibatch is not None:
            outputs, loss = training.minibatch(training, model, optimizer, batch, step)
        else:
            if step % training.backward_passes_per_step == 0:
                optimizer.zero_grad()
            outputs = as_list(call(batch.inputs))
            loss = total_loss(training, outputs, batch.labels, batch.weight)
            (loss * batch.share).backward()
            if (step + 1) % training.backward_passes_per_step == 0 or step + 1 == steps:
                optimizer.step()
        _add(sums, training, outputs, batch, loss)
        if training.verbose and step % 10 == 9:
            done = epoch * steps + step + 1
            report(
                step=done, epoch=epoch + 1, total_steps=training.epochs * steps, loss=loss.detach()
            )
    return sums


def _measure(
    training: TorchTraining, model: torch.nn.Module, batches: Iterator[Batch]
) -> dict[str, torch.Tensor]:
    """Compute loss and metrics of some batches; returns their sums over rows."""
    call = caller(model)
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        outputs = as_list(call(batch.inputs))
        loss = total_loss(training, outputs, batch.labels, batch.weight)
        _add(sums, training, outputs, batch, loss)
    return sums


def _add(
    sums: dict[str, torch.Tensor],
    training: TorchTraining,
    outputs: Sequence[torch.Tensor],
    batch: Batch,
    loss: torch.Tensor,
) -> None:
    rows = len(batch.labels[0]) if batch.share else 0
    values: dict[str, Any] = {"loss": loss.detach()}
    with torch.no_grad():
        for name, metric in training.named_metrics.items():
            output = outputs[metric.label]
            label = fitted_label(training.loss_of(metric.label), output, batch.labels[metric.label])
            values[name] = metric.function(output, label)
    for name, value in {**values, "": 1.0}.items():
        added = torch.as_tensor(value).detach().double().cpu() * rows
        sums[name] = sums[name] + added if name in sums else added


def _means(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """The means over the rows of all ranks."""
    names = sorted(sums)
    totals = torch.stack([sums[name] for name in names])
    if hvd.size() > 1:
        totals = hvd.allreduce(totals, op=hvd.Sum, name="horovod_runner.ml.metrics")
    by_name = dict(zip(names, totals.tolist(), strict=True))
    rows = by_name.pop("")
    return {name: total / rows for name, total in by_name.items()}


def _end_epoch(
    training: TorchTraining,
    model: torch.nn.Module,
    optimizer: Any,
    history: dict[str, list[float]],
    numbers: dict[str, float],
    *,
    epoch: int,
    steps: int,
) -> None:
    check_weights(model, epoch + 1)
    done = (epoch + 1) * steps
    report(step=done, epoch=epoch + 1, total_steps=training.epochs * steps, **numbers)
    if training.saves:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": history,
            "epoch": epoch + 1,
            "ranks": hvd.size(),
        }
        save_checkpoint(state, done, {**numbers, "epoch": epoch + 1})
    for callback in training.callbacks:
        callback.on_epoch_end(epoch, dict(numbers))


def as_list(outputs: Any) -> list[torch.Tensor]:
    """The outputs of a model, which may be a tensor, a tuple or a dict of tensors."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return list(outputs.values() if hasattr(outputs, "values") else outputs)


def total_loss(
    training: TorchTraining,
    outputs: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum of the losses of all outputs.

    Raises:
        ValueError: the model has another number of outputs than there are labels.
    """
    training.check_outputs(len(outputs))
    scales = training.loss_weights or [1.0] * len(outputs)
    parts = []
    for number, (scale, output, label) in enumerate(zip(scales, outputs, labels, strict=True)):
        loss = training.loss_of(number)
        parts.append(scale * _loss(loss, output, fitted_label(loss, output, label), weight))
    return torch.stack(parts).sum()


def _loss(
    loss: Callable[..., Any],
    output: torch.Tensor,
    label: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    if weight is None:
        value: torch.Tensor = loss(output, label)
        return value
    by_row = unreduced(loss)(output, label)
    return (by_row.reshape(len(by_row), -1).mean(dim=1) * weight).mean()


def unreduced(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The same loss with one value per row.

    Raises:
        TypeError: it can only be a mean.
    """
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        by_row: Any = copy.copy(loss)
        by_row.reduction = "none"
        unreduced_loss: Callable[..., Any] = by_row
        return unreduced_loss
    if "reduction" in inspect.signature(loss).parameters:
        return lambda output, label: loss(output, label, reduction="none")
    raise TypeError(
        f"sample_weight_col requires a loss with a parameter reduction, as those of torch have, "
        f"not {loss!r}"
    )


def fitted_label(
    loss: Callable[..., Any], output: torch.Tensor, label: torch.Tensor
) -> torch.Tensor:
    """The label as a loss takes it.

    Class numbers become whole numbers. Other labels get the output's type, and its shape where both
    have as many numbers: (rows,) against (rows, 1) would be broadcast to (rows, rows).
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    if name in _CLASS_LOSSES and label.ndim < output.ndim:
        return label.long()
    if label.shape != output.shape and label.numel() == output.numel():
        label = label.reshape(output.shape)
    return label.to(output.dtype) if output.is_floating_point() else label
