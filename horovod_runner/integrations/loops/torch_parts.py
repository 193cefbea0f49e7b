"""Prepares the parts of a loop of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import horovod.torch as hvd
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from horovod_runner.data.feed.torch_feed import RowDataset
from horovod_runner.integrations.loops.parts import Role

start = hvd.init


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _model(model: torch.nn.Module, models: Sequence[Any], options: Mapping[str, Any]) -> Any:
    model.to(device())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def _optimizer(
    optimizer: torch.optim.Optimizer, models: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    if hasattr(optimizer, "_allreduce_delay"):  # it is Horovod's already
        return optimizer
    own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    named: dict[int, tuple[str, Any]] = {}  # once each: models may share weights
    for number, model in enumerate(models):
        start = f"{number}." if len(models) > 1 else ""
        for name, weight in model.named_parameters():
            if id(weight) in own:
                named.setdefault(id(weight), (f"{start}{name}", weight))
    missing = len(own) - len(named)
    if missing:
        raise ValueError(
            f"{type(optimizer).__name__} has {len(own)} weights, and {missing} of them are of no "
            "model that is prepared with it: give its models in the same call, "
            "prepare(model, optimizer)"
        )
    averaging = hvd.DistributedOptimizer(optimizer, named_parameters=named.values(), **options)
    hvd.broadcast_optimizer_state(averaging, root_rank=0)
    return averaging


def _batches(batches: Any, models: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return RankLoader(batches) if isinstance(batches, DataLoader) else batches


#: What prepares a part, by its role; others stay as they are.
PREPARE: Final[Mapping[Role, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]] = {
    "model": _model,
    "optimizer": _optimizer,
    "batches": _batches,
}


# The arguments of a DataLoader that a rank's has from the one for all rows.
_KEPT: Final = (
    *("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout"),
    *("worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor"),
    "persistent_workers",
)


class RankLoader:
    """The batches of a DataLoader that belong to this rank, on its device.

    All ranks have the same number of batches; each iteration is an epoch, and shuffled rows are
    shuffled differently in each.

    Args:
        loader: over the whole dataset, or over the rows of this rank that a Shard gives.

    Raises:
        ValueError: its rows cannot be divided among the ranks.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._epoch = 0
        self._sampler: DistributedSampler[Any] | None = None
        self._loader = self._divided(loader)

    def _divided(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        dataset = loader.dataset
        is_of_rank = isinstance(dataset, RowDataset) and not dataset.is_whole
        if hvd.size() == 1 or is_of_rank:
            return loader
        if isinstance(loader.sampler, DistributedSampler):
            self._sampler = loader.sampler
            return loader
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{type(dataset).__name__} is an IterableDataset, of which each rank would see all "
                "rows: let it yield this rank's part, by hvd.rank() and hvd.size(), and leave its "
                "DataLoader out of prepare; or pass the data to run, and use data.to_torch(...)"
            )
        if not _draws_each_row_once(loader.sampler):
            raise ValueError(
                f"the DataLoader draws rows by {_described(loader.sampler)}, and prepare "
                "divides only shuffled rows and rows in their order: give it a sampler of this "
                "rank's rows, torch.utils.data.DistributedSampler(dataset, hvd.size(), hvd.rank())"
            )
        if loader.batch_size is None:
            raise ValueError(
                "the DataLoader has a batch_sampler of its own, or batches are made by the "
                "dataset: give it batch_size, or a DistributedSampler"
            )
        self._sampler = DistributedSampler(
            dataset,
            hvd.size(),
            hvd.rank(),
            shuffle=isinstance(loader.sampler, RandomSampler),
            drop_last=loader.drop_last,
        )
        kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
        return DataLoader(dataset, sampler=self._sampler, **kept)

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        here = device()
        for batch in self._loader:
            yield batch if here.type == "cpu" else _moved(batch, here)

    def state_dict(self) -> dict[str, Any]:
        """The number of epochs that have begun."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the epoch after those of a saved state."""
        self._epoch = int(state["epoch"])


def _draws_each_row_once(sampler: Any) -> bool:
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return isinstance(sampler, SequentialSampler)


def _described(sampler: Any) -> str:
    name = type(sampler).__name__
    if not isinstance(sampler, RandomSampler):
        return name
    return f"{name}(replacement={sampler.replacement}, num_samples={sampler.num_samples})"


def _moved(batch: Any, to: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(to, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({name: _moved(each, to) for name, each in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(each, to) for each in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(each, to) for each in batch)
    return batch
