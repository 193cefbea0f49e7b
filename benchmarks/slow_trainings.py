"""Trainings that are slow on purpose, for diagnose.py; each is a `main` for two ranks.

Every function takes ``steps`` and, where one rank is slow, makes it rank 1.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

WIDTH = 512


def augment_slowly(seconds: float) -> None:
    """What a slow rank does in each step, while it needs no core."""
    time.sleep(seconds)


def count_slowly(seconds: float) -> None:
    """What a slow rank does in each step, in Python."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def loop(
    steps: int, each: Callable[[int], Any] | None = None, *, rows: int = 512, layers: int = 3
) -> None:
    """A plain training with Horovod's optimizer; a step takes some 20 ms of one core.

    Args:
        steps: how many.
        each: called with the step's number in the middle of each step.
        rows: of a batch.
        layers: of the network.
    """
    _hvd, net, optimizer = horovod(layers)
    import torch

    for step in range(steps):
        optimizer.zero_grad()
        net(torch.ones(rows, WIDTH)).sum().backward()
        if each is not None:
            each(step)
        optimizer.step()


def horovod(layers: int = 3) -> tuple[Any, Any, Any]:
    """Horovod, a network, and its optimizer."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    plain = torch.optim.SGD(net.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
    return hvd, net, optimizer


def _is_slow() -> bool:
    import horovod.torch as hvd

    return int(hvd.rank()) == 1


def plain(steps: int) -> None:
    """Nothing is wrong."""
    loop(steps)


def sleeps(steps: int) -> None:
    """A rank sleeps in its compute."""
    loop(steps, lambda _: augment_slowly(0.01) if _is_slow() else None)


def counts(steps: int) -> None:
    """A rank computes in Python."""
    loop(steps, lambda _: count_slowly(0.01) if _is_slow() else None)


def late_at_a_metric(steps: int) -> None:
    """A rank comes late to a reduction of a metric."""
    import horovod.torch as hvd
    import torch

    def reduce(_: int) -> None:
        if _is_slow():
            augment_slowly(0.01)
        hvd.allreduce(torch.ones(1), name="metric")

    loop(steps, reduce)


def larger_batches(steps: int) -> None:
    """A rank has twice as many rows in its batches."""
    _hvd, net, optimizer = horovod()
    import torch

    size = 768 if _is_slow() else 384
    data = torch.utils.data.TensorDataset(torch.ones(size * steps, WIDTH))
    for (x,) in torch.utils.data.DataLoader(
        data,
        sampler=torch.utils.data.BatchSampler(range(len(data)), size, drop_last=True),
        batch_size=None,
    ):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()


def uneven_lengths(steps: int) -> None:
    """In each step another rank has the long rows."""
    import horovod.torch as hvd

    hvd.init()
    import random

    longest = random.Random(hvd.rank())
    loop(steps, lambda _: augment_slowly(longest.choice([0.0, 0.04])))


def with_quota(steps: int, group: str) -> None:
    """A rank's container may use 60% of a core."""
    import horovod.torch as hvd

    hvd.init()
    if _is_slow():
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    loop(steps)


def many_threads(steps: int) -> None:
    """All ranks compute with eight threads."""
    import torch

    torch.set_num_threads(8)
    loop(steps)


def lock_held(steps: int) -> None:
    """A thread of all ranks computes in Python."""

    def count() -> None:
        while True:
            sum(range(100))

    for _ in range(2):
        threading.Thread(target=count, daemon=True).start()
    loop(steps, layers=6)


def large_checkpoints(steps: int) -> None:
    """A checkpoint in every step."""
    from horovod_runner import save_checkpoint

    def save(step: int) -> None:
        import numpy as np

        save_checkpoint({"state": np.ones(5_000_000, np.float32)}, step)

    loop(steps, save)


def many_reports(steps: int) -> None:
    """Thousands of metrics in every step."""
    from horovod_runner import report

    names = [f"metric_{number}" for number in range(3000)]
    loop(steps, lambda step: report(step=step, **dict.fromkeys(names, 1.0)), rows=32)


def small(steps: int) -> None:
    """A step of less than a millisecond."""
    loop(steps * 20, rows=1, layers=1)


def slow_start(steps: int) -> None:
    """The first steps compile."""
    loop(steps, lambda step: augment_slowly(1.0) if step < 6 else None)


def large_gradients(steps: int) -> None:
    """12 MB of gradients in a step of little computation, over a slow link."""
    loop(steps, layers=12, rows=32)


class Rows:
    """A dataset whose rows take long.

    Args:
        count: of the rows.
        work: what is called for each.
    """

    def __init__(self, count: int, work: Callable[[], Any]) -> None:
        self._count = count
        self._work = work

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        import torch

        self._work()
        return torch.ones(WIDTH)


def slow_dataset(steps: int) -> None:
    """A DataLoader without processes, whose rows take long."""
    _hvd, net, optimizer = horovod()
    import torch

    for x in torch.utils.data.DataLoader(
        Rows(32 * steps, lambda: count_slowly(0.0005)), batch_size=32
    ):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()


def slow_loader_processes(steps: int) -> None:
    """A DataLoader with one process, which waits for a store."""
    _hvd, net, optimizer = horovod()
    import torch

    rows = Rows(32 * steps, lambda: augment_slowly(0.001))
    loader = torch.utils.data.DataLoader(rows, batch_size=32, num_workers=1)
    for x in loader:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()


def _slow_transform(batch: Any) -> Any:
    augment_slowly(0.04)
    return batch


def slow_feed(steps: int, data: Any) -> None:
    """The feed of one rank has a slow transform."""
    _hvd, net, optimizer = horovod()
    transform = _slow_transform if _is_slow() else None
    for (x,) in _batches(data, steps, columns={"x": ["x"]}, transform=transform):
        optimizer.zero_grad()
        net(x.float().expand(-1, WIDTH)).sum().backward()
        optimizer.step()


def plain_feed(steps: int, data: Any) -> None:
    """Nothing is wrong, with a feed."""
    _hvd, net, optimizer = horovod()
    for (x,) in _batches(data, steps, columns={"x": ["x"]}):
        optimizer.zero_grad()
        net(x.float().expand(-1, WIDTH)).sum().backward()
        optimizer.step()


def decoded_again(steps: int, data: Any) -> None:
    """Images are decoded anew in every epoch."""
    from horovod_runner.data import Image

    _hvd, net, optimizer = horovod(1)
    photos = {"photo": Image(128, 128)}
    for (photo,) in _batches(data, steps, columns={"photo": "photo"}, images=photos):
        optimizer.zero_grad()
        pixels = photo.float().flatten(1)[:, :WIDTH]
        net(pixels).sum().backward()
        optimizer.step()


def _batches(data: Any, steps: int, **options: Any) -> Iterator[Any]:
    rows = options.pop("batch_size", 256 if "images" not in options else 16)
    batches = data.to_torch(batch_size=rows, **options)
    done = 0
    while done < steps:
        for batch in batches:
            yield batch
            done += 1
            if done == steps:
                return


def ddp(steps: int, *, slow: bool = True) -> None:
    """A rank sleeps in a training with torch's DistributedDataParallel."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = parallel(torch.ones(512, WIDTH)).sum()
        if slow and dist.get_rank() == 1:
            augment_slowly(0.01)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def plain_ddp(steps: int) -> None:
    """Nothing is wrong, with DistributedDataParallel."""
    ddp(steps, slow=False)


def keras(steps: int, *, slow: bool = True) -> None:
    """A callback of one rank sleeps."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import horovod.keras as hvd
    import keras
    import numpy as np

    hvd.init()
    net = keras.Sequential([keras.layers.Dense(WIDTH) for _ in range(3)])
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-6)), "mse")

    class Slow(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if slow and hvd.rank() == 1:
                augment_slowly(0.02)

    rows = np.ones((512 * 20, WIDTH), np.float32)
    net.fit(
        rows,
        rows,
        batch_size=512,
        epochs=max(1, steps // 20),
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Slow()],
    )


def plain_keras(steps: int) -> None:
    """Nothing is wrong, with Keras."""
    keras(steps, slow=False)


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """Other processes that need all cores."""
    import subprocess
    import sys

    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
