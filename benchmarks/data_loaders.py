"""The measurements of ``data.py`` that need one process each: loaders, memory, planning.

Every function here runs in a separate child process (``Bench.measure``) with OMP_NUM_THREADS=1 and
the benchmark's folder for temporary files. Its return value goes to JSON.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import torch

    from horovod_runner.data import Feed, Image, Shard

    Array = np.ndarray[Any, np.dtype[Any]]

BATCH = 256
NARROW = [f"x{number}" for number in range(16)]
_WIDTH = 784
_PIXELS = 64
# The number of threads of Petastorm's Spark converter, and of rows in its shuffling buffer. More
# rows would mix better and take longer.
_WORKERS = 4
_CAPACITY = 4096

Figures = dict[str, float]


class Task(NamedTuple):
    """The dataset and the duration of a measurement.

    Attributes:
        kind: the kind of the dataset.
        folder: the folder of the dataset.
        rows: number of rows of the dataset.
        seconds: minimum duration of the timed epochs.
        rounds: number of repetitions, for measurements in one process.
        large: whether the dataset is written without compression, in more files.
    """

    kind: str
    folder: str
    rows: int
    seconds: float = 3.0
    rounds: int = 1
    large: bool = False


def columns_of(kind: str) -> dict[str, Any]:
    """The ``columns`` argument for ``Shard``."""
    return {"x": {"narrow": NARROW, "vec": "x", "jpeg": "image"}[kind], "y": "label"}


# The data. Labels number the rows, which shows whether each row came exactly once.


def make(task: Task) -> Figures:
    """Write a dataset: 4 files of 4 row groups; a large one has more files."""
    if task.kind == "jpeg":
        _make_jpeg(task.folder, task.rows)
        return {}
    import pyarrow.parquet as pq

    table = {"narrow": _narrow, "vec": _vec}[task.kind]
    random = np.random.default_rng(0)
    files, groups = (-(-task.rows // 4_000_000), 4) if task.large else (4, 4)
    ends = [task.rows * number // (files * groups) for number in range(files * groups + 1)]
    options = {"compression": "NONE", "use_dictionary": False} if task.large else {}
    Path(task.folder).mkdir()
    for file in range(files):
        path = Path(task.folder, f"part-{file:05}.parquet")
        writer = None
        for group in range(file * groups, (file + 1) * groups):
            part = table(random, ends[group], ends[group + 1])
            writer = writer or pq.ParquetWriter(path, part.schema, **options)
            writer.write_table(part)
        assert writer is not None
        writer.close()
    return {}


def _narrow(random: np.random.Generator, start: int, end: int) -> pa.Table:
    columns = {name: random.random(end - start, dtype=np.float32) for name in NARROW}
    return pa.table({**columns, "label": np.arange(start, end)})


def _vec(random: np.random.Generator, start: int, end: int) -> pa.Table:
    rows = end - start
    values = pa.array(random.random(rows * _WIDTH, dtype=np.float32))
    ends = pa.array(np.arange(rows + 1, dtype=np.int32) * _WIDTH)
    return pa.table({"x": pa.ListArray.from_arrays(ends, values), "label": np.arange(start, end)})


def _make_jpeg(folder: str, rows: int) -> None:
    """Smooth noise in Petastorm's own format, which is Parquet with a binary column."""
    import launch
    from petastorm.codecs import CompressedImageCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql.types import LongType

    shape = (_PIXELS, _PIXELS, 3)
    schema = Unischema(
        "Images",
        [
            UnischemaField("label", np.int64, (), ScalarCodec(LongType()), False),
            UnischemaField("image", np.uint8, shape, CompressedImageCodec("jpeg", 90), False),
        ],
    )

    def row(number: int) -> Any:
        from PIL import Image

        noise = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        smooth = Image.fromarray(noise).resize(shape[:2], Image.Resampling.BICUBIC)
        return dict_to_spark_row(schema, {"label": number, "image": np.asarray(smooth)})

    url = f"file://{folder}"
    with (
        launch.make_session() as spark,
        materialize_dataset(spark, url, schema, row_group_size_mb=1),
    ):
        rdd = spark.sparkContext.parallelize(range(rows), 4).map(row)
        spark.createDataFrame(rdd, schema.as_spark_schema()).write.parquet(url)


def _check(labels: Iterable[Any], rows: int, padding: int = 0) -> None:
    """Check that every row came once, except for padding of the last batch.

    Raises:
        RuntimeError: a row is missing or came too often.
    """
    counts = np.bincount(np.concatenate([np.asarray(part) for part in labels]), minlength=rows)
    if len(counts) != rows or counts.min() < 1 or counts.sum() - rows > padding:
        raise RuntimeError(f"{counts.sum()} rows came, {np.count_nonzero(counts)} of {rows}")


def _steps(batches: Iterable[Any]) -> int:
    count = 0
    for _ in batches:
        count += 1
    return count


def _timed(epoch: Callable[[], Any], task: Task) -> Figures:
    """Time epochs for some seconds, at least three: rows per second, and the number of busy cores.

    Args:
        epoch: runs one epoch.
        task: has the duration.
    """
    times: list[float] = []
    cores: list[float] = []
    while sum(times) < task.seconds or len(times) < 3:
        with _own_folder():
            processor, start = time.process_time(), time.perf_counter()
            epoch()
            times.append(time.perf_counter() - start)
            cores.append((time.process_time() - processor) / times[-1])
    return {"rate": task.rows / median(times), "cores": median(cores)}


@contextmanager
def _own_folder() -> Iterator[None]:
    """Use a new folder for packed data, so that the data are packed again."""
    from horovod_runner.host.scratch import VARIABLE

    there = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder
        yield
    del os.environ[VARIABLE]
    if there is not None:
        os.environ[VARIABLE] = there


# This package.


def _feed(task: Task, images: Mapping[str, Image] | None = None) -> Feed[Any]:
    return _shard(task).to_torch(BATCH, columns_of(task.kind), shuffle=True, images=images)


def _shard(task: Task) -> Shard:
    from horovod_runner.data import Shard, parquet

    return Shard("train", parquet(task.folder).prepare("train", None))


def ours(task: Task, *, cache: bool = False) -> Figures:
    """Shuffled epochs of ``to_torch``, from the second one on."""
    from horovod_runner.data import Image

    images = {"image": Image(_PIXELS, _PIXELS, cache=cache)} if task.kind == "jpeg" else None
    feed = _feed(task, images)
    _check((y for _, y in feed), task.rows, BATCH - 1)
    return _timed(lambda: _steps(feed), task)


def ours_cached(task: Task) -> Figures:
    """Shuffled epochs of images that were decoded to disk."""
    return ours(task, cache=True)


def ours_first(task: Task) -> Figures:
    """First epochs, each from listing the files to the last batch, with packing."""
    _check((y for _, y in _feed(task)), task.rows, BATCH - 1)
    return _timed(lambda: _steps(_feed(task)), task)


def ours_tf(task: Task) -> Figures:
    """Shuffled epochs of ``to_tf``, from the second one on."""
    dataset = _shard(task).to_tf(BATCH, columns_of(task.kind), shuffle=True)
    _check((y for _, y in dataset), task.rows, BATCH - 1)
    return _timed_tf(dataset, task)


def no_data_tf(task: Task) -> Figures:
    """The same number of steps over a dataset of numbers: the time that TensorFlow itself needs."""
    import tensorflow as tf

    return _timed_tf(tf.data.Dataset.range(-(-task.rows // BATCH)), task)


def gather_tf(task: Task) -> Figures:
    """Shuffled batches that TensorFlow itself gathers, from tensors in its memory."""
    import tensorflow as tf

    matrix, labels = (tf.constant(array) for array in _raw(task))
    count = -(-task.rows // BATCH)

    def gathered(order: Any) -> tuple[Any, Any]:
        return tf.gather(matrix, order), tf.gather(labels, order)

    def shuffled(_: Any) -> Any:
        order = tf.random.shuffle(tf.range(task.rows))
        return tf.data.Dataset.from_tensor_slices(order).batch(BATCH)

    dataset = tf.data.Dataset.range(1).flat_map(shuffled).map(gathered).prefetch(2)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    _check((y for _, y in dataset), task.rows)
    return _timed_tf(dataset, task)


def _timed_tf(dataset: Any, task: Task) -> Figures:
    """Rates of a loop in Python, and of one in a graph as in ``model.fit``."""
    import tensorflow as tf

    @tf.function
    def in_graph() -> Any:
        count = tf.constant(0)
        for _ in dataset:
            count += 1
        return count

    in_graph()
    eager = _timed(lambda: _steps(dataset), task)
    return {**eager, "graph": _timed(in_graph, task)["rate"]}


# Peers.


def raw_gather(task: Task) -> Figures:
    """A hand-written loop over the same matrices, all rows permuted.

    It gathers sixteen batches at once, into memory that it reuses for the next sixteen.
    """
    matrix, labels = _raw(task)
    random = np.random.default_rng(0)

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return _gathered(matrix, labels, random.permutation(task.rows))

    _check((y.clone() for _, y in epoch()), task.rows)
    return _timed(lambda: _steps(epoch()), task)


def _gathered(matrix: Array, labels: Array, order: Array) -> Iterator[Any]:
    import torch

    count = 16 * BATCH
    x_out, y_out = np.empty((count, matrix.shape[1]), matrix.dtype), np.empty(count, labels.dtype)
    for start in range(0, len(order), count):
        part = order[start : start + count]
        x, y = x_out[: len(part)], y_out[: len(part)]
        np.take(matrix, part, axis=0, out=x, mode="clip")
        np.take(labels, part, out=y, mode="clip")
        yield from zip(
            torch.from_numpy(x).split(BATCH), torch.from_numpy(y).split(BATCH), strict=True
        )


def raw_first(task: Task) -> Figures:
    """A hand-written first epoch: all rows scanned, written to a file as a matrix, and gathered.

    A loader that shuffles all rows and keeps them on disk has to do this work.
    """
    width = len(NARROW) if task.kind == "narrow" else _WIDTH

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with tempfile.TemporaryDirectory() as folder:
            matrix = np.memmap(f"{folder}/matrix", np.float32, "w+", shape=(task.rows, width))
            labels = np.memmap(f"{folder}/labels", np.int64, "w+", shape=(task.rows,))
            start = 0
            for *columns, label in _scanned(task):
                end = start + len(label)
                if task.kind == "narrow":
                    np.stack(columns, axis=1, out=matrix[start:end])
                else:
                    matrix[start:end] = columns[0].reshape(-1, width)
                labels[start:end] = label
                start = end
            order = np.random.default_rng(0).permutation(task.rows)
            yield from _gathered(np.asarray(matrix), np.asarray(labels), order)

    _check((y.clone() for _, y in epoch()), task.rows)
    return _timed(lambda: _steps(epoch()), task)


def _raw(task: Task) -> tuple[Array, Array]:
    """The dataset as a matrix and labels, memory-mapped."""
    paths = [Path(f"{task.folder}-{name}.npy") for name in ("matrix", "labels")]
    if not paths[1].exists():
        for path, array in zip(paths, _arrays(task), strict=True):
            np.save(path, array)
    matrix, labels = (np.asarray(np.load(path, mmap_mode="r")) for path in paths)
    return matrix, labels


def _arrays(task: Task) -> tuple[Array, Array]:
    import pyarrow.parquet as pq

    table = pq.read_table(task.folder)
    if task.kind == "narrow":
        matrix = np.stack([table[name].to_numpy() for name in NARROW], axis=1)
    else:
        matrix = table["x"].combine_chunks().flatten().to_numpy().reshape(-1, _WIDTH)
    return matrix, table["label"].to_numpy()


def decoder(task: Task) -> Figures:
    """All images decoded one after the other by simplejpeg, from memory, and forgotten."""
    import simplejpeg

    images = _encoded(task)

    def epoch() -> None:
        for image in images:
            simplejpeg.decode_jpeg(image, colorspace="RGB")

    return _timed(epoch, task)


def decoder_batches(task: Task) -> Figures:
    """All images decoded in a shuffled order, from memory, into batches that reuse their memory."""
    import simplejpeg

    images = _encoded(task)
    batch = np.empty((BATCH, _PIXELS, _PIXELS, 3), np.uint8)
    random = np.random.default_rng(0)

    def epoch() -> None:
        order = random.permutation(len(images)).tolist()
        for start in range(0, len(order), BATCH):
            for place, row in enumerate(order[start : start + BATCH]):
                batch[place] = simplejpeg.decode_jpeg(images[row], colorspace="RGB")

    return _timed(epoch, task)


def _encoded(task: Task) -> list[bytes]:
    import pyarrow.parquet as pq

    found: list[bytes] = pq.read_table(task.folder, columns=["image"])["image"].to_pylist()
    return found


def torch_loader(task: Task) -> Figures:
    """Torch's DataLoader over tensors in memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    tensors = [torch.from_numpy(array.copy()) for array in _arrays(task)]
    loader = DataLoader(TensorDataset(*tensors), batch_size=BATCH, shuffle=True)
    _check((y for _, y in loader), task.rows)
    return _timed(lambda: _steps(loader), task)


def scan(task: Task) -> Figures:
    """All rows from Parquet to NumPy in the order of the files, by pyarrow.dataset."""
    _check((arrays[-1] for arrays in _scanned(task)), task.rows)
    return _timed(lambda: _steps(_scanned(task)), task)


def _scanned(task: Task) -> Iterator[list[Array]]:
    import pyarrow.dataset as ds

    names = [*NARROW, "label"] if task.kind == "narrow" else ["x", "label"]
    for batch in ds.dataset(task.folder).to_batches(columns=names, batch_size=8192):
        yield [
            (one.flatten() if pa.types.is_list(one.type) else one).to_numpy()
            for one in batch.columns
        ]


def petastorm(task: Task, decode: Callable[[bytes], Array] | None = None) -> Figures:
    """Petastorm's fastest torch loader, shuffled: BatchedDataLoader over make_batch_reader.

    A TransformSpec decodes images by OpenCV. With Petastorm's own codecs (``petastorm_codec``)
    BatchedDataLoader adds every image separately, and is far slower than DataLoader.
    """
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader
    from petastorm.transform import TransformSpec

    spec = None
    if task.kind == "jpeg":
        shape = (_PIXELS, _PIXELS, 3)
        transform = partial(_decoded, decode or _opencv)
        spec = TransformSpec(transform, edit_fields=[("image", np.uint8, shape, False)])
    with make_batch_reader(
        f"file://{task.folder}", num_epochs=1, workers_count=_WORKERS, transform_spec=spec
    ) as reader:
        loader = BatchedDataLoader(reader, BATCH, shuffling_queue_capacity=_CAPACITY)
        _check((batch["label"] for batch in loader), task.rows)
        return _timed(lambda: _steps(loader), task)


def petastorm_pillow(task: Task) -> Figures:
    """The same loader, with images decoded by Pillow."""
    return petastorm(task, _pillow)


def _decoded(decode: Callable[[bytes], Array], frame: Any) -> Any:
    return frame.assign(image=[decode(image) for image in frame["image"]])


def _opencv(image: bytes) -> Array:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _pillow(image: bytes) -> Array:
    from PIL import Image as Pillow

    return np.asarray(Pillow.open(io.BytesIO(image)))


def petastorm_codec(task: Task) -> Figures:
    """Petastorm's loader for images with its own codec: DataLoader over make_reader."""
    from petastorm import make_reader
    from petastorm.pytorch import DataLoader

    with make_reader(f"file://{task.folder}", num_epochs=1, workers_count=_WORKERS) as reader:
        loader = DataLoader(reader, BATCH, shuffling_queue_capacity=_CAPACITY)
        _check((batch["label"] for batch in loader), task.rows)
        return _timed(lambda: _steps(loader), task)


def petastorm_tf(task: Task) -> Figures:
    """The pipeline that Petastorm's Spark converter makes for TensorFlow, shuffled."""
    import tensorflow as tf
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    with make_batch_reader(f"file://{task.folder}", num_epochs=1, workers_count=_WORKERS) as reader:
        dataset = make_petastorm_dataset(reader).flat_map(tf.data.Dataset.from_tensor_slices)
        dataset = dataset.shuffle(_CAPACITY).batch(BATCH).prefetch(tf.data.AUTOTUNE)
        _check((batch.label for batch in dataset), task.rows)
        return _timed_tf(dataset, task)


# Memory, planning, large data.


class AnonymousPeak:
    """Measures the maximum anonymous memory (RssAnon) of this process in a context, in MB."""

    def __init__(self) -> None:
        self.megabytes = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def _watch(self) -> None:
        while True:
            self.megabytes = max(self.megabytes, anonymous_megabytes())
            if self._done.wait(0.002):
                return

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def anonymous_megabytes() -> float:
    """The anonymous memory (RssAnon) of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


def scan_memory(task: Task) -> Figures:
    """Anonymous memory of a pyarrow scan, above that before it."""
    with _tiny(task) as tiny:
        _steps(_scanned(tiny))
    before = anonymous_megabytes()
    with AnonymousPeak() as peak:
        _steps(_scanned(task))
    return {"megabytes": peak.megabytes - before}


@contextmanager
def _tiny(task: Task) -> Iterator[Task]:
    """A dataset of a thousand rows, for warming up."""
    import pyarrow.parquet as pq

    first = min(Path(task.folder).glob("*.parquet"))
    with tempfile.TemporaryDirectory() as folder, _own_folder():
        few = next(pq.ParquetFile(first).iter_batches(1000))
        pq.write_table(pa.Table.from_batches([few]), Path(folder, "part.parquet"))
        yield task._replace(folder=folder, rows=1000)


def plan(_: Task) -> Figures:
    """Milliseconds to build an order and to get its first 16 batches, for 1 and for 4 ranks."""
    from horovod_runner.data.feed.order import Order

    figures = {}
    for size in (1, 4):
        for name, epoch, half in (("start", 0, 0), ("middle", 3, 1)):
            start = time.perf_counter()
            order = Order(10**8, 1024, seed=1)
            taken = order.take(epoch, half * (order.steps // 2), 16, 0, size)
            figures[f"{name}, {size}"] = (time.perf_counter() - start) * 1e3
            assert taken.shape == (16, 1024 // size)
    return figures


def pack(task: Task) -> Figures:
    """Pack a dataset in the folder that HOROVOD_RUNNER_DATA names."""
    with _tiny(task) as tiny:
        _steps(_feed(tiny))
    before = anonymous_megabytes()
    start = time.perf_counter()
    with AnonymousPeak() as peak:
        feed = _feed(task)
    seconds = time.perf_counter() - start
    assert len(feed) == -(-task.rows // BATCH)
    os.sync()
    return {"rate": task.rows / seconds, "megabytes": peak.megabytes - before}


def packed_epoch(task: Task) -> Figures:
    """Two shuffled epochs of the data that ``pack`` packed, with an empty page cache at first."""
    with _tiny(task) as tiny:
        _steps(_feed(tiny))
    _drop_from_cache()
    before = anonymous_megabytes()
    feed = _feed(task)
    times = [time.perf_counter()]
    with AnonymousPeak() as peak:
        for _ in range(2):
            assert _steps(feed) == -(-task.rows // BATCH)
            times.append(time.perf_counter())
    first, second = (task.rows / (end - start) for start, end in pairwise(times))
    return {"rate": first, "rate again": second, "megabytes": peak.megabytes - before}


def sequential(task: Task) -> Figures:
    """Read the packed files sequentially, without page cache: the limit of the disk."""
    _drop_from_cache()
    buffer = bytearray(8 << 20)
    size = 0
    start = time.perf_counter()
    for path in _packed_files():
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    seconds = time.perf_counter() - start
    return {"rate": task.rows / seconds, "bytes per second": size / seconds}


def _packed_files() -> list[Path]:
    from horovod_runner.host.scratch import VARIABLE

    return [path for path in Path(os.environ[VARIABLE]).rglob("fixed-*") if path.is_file()]


def _drop_from_cache() -> None:
    for path in _packed_files():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


MEASURES: dict[str, Callable[..., Figures]] = {
    function.__name__: function
    for function in (
        make,
        ours,
        ours_cached,
        ours_first,
        ours_tf,
        no_data_tf,
        gather_tf,
        raw_gather,
        raw_first,
        decoder,
        decoder_batches,
        torch_loader,
        scan,
        petastorm,
        petastorm_pillow,
        petastorm_codec,
        petastorm_tf,
        scan_memory,
        plan,
        pack,
        packed_epoch,
        sequential,
    )
}


def quiet() -> None:
    """Suppress warnings of Petastorm and TensorFlow that do not concern the measurement."""
    import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
