"""Lightning with Horovod: a strategy that averages gradients, and a callback that reports.

    import lightning as L
    from horovod_runner.integrations.lightning import HorovodStrategy, ReportCallback, resume_from

    trainer = L.Trainer(strategy=HorovodStrategy(), callbacks=[ReportCallback()], logger=False)
    trainer.fit(model, data.to_torch(64), ckpt_path=resume_from())

Lightning had a Horovod strategy until 2.0. ``horovod.torch.DistributedOptimizer`` cannot replace
it: Lightning runs the backward pass inside ``step``, so gradients would be reduced before they
exist.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.common.numbers import RESERVED, check_interval
from horovod_runner.worker.api import check_weights, load_checkpoint, report, save_checkpoint
from horovod_runner.worker.checks.gradients import average_in_clips
from horovod_runner.worker.checks.optimizers import average_gradients
from horovod_runner.worker.imports.patches import instead_of

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import ParallelStrategy
else:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ParallelStrategy

#: The package that is used: lightning.pytorch, or pytorch_lightning.
framework: Any = lightning

_FILE = "lightning.ckpt"
_OPS = {
    **{"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum},
    **{"max": hvd.Max, "min": hvd.Min},
}

_EPOCH_END = "on_train_epoch_end"  # a hook of modules and callbacks

_calls = itertools.count()


class HorovodStrategy(ParallelStrategy):  # type: ignore[misc]
    """Trains on this rank's device, with gradients averaged over all ranks.

    All ranks begin with rank 0's weights. ``self.log(..., sync_dist=True)`` reduces over the ranks,
    metrics of torchmetrics that the module holds are computed over the rows of all ranks,
    EarlyStopping stops all ranks or none, and only rank 0 writes checkpoints. Batches of a Shard
    are used unchanged. For a DataLoader over a whole dataset, Lightning's distributed sampler picks
    this rank's part (``use_distributed_sampler``).

    Args:
        device: the device of this rank; None uses the current GPU, or the CPU without a GPU.
    """

    strategy_name = "horovod"
    is_distributed = True  # Lightning checks this attribute of custom strategies

    def __init__(self, device: Any = None) -> None:
        hvd.init()
        if device is None:
            has_gpu = torch.cuda.is_available()
            device = f"cuda:{torch.cuda.current_device()}" if has_gpu else "cpu"
        super().__init__()
        self._device = torch.device(device)
        self._calls = 0
        self._trained: set[Any] = set()  # parameters that may have a gradient on some rank
        self._dense: set[Any] = set()  # parameters that are known to have dense gradients
        average_in_clips(self)

    @property
    def root_device(self) -> Any:
        return self._device

    @property
    def global_rank(self) -> int:
        return int(hvd.rank())

    @property
    def local_rank(self) -> int:
        return int(hvd.local_rank())

    @property
    def node_rank(self) -> int:
        return int(hvd.cross_rank())

    @property
    def world_size(self) -> int:
        return int(hvd.size())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup(self, trainer: Any) -> None:
        """Give all ranks the weights of rank 0."""
        self.model_to_device()
        super().setup(trainer)
        self._trained = {p for p in self.lightning_module.parameters() if p.requires_grad}
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)
        if hvd.size() > 1 and not torch.distributed.is_initialized():
            for metric in self.lightning_module.modules():
                if getattr(metric, "dist_sync_fn", metric) is None:  # of torchmetrics
                    metric.dist_sync_fn = _states_of_ranks
                    metric.distributed_available_fn = hvd.is_initialized

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Average the gradients after the backward pass, which runs inside ``closure``.

        Gradients are averaged before they are clipped and before a gradient scaler looks at them:
        all ranks skip the same steps, and clipping works as in a single process.
        """

        def averaged() -> Any:
            result = closure()
            self._average(optimizer)
            return result

        return super().optimizer_step(optimizer, averaged, model, **kwargs)

    def model_to_device(self) -> None:
        """Move the model to this rank's device."""
        self.lightning_module.to(self.root_device)

    def average_before_clip(self, parameters: Collection[Any]) -> None:
        """Average the gradients of the optimizers that have some of these parameters.

        A module that optimizes manually clips before ``optimizer_step``, which averages once more:
        another backward pass may follow the clipping.
        """
        module = self.lightning_module
        if module is None or module.automatic_optimization:
            return
        given = {id(each) for each in parameters}
        for optimizer in self.optimizers:
            groups = optimizer.param_groups
            if any(id(own) in given for group in groups for own in group["params"]):
                self._average(optimizer)

    def _average(self, optimizer: Any) -> None:
        if hvd.size() == 1:
            return
        number = self.optimizers.index(optimizer)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        # One that was frozen while gradients were accumulated still has one.
        parameters = [p for p in own if p.requires_grad or p in self._trained]
        # Ranks may use different layers, as of several heads or experts.
        average_gradients(parameters, f"gradients.{number}", hvd.global_process_set, self._dense)
        self._trained.difference_update(own)
        self._trained.update(p for p in parameters if p.requires_grad or p.grad is not None)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks: "mean", "sum", "max" or "min". Other types stay as is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).lower()
        op = _OPS.get(name)
        if op is None:
            raise ValueError(f"reduce_op must be one of {', '.join(_OPS)}, not {reduce_op!r}")
        if op == hvd.Average and not tensor.is_floating_point():
            tensor = tensor.float()
        return hvd.allreduce(tensor, name=self._name("reduce"), op=op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or, with ``all=False``, any rank) passed True."""
        count = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return count == hvd.size() if all else count > 0

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked along a new first dimension.

        With ``sync_grads`` each rank's tensor gets the sum of the gradients that the ranks have for
        it, as with DistributedDataParallel. Otherwise no gradient flows back.
        """
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            gathered = _gathered(tensor.unsqueeze(0), self._name("all_gather"))
        if gathered.requires_grad:  # Horovod takes their mean
            gathered.register_hook(lambda gradient: gradient * hvd.size())
        return gathered

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``."""
        return hvd.broadcast_object(obj, src, name=self._name("broadcast"))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        hvd.allreduce(torch.zeros(1), name=self._name("barrier"))

    def _name(self, operation: str) -> str:
        # Horovod pairs calls by name. All ranks make the same calls in the same order.
        self._calls += 1
        return f"lightning.{operation}.{self._calls}"


class ReportCallback(lightning.Callback):  # type: ignore[misc]
    """Reports logged metrics to the driver, and saves checkpoints for :func:`resume_from`.

    Args:
        every: report after this many batches; 0 reports only at the end of an epoch.
        save_every: save after this many epochs; 0 saves at no end of an epoch.
        save_steps: save after this many steps of the optimizer, too; 0 saves only at the end of
            epochs. A feed of a Shard then resumes in the middle of its epoch.

    Raises:
        ValueError: an argument is not a whole number from 0 on.
    """

    def __init__(self, every: int = 10, save_every: int = 1, save_steps: int = 0) -> None:
        self.every = check_interval("every", every)
        self.save_every = check_interval("save_every", save_every)
        self.save_steps = check_interval("save_steps", save_steps)
        self._saved = 0  # the last step that was saved: several batches may belong to one

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._saved = trainer.global_step  # of the checkpoint that the training resumes from

        # Lightning calls callbacks before the module, which may log metrics of the epoch there.
        @instead_of(pl_module, _EPOCH_END)
        def on_train_epoch_end(plain: Any) -> None:
            plain()
            self._end_epoch(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        vars(pl_module).pop(_EPOCH_END, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every and (batch_idx + 1) % self.every == 0:
            _report(trainer, _total_steps(trainer))
        step = trainer.global_step
        is_due = self.save_steps and step % self.save_steps == 0 and step != self._saved
        if is_due and not (trainer.is_last_batch and self._saves_at_end(trainer)):
            self._save(trainer)

    def _end_epoch(self, trainer: Any, pl_module: Any) -> None:
        """Report and save, once all hooks have logged the metrics of the epoch."""
        check_weights(pl_module, trainer.current_epoch)
        _report(trainer)
        if self._saves_at_end(trainer):
            self._save(trainer)

    def _saves_at_end(self, trainer: Any) -> bool:
        """Whether a checkpoint is due at the end of this epoch."""
        return self.save_every > 0 and (trainer.current_epoch + 1) % self.save_every == 0

    def _save(self, trainer: Any) -> None:
        self._saved = trainer.global_step
        with TemporaryDirectory(prefix="horovod_runner-lightning-") as folder:
            trainer.save_checkpoint(Path(folder) / _FILE)  # call on all ranks; rank 0 writes
            numbers = {**_numbers(trainer.callback_metrics), "epoch": trainer.current_epoch}
            save_checkpoint(folder, trainer.global_step, numbers)


def _states_of_ranks(state: Any, group: Any = None) -> list[Any]:
    """Return the states that a metric of torchmetrics has on the ranks, to add or concatenate."""
    name = f"lightning.metric.{next(_calls)}"
    if state.ndim == 0:
        return list(_gathered(state.reshape(1), name).unbind())
    lengths = _gathered(torch.tensor([len(state)]), f"{name}.lengths")
    return list(_gathered(state.contiguous(), name).split(lengths.tolist()))


def _gathered(tensor: Any, name: str) -> Any:
    """The tensors of all ranks, one after another; also in inference mode.

    Horovod resizes the result in another thread, where inference mode is off.
    """
    if not torch.is_inference_mode_enabled():
        return hvd.allgather(tensor, name=name)
    with torch.inference_mode(False):
        return hvd.allgather(tensor.clone(), name=name)


def resume_from() -> str | None:
    """Return the ``ckpt_path`` for ``Trainer.fit``: the latest checkpoint of ReportCallback.

    Returns:
        The path of a Lightning checkpoint; None if the training starts from the beginning.

    Raises:
        CheckpointError: there are checkpoints, but none can be read.
        TypeError: the checkpoint was not written by ReportCallback.
    """
    hvd.init()
    loaded = load_checkpoint()
    if loaded is None:
        return None
    path = Path(str(loaded.state)) / _FILE
    if not path.is_file():
        raise TypeError(
            "the checkpoint was not written by horovod_runner.lightning.ReportCallback: Lightning "
            "cannot resume from it. Load it with horovod_runner.load_checkpoint"
        )
    return str(path)


def _total_steps(trainer: Any) -> int | None:
    """The number of steps of the whole training; None if Lightning does not know it."""
    if trainer.max_steps >= 0:
        return int(trainer.max_steps)
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if not trainer.lightning_module.automatic_optimization:  # it steps as often as it likes
        return None
    if epochs and epochs > 0 and isinstance(batches, int):
        return -(-batches // int(trainer.accumulate_grad_batches)) * int(epochs)
    return None


def _report(trainer: Any, total_steps: int | None = None) -> None:
    numbers = _numbers(trainer.callback_metrics)
    step, epoch = trainer.global_step, trainer.current_epoch
    report(step=step, epoch=epoch, total_steps=total_steps, **numbers)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name not in RESERVED}
