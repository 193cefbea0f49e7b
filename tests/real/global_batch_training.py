"""Trainings with global_batch, which must give the same weights with any number of ranks.

They run in the ranks; test_global_batch compares the results.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data import Shard, evaluate
from horovod_runner.errors import DataError
from horovod_runner.integrations.training.keras import set_seed

ROWS, BATCH = 211, 32  # 3 ranks have 11, 11 and 10 rows of a step; the last step has 19 rows
STEPS = -(-ROWS // BATCH)
COLUMNS = {"x": ["a", "b", "c"], "y": "label", "row": "row"}


kept: list[Any] = []


def table(rows: int = ROWS) -> pa.Table:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3)).astype(np.float32)
    # Rows differ so much in their losses that a row's wrong weight shows.
    label = (np.arange(rows) ** 2 % 3).astype(np.int64)
    return pa.table({**dict(zip("abc", x.T, strict=True)), "label": label, "row": np.arange(rows)})


def network(*, normalizes: bool = False) -> Any:
    import torch

    torch.manual_seed(1)
    middle = [torch.nn.BatchNorm1d(8)] if normalizes else []
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), *middle, torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )


def weights_of(model: Any) -> list[Any]:
    return [parameter.detach().double().numpy() for parameter in model.parameters()]


def train_all(train: Shard, valid: Shard) -> dict[str, list[Any]]:
    """All trainings of this file in one run, for imports take most of its time."""
    import horovod.torch as hvd

    hvd.init()
    return {name: training(train, valid) for name, training in TRAININGS.items()}


def undisturbed(train: Shard, valid: Shard) -> list[Any]:
    """Three epochs of what some_steps trains, by the loop that everybody writes."""
    weights: list[Any] = some_steps(train, 3 * STEPS, None)["weights"]
    return weights


def accumulated(train: Shard, valid: Shard) -> list[Any]:
    """Two batches per step of the optimizer, whose second may be the short one."""
    from torch.nn import functional

    model, optimizer = distributed(backward_passes_per_step=2)
    feed = train.to_torch(global_batch=BATCH, columns=COLUMNS, shuffle=True, seed=2)
    for number, (x, y, _) in enumerate(both(feed, 2), 1):
        functional.cross_entropy(model(x), y).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


def two_losses(train: Shard, valid: Shard) -> list[Any]:
    """Two calls of backward for a batch, one of them with a gradient; evaluations in between."""
    import torch
    from torch.nn import functional

    model, optimizer = distributed(backward_passes_per_step=2)
    checks = valid.to_torch(global_batch=5, columns=COLUMNS)
    kept = iter(valid.to_torch(global_batch=5, columns=COLUMNS))
    for x, y, _ in train.to_torch(global_batch=BATCH, columns=COLUMNS, shuffle=True, seed=3):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():  # its weights are others
            model(next(kept)[0])
        evaluate(checks, lambda batch: {"loss": model(batch[0])[:, 0]})
        outputs = model(x).square()
        outputs.backward(gradient=torch.full_like(outputs, 0.1 / len(outputs)))
        optimizer.step()
    return weights_of(model)


def drawn_ahead(train: Shard, valid: Shard) -> list[Any]:
    """A batch is drawn before backward of the one before, also across epochs."""
    from torch.nn import functional

    model, optimizer = distributed()
    feed = train.to_torch(global_batch=BATCH, columns=COLUMNS, shuffle=True, seed=8)
    for x, y, _ in one_ahead(both(feed, 3)):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights_of(model)


def recomputed(train: Shard, valid: Shard) -> list[Any]:
    """Checkpointed activations, which call backward inside backward; and a gradient scaler."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    model, optimizer = distributed()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for x, y, _ in train.to_torch(global_batch=BATCH, columns=COLUMNS, shuffle=True, seed=5):
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        scaler.scale(functional.cross_entropy(model[2](hidden), y)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return weights_of(model)


def data_parallel(train: Shard, valid: Shard) -> list[Any]:
    """DistributedDataParallel instead of Horovod."""
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    model = network()
    if hvd.size() > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for x, y, _ in train.to_torch(global_batch=BATCH, columns=COLUMNS, shuffle=True, seed=6):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    # Freed while the group's thread ends its last reduction, torch 2.13 waits for ever.
    kept.append(model)
    return weights_of(model)


def by_sample_weights(train: Shard, valid: Shard) -> list[Any]:
    """Two feeds at a time: first refused, then weighted by the user."""
    import horovod.torch as hvd
    from torch.nn import functional

    model, optimizer = distributed()
    options: Any = {"columns": COLUMNS, "shuffle": True, "seed": 7}
    pair = train.to_torch(global_batch=30, **options), train.to_torch(global_batch=18, **options)
    for (x, y, _), (x2, y2, _) in zip(*pair, strict=False):
        loss = functional.cross_entropy(model(x), y) + functional.cross_entropy(model(x2), y2)
        if hvd.size() > 1:
            with pytest.raises(DataError, match=r" 2 feeds .*sample_weights=True"):
                loss.backward()
        break
    pair = (
        train.to_torch(global_batch=30, sample_weights=True, **options),
        train.to_torch(global_batch=18, sample_weights=True, **options),
    )
    for batches in zip(*pair, strict=False):
        optimizer.zero_grad()
        losses = [
            (functional.cross_entropy(model(x), y, reduction="none") * weight).mean()
            for x, y, _, weight in batches
        ]
        (losses[0] + losses[1]).backward()
        optimizer.step()
    return weights_of(model)


TRAININGS: dict[str, Callable[[Shard, Shard], list[Any]]] = {
    training.__name__: training
    for training in (
        accumulated,
        two_losses,
        drawn_ahead,
        recomputed,
        data_parallel,
        by_sample_weights,
        undisturbed,
    )
}


def distributed(**options: Any) -> tuple[Any, Any]:
    """A model with an optimizer of Horovod's."""
    import horovod.torch as hvd
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parameters = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=parameters, **options)


def both(feed: Any, epochs: int) -> Any:
    for _ in range(epochs):
        yield from feed


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches, each of which is given when the one after it was drawn."""
    left = iter(batches)
    batch = next(left)
    for following in left:
        yield batch
        batch = following
    yield batch


def some_steps(train: Shard, until: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    """Train from a saved state to a step, counted over all epochs.

    Returns:
        The state on rank 0; and the numbers of the real rows of all ranks, by epoch.
    """
    import horovod.torch as hvd
    from torch.nn import functional

    hvd.init()
    model, optimizer = distributed()
    feed = train.to_torch(global_batch=BATCH, columns=COLUMNS, shuffle=True, seed=4)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        feed.load_state_dict(saved["feed"])
    rows: dict[int, list[int]] = {}
    done = 0 if saved is None else saved["steps"]
    state: dict[str, Any] = {}
    while done < until:
        for x, y, row in feed:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            state = feed.state_dict()
            rows.setdefault(done // STEPS, []).extend(row[: feed.real].tolist())
            done += 1
            if done == until:
                break
    gathered: dict[int, list[int]] = {}
    for of_rank in hvd.allgather_object(rows):
        for epoch, numbers in of_rank.items():
            gathered.setdefault(epoch, []).extend(numbers)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "feed": state,
        "steps": done,
        "rows": gathered,
        "weights": weights_of(model),
    }


def normalized(train: Shard, *, hidden: bool) -> list[list[int]]:
    """Batch normalization, with a last step of one row per rank; the rows of each batch.

    Args:
        train: the dataset.
        hidden: whether neither the graph of a loss nor the garbage collector shows the layer, as
            with checkpointed activations after a late import of Keras.
    """
    import horovod.torch as hvd
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    hvd.init()
    model = copy.deepcopy(network(normalizes=True))
    if hidden:
        gc.freeze()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    feed = train.to_torch(global_batch=BATCH, columns=COLUMNS)
    taken = []
    for _ in range(2):
        for x, y, _ in feed:
            taken.append([len(x), feed.real])
            optimizer.zero_grad()
            if hidden:
                outputs = checkpoint(model, x.requires_grad_(), use_reentrant=True)
            else:
                outputs = model(x)
            functional.cross_entropy(outputs, y).backward()
            optimizer.step()
    return list(hvd.allgather_object(taken))


def keras_training(train: Shard) -> dict[str, Any]:
    """Keras on the backend of the run; the weights after two epochs, and the losses."""
    import keras

    import horovod_runner.keras as hvd

    hvd.init()
    results = {}
    by_class = {"class_weight": {1: 2.0, 2: 5.0}}
    trainings: dict[str, tuple[int | None, Any]] = {"plain": (None, {}), "accumulated": (2, {})}
    if keras.backend.backend() == "tensorflow":  # the other takes no weights of classes
        trainings["weights of classes"] = (None, by_class)
    for name, (passes, options) in trainings.items():
        set_seed(1)
        layers = [keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=passes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(hvd.DistributedOptimizer(optimizer), loss)
        batches = keras_batches(train, 8 if passes else 9)
        model.fit(**batches, **options, epochs=2, shuffle=False, verbose=0)
        results[name] = model.get_weights()
    # Last, because the layers of all models of a process are noticed.
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), *layers[1:]])
    gc.freeze()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
    model.fit(**keras_batches(train, 10), epochs=1, shuffle=False, verbose=0)
    return results


def keras_batches(train: Shard, seed: int) -> dict[str, Any]:
    import keras

    columns = {"x": ["a", "b", "c"], "y": "label"}
    options: Any = {"columns": columns, "shuffle": True, "seed": seed}
    if keras.backend.backend() == "tensorflow":
        return {"x": train.to_tf(global_batch=BATCH, **options)}
    feed = train.to_torch(global_batch=BATCH, sample_weights=True, **options)
    return {"x": both(feed, 3), "steps_per_epoch": len(feed)}  # Keras looks one batch ahead
