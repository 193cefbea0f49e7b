"""Train a small PyTorch network on handwritten digits with Horovod.

    python examples/digits_torch.py --np -2    # two ranks on this machine, without Spark
    python examples/digits_torch.py --np 2     # two ranks in a local Spark barrier job
    spark-submit --master spark://host:7077 examples/digits_torch.py --np 4

The numbered comments mark the eight steps that turn a script for one process into one for many.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from horovod_runner import HorovodRunner, log_to_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HELD_OUT = 360  # of 1797 digits
BATCH_SIZE = 32  # on each rank
LEARNING_RATE = 0.003  # with one rank


def train(epochs: int, checkpoint: str | None = None) -> dict[str, Any]:
    """Train as one of the ranks; HorovodRunner hands back what rank 0 returns."""
    # Imported here, where the ranks run: the driver needs neither torch nor Horovod.
    import horovod.torch as hvd
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    # 1. Start Horovod.
    hvd.init()

    # 2. Pin this rank to its own GPU.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda")

    # 3. Partition the data: the sampler shuffles anew in every epoch and gives each rank its part.
    #    All parts have the same number of batches, or the rank with one more would wait forever.
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        images, torch.tensor(labels), test_size=HELD_OUT, random_state=0, stratify=labels
    )
    digits = TensorDataset(train_x, train_y)
    sampler = DistributedSampler(digits, num_replicas=hvd.size(), rank=hvd.rank(), seed=0)
    batches = DataLoader(digits, batch_size=BATCH_SIZE, sampler=sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).to(device)

    # 4. Scale the learning rate: a step averages the gradients of hvd.size() batches.
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE * hvd.size())

    # 5. Wrap the optimizer: step() applies the gradients averaged over all ranks.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # 6. Start all ranks from rank 0's weights and optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another shuffle
        total = torch.zeros(())
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach().cpu()

        # 7. Average the metrics over the ranks: each has seen its own part only.
        losses.append(hvd.allreduce(total / len(batches), name="loss").item())

        # 8. Log and write checkpoints on rank 0 alone.
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}")
            if checkpoint is not None:
                torch.save(model.state_dict(), f"{checkpoint}.part")
                os.replace(f"{checkpoint}.part", checkpoint)  # never half a file

    # Every rank looks at its part of the held-out digits; the counts are summed.
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        hits = model(test_x[mine].to(device)).argmax(dim=1).cpu() == test_y[mine]
    correct = hvd.allreduce(hits.sum(), op=hvd.Sum, name="correct")
    return {"accuracy": correct.item() / HELD_OUT, "losses": losses}


def start_spark(np: int) -> SparkSession:
    """The session of spark-submit, or one on this machine with a slot for each rank."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("digits").config("spark.ui.showConsoleProgress", "false")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit, which chooses a master, sets it
        builder = builder.master(f"local[{np}]")
    return builder.getOrCreate()


def main() -> int:
    """Parse the command line, train, and say how well it went."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Horovod.")
    parser.add_argument("--np", type=int, default=2, help="ranks; below 0: without Spark")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoint", type=os.path.abspath, help="a file for the weights")
    args = parser.parse_args()

    spark = start_spark(args.np) if args.np > 0 else contextlib.nullcontext()
    with spark:
        result = HorovodRunner(np=args.np).run(
            train, epochs=args.epochs, checkpoint=args.checkpoint
        )
    print(f"accuracy on {HELD_OUT} held-out digits: {result['accuracy']:.1%}")
    return 0 if result["accuracy"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
