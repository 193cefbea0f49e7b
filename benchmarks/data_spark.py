"""The measurements of ``data.py`` on Spark: from a DataFrame to batches, a model or predictions.

Each function here runs in a separate driver process, in which its systems take turns.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import launch
import numpy as np
import pyarrow as pa
from data_loaders import BATCH, NARROW, Figures, Task, columns_of

if TYPE_CHECKING:
    import torch
    from petastorm.spark import SparkDatasetConverter
    from pyspark.sql import DataFrame, Row, SparkSession

    from horovod_runner.data import Shard

SIZE = 2
EPOCHS = 2

Systems = dict[str, Callable[[], float]]


def _take_turns(systems: Systems, rounds: int) -> list[Figures]:
    """Seconds of each system in each round, after an uncounted first one."""
    found: list[Figures] = [{} for _ in range(rounds + 1)]
    for turn, figures in enumerate(found):
        # In a different order each round: no system always follows the same one.
        for name in random.Random(turn).sample(list(systems), len(systems)):
            figures[name] = systems[name]()
            print(f"round {turn}  {name}: {figures[name]:.2f} s", file=sys.stderr, flush=True)
    return found[1:]


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# A DataFrame to the first batch on all ranks.


def first_batch(train: Shard) -> tuple[int, ...]:
    """Take the first batch; the ranks' ``main``."""
    batch = next(iter(train.batches(BATCH, columns_of("narrow"), shuffle=True)))
    shape: tuple[int, ...] = batch["x"].shape
    assert shape == (BATCH, len(NARROW))
    return shape


def imports() -> None:
    """Import what a rank needs for its first batch; the ranks' ``main`` without data."""
    import horovod_runner.data.shard  # noqa: F401


def _array(rows: Iterator[Row]) -> Iterator[tuple[int, ...]]:
    """Read all rows of a barrier task into an array."""
    yield np.array(list(rows), np.float32)[:BATCH].shape


def _dropped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Seconds that Spark needs to pass all rows to Python."""
    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_arrays([pa.array([rows])], ["rows"])


def frame(task: Task) -> list[Figures]:
    """Seconds from a DataFrame to the first batch on all ranks, and of parts of that."""
    from horovod_runner import ClusterConfig, HorovodRunner
    from horovod_runner.data import parquet

    with launch.make_session() as spark, tempfile.TemporaryDirectory() as folder:
        df = spark.read.parquet(task.folder)
        runner = HorovodRunner(np=SIZE, cluster_config=ClusterConfig(spark=spark))
        written = str(Path(folder, "written"))

        def through_files() -> None:
            df.write.parquet(written)
            runner.run(first_batch, train=parquet(written))

        def files() -> float:
            seconds = _seconds(through_files)
            shutil.rmtree(written)
            return seconds

        def barrier(rdd: Any, function: Callable[[Any], Any]) -> float:
            return _seconds(lambda: rdd.barrier().mapPartitions(function).collect())

        numbers = spark.sparkContext.parallelize(range(SIZE), SIZE)
        systems: Systems = {
            "ours": lambda: _seconds(lambda: runner.run(first_batch, train=df)),
            "files": files,
            "rows": lambda: barrier(df.repartition(SIZE).rdd, _array),
            "dropped": lambda: _seconds(df.mapInArrow(_dropped, "rows long").collect),
            "empty run": lambda: _seconds(lambda: runner.run(lambda: None)),
            "imports": lambda: _seconds(lambda: runner.run(imports)),
            "empty barrier job": lambda: barrier(numbers, lambda rows: rows),
        }
        return _take_turns(systems, task.rounds)


# A DataFrame to a trained model.


def _network() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(len(NARROW), 64), nn.ReLU(), nn.Linear(64, 1))


class Training:
    """A 16-64-1 network, its optimizer and the loss, with Horovod or with DDP."""

    def __init__(self, horovod: bool) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(0)
        net = _network()
        self._loss = nn.MSELoss()
        if horovod:
            import horovod.torch as hvd

            hvd.init()
            self.rank = hvd.rank()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            self._optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=net.named_parameters()
            )
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        else:
            import torch.distributed
            from torch.nn.parallel import DistributedDataParallel

            torch.distributed.init_process_group("gloo")
            self.rank = torch.distributed.get_rank()
            net = DistributedDataParallel(net)
            self._optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        self._net = net

    def fit(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """Train one step for each batch; returns the losses."""
        losses = []
        for x, y in batches:
            self._optimizer.zero_grad()
            loss = self._loss(self._net(x)[:, 0], y)
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def weights(self) -> dict[str, Any]:
        """The network's, by their names."""
        state = self._net.state_dict()
        return {name.removeprefix("module."): value for name, value in state.items()}


def train_ours(train: Shard) -> list[float]:
    """Train with this package; the ranks' ``main``."""
    training = Training(horovod=True)
    feed = train.to_torch(BATCH, columns_of("narrow"), shuffle=True, last_batch="drop")
    return [loss for _ in range(EPOCHS) for loss in training.fit(feed)]


def train_petastorm(converter: SparkDatasetConverter, steps: int, batched: bool) -> list[float]:
    """Train with TorchDistributor and Petastorm's converter.

    It uses an endless reader and a fixed number of steps: the shards differ in length, and DDP
    would hang.
    """
    import torch

    training = Training(horovod=False)
    options: dict[str, Any] = {}
    if batched:
        from petastorm.pytorch import BatchedDataLoader

        options = {"data_loader_fn": BatchedDataLoader, "shuffling_queue_capacity": 16 * BATCH}
    with converter.make_torch_dataloader(
        batch_size=BATCH, num_epochs=None, cur_shard=training.rank, shard_count=SIZE, **options
    ) as loader:
        batches = (
            (torch.stack([batch[name] for name in NARROW], dim=1), batch["label"])
            for batch in islice(loader, EPOCHS * steps)
        )
        return training.fit(batches)


def floor(horovod: bool, steps: int) -> float:
    """Seconds of the same steps from tensors in memory, on ranks that have already started."""
    import torch

    training = Training(horovod)
    x = torch.rand(steps, BATCH, len(NARROW))
    y = x.sum(dim=2)
    training.fit(zip(x[:1], y[:1], strict=True))  # not timed: it makes the connections
    start = time.perf_counter()
    for _ in range(EPOCHS):
        training.fit(zip(x, y, strict=True))
    return time.perf_counter() - start


def _labelled(spark: SparkSession, task: Task) -> DataFrame:
    """The label: a function that the network can learn."""
    from pyspark.sql import functions as f

    df = spark.read.parquet(task.folder)
    return df.withColumn("label", (f.col("x0") + f.col("x1") * f.col("x2")).cast("float"))


def end_to_end(task: Task) -> list[Figures]:
    """Seconds from a DataFrame to a trained model, and of the steps alone.

    Raises:
        RuntimeError: a model's loss did not fall.
    """
    from petastorm.spark import SparkDatasetConverter, make_spark_converter
    from pyspark.ml.torch.distributor import TorchDistributor

    from horovod_runner import ClusterConfig, HorovodRunner

    steps = task.rows // SIZE // BATCH
    with launch.make_session() as spark, tempfile.TemporaryDirectory() as folder:
        spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{folder}")
        df = _labelled(spark, task)
        runner = HorovodRunner(np=SIZE, cluster_config=ClusterConfig(spark=spark))

        def distribute(function: Callable[..., Any], *arguments: Any) -> Any:
            distributor = TorchDistributor(SIZE, local_mode=False, use_gpu=False)
            return distributor.run(function, *arguments)

        def ours() -> float:
            start = time.perf_counter()
            losses = runner.run(train_ours, train=df)
            return _learnt(losses, steps, time.perf_counter() - start)

        def peer(batched: bool) -> float:
            start = time.perf_counter()
            converter = make_spark_converter(df)
            losses = distribute(train_petastorm, converter, steps, batched)
            seconds = time.perf_counter() - start
            converter.delete()  # otherwise the next round would reuse it
            return _learnt(losses, steps, seconds)

        systems: Systems = {
            "ours": ours,
            "TorchDistributor": lambda: peer(False),
            "TorchDistributor, BatchedDataLoader": lambda: peer(True),
            "floor, Horovod": lambda: runner.run(floor, horovod=True, steps=steps),
            "floor, DDP": lambda: distribute(floor, False, steps),
        }
        return _take_turns(systems, task.rounds)


def _learnt(losses: list[float], steps: int, seconds: float) -> float:
    if len(losses) != EPOCHS * steps or not np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10]):
        raise RuntimeError(f"{len(losses)} steps, from {losses[:10]} to {losses[-10:]}")
    return seconds


# A DataFrame to a DataFrame with predictions.


def weights_petastorm(converter: SparkDatasetConverter, steps: int) -> dict[str, Any]:
    """Train as :func:`train_petastorm` does with its faster loader; returns the weights."""
    import torch
    from petastorm.pytorch import BatchedDataLoader

    training = Training(horovod=False)
    with converter.make_torch_dataloader(
        batch_size=BATCH,
        num_epochs=None,
        cur_shard=training.rank,
        shard_count=SIZE,
        data_loader_fn=BatchedDataLoader,
        shuffling_queue_capacity=16 * BATCH,
    ) as loader:
        training.fit(
            (torch.stack([batch[name] for name in NARROW], dim=1), batch["label"])
            for batch in islice(loader, EPOCHS * steps)
        )
    return training.weights()


def _score_by_udf(df: DataFrame, weights: dict[str, Any]) -> DataFrame:
    """Score with pyspark's predict_batch_udf."""
    import torch
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions as f
    from pyspark.sql.types import FloatType

    net = _network()
    net.load_state_dict(weights)

    def make() -> Callable[[Any], Any]:
        def predict(x: Any) -> Any:
            with torch.inference_mode():
                return net(torch.from_numpy(np.ascontiguousarray(x))).numpy()[:, 0]

        return predict

    score = predict_batch_udf(
        make, return_type=FloatType(), batch_size=BATCH, input_tensor_shapes=[[len(NARROW)]]
    )
    return df.withColumn("prediction", score(f.array(*NARROW)))


def scored(task: Task) -> list[Figures]:
    """Seconds from a DataFrame to a trained model and all rows with their predictions.

    Raises:
        RuntimeError: the predictions are no better than the mean of the labels.
    """
    import torch
    from petastorm.spark import SparkDatasetConverter, make_spark_converter
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import functions as f

    from horovod_runner.ml import TorchEstimator

    steps = task.rows // SIZE // BATCH
    with launch.make_session() as spark, tempfile.TemporaryDirectory() as folder:
        spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{folder}")
        df = _labelled(spark, task)

        def ours() -> DataFrame:
            torch.manual_seed(0)
            estimator = TorchEstimator(
                np=SIZE,
                model=_network(),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
                loss=torch.nn.MSELoss(),
                feature_cols=[NARROW],
                label_cols=["label"],
                batch_size=BATCH,
                epochs=EPOCHS,
                use_gpu=False,
                verbose=0,
            )
            return estimator.fit(df).transform(df)

        def peer() -> DataFrame:
            converter = make_spark_converter(df)
            distributor = TorchDistributor(SIZE, local_mode=False, use_gpu=False)
            weights = distributor.run(weights_petastorm, converter, steps)
            converter.delete()  # otherwise the next round would reuse it
            return _score_by_udf(df, weights)

        def whole(system: Callable[[], DataFrame]) -> float:
            start = time.perf_counter()
            result = system()
            result.write.mode("overwrite").format("noop").save()
            seconds = time.perf_counter() - start
            error = f.avg((f.col("prediction") - f.col("label")) ** 2)
            row = result.select(error.alias("error"), f.variance("label").alias("spread")).first()
            if row is None or not row["error"] < 0.8 * row["spread"]:
                raise RuntimeError(f"nothing was learnt: {row}")
            return seconds

        return _take_turns({"ours": lambda: whole(ours), "peer": lambda: whole(peer)}, task.rounds)


def estimator(task: Task) -> Figures:
    """Run Horovod's TorchEstimator, to see whether it works here."""
    import torch

    if find_spec("tensorboard") is None:  # the estimator imports it, and uses it only for logs
        stand_in = ModuleType("torch.utils.tensorboard")
        vars(stand_in)["SummaryWriter"] = object
        sys.modules[stand_in.__name__] = stand_in
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import Store
    from horovod.spark.torch import TorchEstimator
    from torch import nn

    with launch.make_session() as spark, tempfile.TemporaryDirectory() as folder:
        net = _network()
        made = TorchEstimator(
            backend=SparkBackend(num_proc=SIZE),
            store=Store.create(folder),
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
            loss=nn.MSELoss(),
            feature_cols=NARROW,
            input_shapes=[[-1, len(NARROW)]],
            label_cols=["label"],
            batch_size=BATCH,
            epochs=EPOCHS,
        )
        return {"seconds": _seconds(lambda: made.fit(_labelled(spark, task)))}


MEASURES: dict[str, Callable[[Task], Figures | list[Figures]]] = {
    "frame": frame,
    "end_to_end": end_to_end,
    "scored": scored,
    "estimator": estimator,
}
