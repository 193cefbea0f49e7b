"""Train a small PyTorch network on handwritten digits with Horovod.

    python examples/digits_torch.py --np -2    # two ranks on this machine, without Spark
    python examples/digits_torch.py --np 2     # two ranks in a local Spark barrier job
    spark-submit --master spark://host:7077 examples/digits_torch.py --np 4
    python examples/digits_torch.py --checkpoint-dir digits --resume    # resumes

The numbered comments mark the eight steps that make a one-process script distributed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from horovod_runner import (
    CheckpointConfig,
    DebugConfig,
    HorovodRunner,
    check_weights,
    load_checkpoint,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.data import Shard, evaluate

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

HELD_OUT = 360  # of 1797 digits
BATCH_SIZE = 32  # on each rank
LEARNING_RATE = 0.003  # with one rank


def train(digits: Shard, held_out: Shard, epochs: int) -> dict[str, Any]:
    """Train as one of the ranks; ``run`` returns rank 0's value."""
    # Imported here, where the ranks run: the driver needs neither torch nor Horovod.
    import horovod.torch as hvd
    import torch
    from torch import nn

    # 1. Start Horovod.
    hvd.init()

    # 2. Pin this rank to its own GPU.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda")

    # 3. Partition the data: each rank gets its part of every batch, on its GPU, in a new order in
    #    each epoch. All ranks get the same number of batches; with one more, a rank would hang.
    columns = {"x": "image", "y": "label"}
    batches = digits.to_torch(BATCH_SIZE, columns, shuffle=True)

    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
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

    # The checkpoint of an earlier run or attempt, with the position in the data.
    losses: list[float] = []
    checkpoint = load_checkpoint()
    if checkpoint is not None:
        losses = checkpoint.state["losses"]
        model.load_state_dict(checkpoint.state["model"])
        optimizer.load_state_dict(checkpoint.state["optimizer"])
        batches.load_state_dict(checkpoint.state["batches"])

    # 6. Start all ranks from rank 0's weights and optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    steps = len(batches)
    for epoch in range(len(losses), epochs):
        total = torch.zeros(())
        for step, (x, y) in enumerate(batches, start=epoch * steps + 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach().cpu()
            report(loss=loss.item(), step=step, epoch=epoch + 1, total_steps=epochs * steps)

        # 7. Average the metrics over the ranks: each has seen only its part of the data.
        losses.append(hvd.allreduce(total / steps, name="loss").item())

        # 8. Log and write checkpoints only on rank 0: these calls do nothing on other ranks.
        report(epoch_loss=losses[-1], step=step, epoch=epoch + 1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"batches": batches.state_dict(), "losses": losses}
        save_checkpoint(state, step, metrics={"loss": losses[-1]})
        check_weights(model, epoch + 1)  # on all ranks: the driver compares their weights
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}")

    # Every rank evaluates its part of the held-out digits; evaluate averages over all rows.
    def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": model(x).argmax(dim=1) == y}

    return {**evaluate(held_out.to_torch(BATCH_SIZE, columns), measure), "losses": losses}


def load() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The digits to train on and those held out: a row has 64 pixels and a label."""
    import pandas as pd
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    digits = pd.DataFrame({"image": (pixels / 16).tolist(), "label": labels})
    train_set, test_set = train_test_split(
        digits, test_size=HELD_OUT, random_state=0, stratify=labels
    )
    return train_set, test_set


def start_spark(np: int) -> SparkSession:
    """The session of spark-submit, or a local one with a slot for each rank."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("digits").config("spark.ui.showConsoleProgress", "false")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit sets it, and the master
        builder = builder.master(f"local[{np}]")
    return builder.getOrCreate()


def main() -> int:
    """Parse the command line, train, and print the accuracy."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Horovod.")
    parser.add_argument("--np", type=int, default=2, help="ranks; below 0: without Spark")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoint-dir", help="a folder or URL for checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the latest checkpoint")
    parser.add_argument("--plot", help="a file for a plot of the losses")
    args = parser.parse_args()

    digits, held_out = load()
    with start_spark(args.np) if args.np > 0 else contextlib.nullcontext() as spark:
        if spark is not None:  # any Spark DataFrame; this one is made from pandas
            digits = spark.createDataFrame(digits, "image array<double>, label long")
            held_out = spark.createDataFrame(held_out, "image array<double>, label long")
        runner = HorovodRunner(
            np=args.np,
            checkpoint_dir=args.checkpoint_dir,
            resume=args.resume,
            checkpoint_config=CheckpointConfig(metric="loss"),
            debug_config=DebugConfig(weight_check="epoch"),
        )
        result = runner.run(train, digits=digits, held_out=held_out, epochs=args.epochs)
    print(f"accuracy on {HELD_OUT} held-out digits: {result['accuracy']:.1%}")
    if args.plot and runner.last_run.latest_metrics:
        runner.last_run.plot("loss", "epoch_loss").savefig(args.plot)
    elif args.plot:
        print(
            f"no {args.plot}: all {args.epochs} epochs were done before, and nothing was reported"
        )
    return 0 if result["accuracy"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
