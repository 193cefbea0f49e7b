"""Train an image classifier on any number of workers, on CPUs or GPUs.

    python examples/image_classifier.py    # handwritten digits, two workers on this machine
    python examples/image_classifier.py --images photos --size 64    # with a folder for each class
    python examples/image_classifier.py --images cifar-10-batches-bin --workers 4 --gpu
    python examples/image_classifier.py --master spark://host:7077 --nodes 2 --workers 4
    sbatch --ntasks=4 --wrap "python examples/image_classifier.py --workers 4"

``--gpu`` moves the same training from CPUs to GPUs. After an error or Ctrl-C all workers end:
`horovod-runner ps` lists none.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_runner import (
    CheckpointConfig,
    ClusterConfig,
    HorovodRunner,
    HorovodRunnerError,
    load_checkpoint,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.data import Image, Shard, evaluate

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import SparkSession

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
HELD_OUT = 5  # every fifth image
CIFAR_10 = ["airplane", "automobile", "bird", "cat", "deer"]
CIFAR_10 += ["dog", "frog", "horse", "ship", "truck"]


def train(
    images: Shard, held_out: Shard, *, classes: int, size: int, epochs: int, batch_size: int
) -> dict[str, float]:
    """Train as one of the workers; ``run`` returns rank 0's value."""
    import horovod.torch as hvd
    import torch
    from torch import nn

    hvd.init()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(hvd.local_rank())

    columns = {"x": "image", "y": "label"}
    decoded = {"image": Image(size, size, cache=True)}
    batches = images.to_torch(batch_size, columns, images=decoded, shuffle=True)
    test = held_out.to_torch(batch_size, columns, images=decoded)

    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    model = nn.Sequential(
        *(block(3, 32), block(32, 64), nn.MaxPool2d(2), block(64, 128), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128 * 4, classes)),
    )
    model = model.cuda() if gpu else model

    def predict(x: torch.Tensor) -> torch.Tensor:
        return model(x.float() / 127.5 - 1)  # pixels are 0 to 255

    def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": predict(x).argmax(dim=1) == y}

    optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first, accuracy = 0, 0.0
    checkpoint = load_checkpoint()
    if checkpoint is not None:
        first = checkpoint.state["epoch"]
        model.load_state_dict(checkpoint.state["model"])
        optimizer.load_state_dict(checkpoint.state["optimizer"])
        batches.load_state_dict(checkpoint.state["batches"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(first + 1, epochs + 1):
        model.train()
        for step, (x, y) in enumerate(batches, start=(epoch - 1) * len(batches) + 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(predict(x), y)
            loss.backward()
            optimizer.step()
            report(loss=loss.item(), step=step, epoch=epoch, total_steps=epochs * len(batches))

        model.eval()
        accuracy = evaluate(test, measure)["accuracy"]
        report(accuracy=accuracy, step=step, epoch=epoch)
        state = {"epoch": epoch, "batches": batches.state_dict()}
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(state, step, metrics={"accuracy": accuracy})
        if hvd.rank() == 0:
            where = f"{hvd.size()} {'GPU' if gpu else 'CPU'} worker(s)"
            log_to_driver(f"epoch {epoch:2} on {where}: accuracy {accuracy:.1%}")
    return {"accuracy": accuracy, "epochs": epochs}


def load(where: str) -> tuple[pa.Table, list[str]]:
    """A table with the columns image (encoded) and label, and the names of the classes."""
    import pyarrow as pa

    folder = Path(where)
    if where == "digits":
        rows, names = _digits(), [str(digit) for digit in range(10)]
    elif not folder.is_dir():
        raise SystemExit(f"--images {where}: there is no such folder")
    elif (folder / "data_batch_1.bin").exists():
        rows, names = _cifar_10(folder), CIFAR_10
    elif (folder / "data_batch_1").exists():
        raise SystemExit(
            f"--images {where}: this is the Python version of CIFAR-10, with pickles; download the "
            "binary version (cifar-10-binary.tar.gz)"
        )
    else:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        rows = _files(folder, names)
    images, labels = zip(*rows, strict=True)
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    return pa.table([images, labels], schema=schema), names


def _digits() -> Iterator[tuple[bytes, int]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    for pixels, label in zip(digits.images, digits.target, strict=True):
        yield _png((pixels * 15.9375).astype("uint8")), int(label)


def _cifar_10(folder: Path) -> Iterator[tuple[bytes, int]]:
    """The binary version: a byte for the label, then 32 x 32 bytes each of red, green and blue."""
    import numpy as np

    for path in sorted(folder.glob("*_batch*.bin")):
        for record in np.fromfile(path, np.uint8).reshape(-1, 3073):
            yield _png(record[1:].reshape(3, 32, 32).transpose(1, 2, 0)), int(record[0])


def _files(folder: Path, names: list[str]) -> Iterator[tuple[bytes, int]]:
    found = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise SystemExit(
            f"--images {folder}: no images there; a folder for each class is expected, "
            f"{folder}/cat/1.jpg, with files of {', '.join(SUFFIXES)}"
        )
    for path, label in found:
        yield path.read_bytes(), label


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    import numpy as np
    from PIL import Image as Pillow

    encoded = io.BytesIO()
    Pillow.fromarray(np.ascontiguousarray(pixels)).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def start_spark(options: argparse.Namespace) -> SparkSession:
    """A session with one executor on each node and a slot for each worker."""
    from pyspark.sql import SparkSession

    each = -(-options.workers // options.nodes)
    builder = SparkSession.builder.appName("image classifier")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if options.master is None:  # spark-submit has chosen one
        return builder.getOrCreate()
    builder = builder.master(options.master)
    if not options.master.startswith("local"):
        builder = builder.config("spark.executor.instances", options.nodes)
        builder = builder.config("spark.executor.cores", each)
        builder = builder.config("spark.cores.max", each * options.nodes)
        if options.gpu:
            builder = builder.config("spark.executor.resource.gpu.amount", each)
            builder = builder.config("spark.task.resource.gpu.amount", 1)
    return builder.getOrCreate()


def main() -> int:
    """Parse the command line, train, and print the accuracy."""
    parser = argparse.ArgumentParser(description="Train an image classifier with Horovod.")
    parser.add_argument(
        "--images",
        default="digits",
        help="digits, CIFAR-10's binary folder, or a folder of classes",
    )
    parser.add_argument("--size", type=int, default=32, help="pixels; images are resized to it")
    parser.add_argument("--workers", type=int, default=2, help="number of ranks")
    parser.add_argument("--nodes", type=int, default=1, help="executors, with --master")
    parser.add_argument("--master", help="a Spark master; without one, workers run on this machine")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker; otherwise CPUs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a batch on each worker")
    parser.add_argument("--checkpoint-dir", help="a folder or URL for checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the latest checkpoint")
    options = parser.parse_args()
    if options.workers < 1 or options.nodes < 1 or options.workers < options.nodes:
        parser.error("--workers and --nodes must be 1 or more, with a worker on every node")
    on_spark = options.master is not None or "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit
    in_slurm = "SLURM_JOB_ID" in os.environ and not on_spark
    if options.nodes > 1 and options.master is None:
        parser.error("--nodes requires --master; Slurm and spark-submit have their own settings")

    table, names = load(options.images)
    rows = range(table.num_rows)
    parts = [[row for row in rows if (row % HELD_OUT == 0) == held] for held in (False, True)]
    images, held_out = (table.take(part) for part in parts)
    print(f"{images.num_rows} images of {len(names)} classes, and {held_out.num_rows} held out")
    with start_spark(options) if on_spark else contextlib.nullcontext() as spark:
        runner = HorovodRunner(
            np=options.workers if on_spark or in_slurm else -options.workers,
            cluster_config=ClusterConfig(spark=spark, launcher="slurm" if in_slurm else "spark"),
            gpus_per_rank=1 if options.gpu else 0,
            checkpoint_dir=options.checkpoint_dir,
            checkpoint_config=CheckpointConfig(metric="accuracy", mode="max"),
            resume=options.resume,
        )
        try:
            result = runner.run(
                train,
                images=images,
                held_out=held_out,
                classes=len(names),
                size=options.size,
                epochs=options.epochs,
                batch_size=options.batch_size,
            )
        except KeyboardInterrupt:
            print("interrupted: all workers have ended")
            return 130
        except HorovodRunnerError as error:
            print(f"the training failed, and all workers have ended: {error}", file=sys.stderr)
            return 1
    print(f"accuracy on {held_out.num_rows} held-out images: {result['accuracy']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
