"""Lightning in the ranks of a run: gradients averaged by Horovod, and the driver told how it goes.

    import lightning as L
    from horovod_runner.lightning import HorovodStrategy, ReportCallback, resume_from

    trainer = L.Trainer(strategy=HorovodStrategy(), callbacks=[ReportCallback()], logger=False)
    trainer.fit(model, data.to_torch(64), ckpt_path=resume_from())

Lightning had a Horovod strategy until 2.0. ``horovod.torch.DistributedOptimizer`` is no substitute:
Lightning calls ``step`` with the backward pass inside, and it would reduce before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.context import check_sync, load_checkpoint, report, save_checkpoint
from horovod_runner.reports import interval

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import ParallelStrategy
else:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ParallelStrategy

_FILE = "lightning.ckpt"
_OPS = {
    **{"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum},
    **{"max": hvd.Max, "min": hvd.Min},
}


class HorovodStrategy(ParallelStrategy):  # type: ignore[misc]
    """Trains on this rank's device, with the gradients of all ranks.

    All ranks begin with rank 0's weights. ``self.log(..., sync_dist=True)`` reduces over the ranks,
    EarlyStopping ends all of them or none, and rank 0 alone writes checkpoints. A Shard's batches
    are this rank's as they are; of a DataLoader over a whole dataset Lightning gives each rank its
    part (``use_distributed_sampler``).

    Args:
        device: of this rank; None takes the current GPU, or the CPU where there is none.
    """

    strategy_name = "horovod"
    is_distributed = True  # what Lightning asks strategies that it does not know

    def __init__(self, device: Any = None) -> None:
        hvd.init()
        if device is None:
            found = torch.cuda.is_available()
            device = f"cuda:{torch.cuda.current_device()}" if found else "cpu"
        super().__init__()
        self._device = torch.device(device)
        self._handed = 0

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

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0)

    def setup(self, trainer: Any) -> None:
        """Begin with rank 0's weights."""
        self.model_to_device()
        super().setup(trainer)
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Average the gradients after the backward pass, which is in the closure.

        Before anybody looks at them: a gradient scaler skips the same steps on all ranks, and they
        are clipped as one process would.
        """

        def averaged() -> Any:
            result = closure()
            self._average(optimizer)
            return result

        return super().optimizer_step(optimizer, averaged, model, **kwargs)

    def model_to_device(self) -> None:
        """Move the model to this rank's device."""
        self.lightning_module.to(self.root_device)

    def _average(self, optimizer: Any) -> None:
        if hvd.size() == 1:
            return
        number = self.optimizers.index(getattr(optimizer, "optimizer", optimizer))
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        handles = [
            hvd.allreduce_async_(each.grad, name=f"gradients.{number}.{index}", op=hvd.Average)
            for index, each in enumerate(parameters)
            if each.grad is not None
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor of all ranks: averaged, or by "sum", "max" or "min"."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).lower()
        op = _OPS.get(name)
        if op is None:
            raise ValueError(f"Horovod reduces by {', '.join(_OPS)}, and not by {reduce_op!r}")
        averages = op == hvd.Average and not tensor.is_floating_point()
        own = tensor.float() if averages else tensor
        return hvd.allreduce(own, name=self._name("reduce"), op=op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, decided so."""
        count = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return count == hvd.size() if all else count > 0

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """All ranks' tensors, in a first dimension of their own."""
        return hvd.allgather(tensor.unsqueeze(0), name=self._name("all_gather"))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object."""
        return hvd.broadcast_object(obj, src, name=self._name("broadcast"))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        hvd.allreduce(torch.zeros(1), name=self._name("barrier"))

    def _name(self, what: str) -> str:
        # The ranks call the same ones in the same order; a name pairs what belongs together.
        self._handed += 1
        return f"lightning.{what}.{self._handed}"


class ReportCallback(lightning.Callback):  # type: ignore[misc]
    """Reports what is logged, and saves checkpoints that Lightning goes on from.

    Args:
        every: report after so many batches; 0 reports epochs alone.
        save_every: save after so many epochs; 0 saves nothing.
    """

    def __init__(self, every: int = 10, save_every: int = 1) -> None:
        self.every = interval("every", every)
        self.save_every = interval("save_every", save_every)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See Lightning's Callback; so for all below."""
        if self.every and (batch_idx + 1) % self.every == 0:
            known = {} if trainer.max_steps < 0 else {"total_steps": trainer.max_steps}
            steps, epochs = trainer.num_training_batches, trainer.max_epochs
            if not known and epochs and epochs > 0 and isinstance(steps, int):
                known = {"total_steps": steps * epochs}
            _report(trainer, **known)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        check_sync(pl_module, trainer.current_epoch)
        _report(trainer)
        if self.save_every and (trainer.current_epoch + 1) % self.save_every == 0:
            with TemporaryDirectory(prefix="horovod_runner-lightning-") as folder:
                trainer.save_checkpoint(Path(folder) / _FILE)  # on all ranks; rank 0 writes
                numbers = {**_numbers(trainer.callback_metrics), "epoch": trainer.current_epoch}
                save_checkpoint(folder, trainer.global_step, numbers)


def resume_from() -> str | None:
    """The ``ckpt_path`` for ``Trainer.fit``: what ReportCallback saved last; None to start anew.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
        TypeError: the checkpoint was not written by ReportCallback.
    """
    hvd.init()
    loaded = load_checkpoint()
    if loaded is None:
        return None
    path = Path(str(loaded.state)) / _FILE
    if not path.is_file():
        raise TypeError(
            "the checkpoint was not written by horovod_runner.lightning.ReportCallback: load it "
            "with horovod_runner.load_checkpoint"
        )
    return str(path)


def _report(trainer: Any, **known: Any) -> None:
    numbers = _numbers(trainer.callback_metrics)
    report(step=trainer.global_step, epoch=trainer.current_epoch, **known, **numbers)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    taken = ("step", "epoch", "total_steps")
    return {name: float(value) for name, value in metrics.items() if name not in taken}
