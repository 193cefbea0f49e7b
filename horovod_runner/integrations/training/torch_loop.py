"""The training loop of PyTorch on one rank."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.data.feed.feed import Feed
from horovod_runner.data.scoring.models.torch import caller
from horovod_runner.data.shard import Shard
from horovod_runner.integrations.loops.prepare import prepare
from horovod_runner.integrations.training import batch_norm
from horovod_runner.integrations.training.losses import (
    added,
    as_list,
    divisor_of,
    fitted_label,
    is_sum,
    losses_of,
)
from horovod_runner.integrations.training.optimizer import make_optimizer, scale
from horovod_runner.integrations.training.sums import Sums
from horovod_runner.integrations.training.torch import TorchTraining
from horovod_runner.integrations.training.training import Trained, Training, paired
from horovod_runner.worker.api import check_weights, load_checkpoint, report, save_checkpoint

_REPORTED = 10  # steps from one report to the next


@dataclass(slots=True)
class Batch:
    """One batch on this rank."""

    inputs: dict[str, Any]  # the model's, by name
    labels: list[torch.Tensor]
    weight: torch.Tensor | None  # the rows' weights; None without a column of weights
    rows: int  # this rank's, without padding
    # The rows times the number of ranks, over the rows of all ranks in the whole step: with it the
    # average over the ranks is the mean over all rows of the step.
    share: float
    part: float  # the rows of all ranks in the batch, over those in the whole step
    step_rows: float  # the rows of all ranks in the whole step
    ends_step: bool  # whether the optimizer steps after it


def train(training: TorchTraining, train: Shard, valid: Shard | None) -> Trained | None:
    """Train a module on this rank; see Training.train."""
    model = training.model
    hvd.init()
    torch.manual_seed(training.random_seed + hvd.rank())  # ranks drop out different units
    made = make_optimizer(model, training.optimizer, training.learning_rate)
    if training.scales_learning_rate:
        scale(made.param_groups, hvd.size())
    model, optimizer = prepare(
        model,
        made,
        compression=training.compression_of(hvd),
        backward_passes_per_step=training.backward_passes_per_step,
    )
    batches = train.to_torch(**training.feed(train, is_training=True))
    checks = None if valid is None else valid.to_torch(**training.feed(valid, is_training=False))
    loop = _Loop(training, model, optimizer, batches)
    loop.resume()
    while loop.epoch < training.epochs and not loop.is_over:
        loop.train_epoch()
        if checks is not None:
            loop.validate(checks)
        loop.end_epoch()
    if hvd.rank():
        return None
    state = None
    if training.returns_optimizer:
        state = loop.optimizer.state_dict()
        if training.scales_learning_rate:
            scale(state["param_groups"], 1 / hvd.size())
    return Trained(weights_of(model), loop.history, state)


class _Loop:
    """The state of a training on this rank, between its batches."""

    def __init__(
        self, training: TorchTraining, model: torch.nn.Module, optimizer: Any, batches: Feed[Any]
    ) -> None:
        self.training, self.model, self.optimizer = training, model, optimizer
        self.history: dict[str, list[float]] = {}  # the metrics of the epochs that are done
        self.epoch = 0  # how many epochs are done
        self.is_over = False  # whether the metrics have stopped improving
        self._batches = batches
        self._call = caller(model)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._passes = training.backward_passes_per_step
        self._count = min(training.train_steps_per_epoch or len(batches), len(batches))
        self._steps = -(-self._count // self._passes)  # of the optimizer, in an epoch
        self._step = 0  # of the epoch, done
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._numbers: dict[str, float] = {}  # the metrics of the epoch
        self._sums = self._no_sums()  # of the epoch's metrics, over rows
        self._ranks = hvd.size()
        # For each label. Not asked at each step: a module takes long to say that it lacks a name.
        self._are_sums = [is_sum(training.loss_of(n)) for n in range(len(training.labels))]
        # For each batch of a feed: its rows, share, part and step_rows.
        self._known_shares: dict[Feed[Any], list[tuple[int, float, float, float]]] = {}
        self._step_callbacks = [
            callback.on_step_end
            for callback in training.callbacks
            if hasattr(callback, "on_step_end")
        ]
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if training.precision != "float32":
            self._autocast = torch.autocast(self._device.type, getattr(torch, training.precision))
        self._scaler = None
        if training.precision == "float16" and self._device.type == "cuda":
            self._scaler = torch.amp.GradScaler("cuda")
        self._rows = batch_norm.CountedRows()
        if training.syncs_batch_norm and self._ranks > 1:
            self._rows = batch_norm.synchronize(model)

    def train_epoch(self) -> None:
        """Train with the rest of the epoch's batches."""
        training = self.training
        self.model.train()
        if not self._step:
            self._sums = self._no_sums()
        first = self._step * self._passes
        batches = islice(self._parts(self._batches, first), self._count - first)
        for number, batch in enumerate(batches, first):
            if training.minibatch is not None:
                outputs, loss = training.minibatch(
                    training, self.model, self.optimizer, batch, number
                )
                weighted = loss * batch.share
            else:
                outputs, loss, weighted = self._learn(batch)
            self._add(outputs, batch, weighted)
            if batch.ends_step:
                self._end_step(loss)
        self._numbers = self._sums.means()

    def _learn(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Forward, backward and, at the end of a step, the optimizer's step.

        Returns:
            The outputs, the loss over this rank's rows, and its share of the step's loss.
        """
        training, optimizer = self.training, self.optimizer
        outputs, losses = self._forward(batch)
        weighted = self._weighted(batch, losses)
        scaled = weighted if self._scaler is None else self._scaler.scale(weighted)
        scaled.backward()
        if batch.ends_step:
            self._set_rates()
            if self._scaler is not None:
                self._scaler.unscale_(optimizer)
            if training.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.clip_norm)
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
                self._scaler.update()
            optimizer.zero_grad()
        return outputs, added(losses), weighted

    def _forward(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs, and the losses of each, or of all, over this rank's rows."""
        training = self.training
        self._rows.count = batch.rows > 0
        with self._autocast:
            if training.step is None:
                outputs = as_list(self._call(batch.inputs))
                return outputs, losses_of(training, outputs, batch.labels, batch.weight)
            result = training.step(self.model, *paired(batch.inputs, batch.labels))
        if isinstance(result, tuple):
            return as_list(result[1]), [result[0]]
        return [], [result]

    def _set_rates(self) -> None:
        schedule = self.training.schedule
        if schedule is not None:
            steps = self.training.epochs * self._steps
            factor = schedule(self.epoch * self._steps + self._step, steps)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def _end_step(self, loss: torch.Tensor) -> None:
        training = self.training
        self._step += 1
        done = self.epoch * self._steps + self._step
        if training.verbose and self._step % _REPORTED == 0:
            report(
                step=done,
                epoch=self.epoch + 1,
                total_steps=training.epochs * self._steps,
                loss=loss.detach(),
            )
        for on_step_end in self._step_callbacks:
            on_step_end(done, loss)
        is_due = training.save_every is not None and done % training.save_every == 0
        if is_due and self._step < self._steps:
            self._save(done, {"epoch": self.epoch})

    def validate(self, feed: Feed[Any]) -> None:
        """Compute loss and metrics of the rows to validate with."""
        self.model.eval()
        train_sums, self._sums = self._sums, self._no_sums()
        batches = islice(self._parts(feed), self.training.validation_steps_per_epoch)
        with torch.no_grad():
            for batch in batches:
                outputs, losses = self._forward(batch)
                self._add(outputs, batch, self._weighted(batch, losses))
        means = self._sums.means()
        self._numbers.update({f"val_{name}": value for name, value in means.items()})
        self._sums = train_sums

    def end_epoch(self) -> None:
        """Note the epoch's metrics, save a checkpoint, and decide whether to go on."""
        training, numbers = self.training, self._numbers
        for name, value in numbers.items():
            self.history.setdefault(name, []).append(value)
        self.epoch, self._step = self.epoch + 1, 0
        done = self.epoch * self._steps
        check_weights(self.model, self.epoch)
        report(step=done, epoch=self.epoch, total_steps=training.epochs * self._steps, **numbers)
        self.is_over = stops(training, self.history)
        if training.saves:
            self._save(done, {**numbers, "epoch": self.epoch})
        for callback in training.callbacks:
            callback.on_epoch_end(self.epoch - 1, dict(numbers))

    def _save(self, done: int, numbers: dict[str, float]) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "epoch": self.epoch,
            "step": self._step,
            # Of all ranks: another number of ranks may go on with them.
            "sums": self._sums.totals() if self._step else {},
            "feed": self._batches.state_dict(),
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
            "ranks": self._ranks,
        }
        save_checkpoint(state, done, numbers)

    def resume(self) -> None:
        """Continue from the checkpoint that the run resumes from, if there is one."""
        loaded = load_checkpoint()
        if loaded is None:
            return
        state = loaded.state
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.training.scales_learning_rate:  # it may come from another number of ranks
            scale(self.optimizer.param_groups, self._ranks / state["ranks"])
        self.history.update(state["history"])
        self.epoch, self._step = int(state["epoch"]), int(state["step"])
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        if hvd.rank() == 0:
            self._sums.continue_with(state["sums"])
        if self.training.global_batch is not None:
            self._batches.load_state_dict(state["feed"])
        else:
            self._batches.skip(self.epoch * len(self._batches))
        self.is_over = stops(self.training, self.history)

    def _parts(self, feed: Feed[Any], first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from one of them on, without rows that are padding."""
        known = self._shares(feed)
        # Not the feed's own iterator, which would weight backward() a second time.
        for number, parts in enumerate(Feed.__iter__(feed), first):
            # A rank without rows takes part with a row that counts nothing.
            kept = max(1, known[number][0])
            if len(parts[0]) != kept:
                parts = [part[:kept] for part in parts]  # noqa: PLW2901
            ends_step = (number + 1) % self._passes == 0 or number + 1 == self._count
            inputs, labels, weight = self.training.split_parts(parts)
            yield Batch(inputs, labels, weight, *known[number], ends_step)

    def _shares(self, feed: Feed[Any]) -> list[tuple[int, float, float, float]]:
        """For each batch of an epoch: what Batch says of its rows."""
        if feed not in self._known_shares:
            rows = [feed.real_rows(number) for number in range(len(feed))]
            of_all = torch.tensor(rows, dtype=torch.float64)
            if self._ranks > 1:
                of_all = hvd.allreduce(of_all, op=hvd.Sum, name="horovod_runner.training.rows")
            # The estimators add up the means of a step's passes, as Horovod's do.
            is_whole = self.training.global_batch and feed is self._batches
            passes = self._passes if is_whole else 1
            step = torch.arange(len(rows)) // passes
            of_steps = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, step, of_all)
            of_step = of_steps[step]
            shares = torch.tensor(rows) * self._ranks / of_step
            each = shares.tolist(), (of_all / of_step).tolist(), of_step.tolist()
            self._known_shares[feed] = list(zip(rows, *each, strict=True))
        return self._known_shares[feed]

    def _weighted(self, batch: Batch, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the losses times their factors; its average over the ranks is the step's."""
        return added(
            [_times(loss, self._share_of(batch, number)) for number, loss in enumerate(losses)]
        )

    def _share_of(self, batch: Batch, output: int) -> Any:
        """The factor of the loss of one of the outputs.

        It is the share of the rows, unless the loss is a sum, or a mean over something else.
        """
        training = self.training
        # A step returns a mean over rows, and so is a loss with weights of rows.
        if not training.global_batch or training.step is not None or batch.weight is not None:
            return batch.share
        if self._are_sums[output]:
            return float(self._ranks) if batch.rows else 0.0
        alone = self._ranks == 1
        own = None if alone else divisor_of(training.loss_of(output), batch.labels[output])
        if own is None:
            return batch.share
        own = own * (batch.rows > 0)
        name = f"horovod_runner.training.divisors.{output}"
        everywhere = hvd.allreduce(own, op=hvd.Sum, name=name)
        return own * self._ranks / everywhere * batch.part

    def _add(self, outputs: Sequence[torch.Tensor], batch: Batch, weighted: torch.Tensor) -> None:
        """Add a batch's metrics to the sums over rows, without waiting for a GPU."""
        if not batch.rows:
            return
        named = self.training.metrics
        if named and not outputs:
            raise ValueError(
                "metrics are functions of outputs and labels, and step returned a loss only: let "
                "it return the loss and the outputs, or leave metrics out"
            )
        for name, metric in named.items():
            own_loss, output = self.training.loss_of(metric.label), outputs[metric.label]
            label = fitted_label(own_loss, output, batch.labels[metric.label], metric.function)
            with torch.no_grad():
                self._sums.add(name, metric.function(output, label), batch.rows)
        self._sums.add("loss", weighted.detach(), batch.step_rows / self._ranks)
        self._sums.rows += batch.rows

    def _no_sums(self) -> Sums:
        return Sums(("loss", *self.training.metrics), self._device)


def _times(loss: torch.Tensor, share: Any) -> torch.Tensor:
    if isinstance(share, torch.Tensor):
        # Of labels that all are ignored the mean is NaN, and stays NaN times 0.
        return torch.where(share > 0, loss, torch.zeros_like(loss)) * share
    return loss if share == 1 else loss * share


def stops(training: Training, history: Mapping[str, Sequence[float]]) -> bool:
    """Whether the metric to watch has not improved for ``patience`` epochs.

    Raises:
        ValueError: there is no such metric.
    """
    name, mode = training.monitor
    if training.patience is None or not history:
        return False
    if name not in history:
        raise ValueError(
            f"monitor={name!r}, and the metrics of an epoch are {', '.join(history)}: choose one "
            "of them"
        )
    values = list(history[name])
    best = values.index(min(values) if mode == "min" else max(values))
    return len(values) - 1 - best >= training.patience


def weights_of(model: torch.nn.Module) -> bytes:
    """The state of a module, in torch's format."""
    saved = io.BytesIO()
    torch.save(model.cpu().state_dict(), saved)
    return saved.getvalue()
