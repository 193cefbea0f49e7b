"""Tune a PyTorch network with Optuna: several trials share the slots of one Spark cluster.

    python examples/tune_optuna.py                             # two trials of one rank at a time
    python examples/tune_optuna.py --np 2 --slots 4            # two trials of two ranks at a time
    spark-submit --master spark://host:7077 examples/tune_optuna.py --np 4 --slots 16

Each trial is a run in the background. Its ranks report the loss on held-out digits after each
epoch. Optuna compares it with the losses of the other trials, and a trial that falls behind is
cancelled.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import optuna
from pyspark.sql import SparkSession

from horovod_runner import ClusterConfig, HorovodRunner, report
from horovod_runner.data import Shard, Source, evaluate, packed
from horovod_runner.run.handle import RunHandle


def train(digits: Shard, held_out: Shard, rate: float, width: int, epochs: int) -> float:
    """Train as one of the ranks of a trial, and report the held-out loss of each epoch."""
    import horovod.torch as hvd
    import torch
    from torch import nn

    hvd.init()
    torch.manual_seed(0)
    columns = {"x": "image", "y": "label"}
    batches = digits.to_torch(global_batch=64, columns=columns, shuffle=True)
    held_out_batches = held_out.to_torch(64, columns)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(model(x), y, reduction="none")}

    loss = float("nan")
    for epoch in range(1, epochs + 1):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss = evaluate(held_out_batches, measure)["loss"]
        report(held_out_loss=loss, epoch=epoch)  # the driver passes it to Optuna
    return loss


def follow(trial: optuna.Trial, handle: RunHandle) -> float:
    """Pass a run's reports to Optuna until it ends; returns its result.

    Raises:
        TrialPruned: Optuna gives the trial up; its ranks have ended.
    """
    passed = 0
    while True:
        ended = handle.done()  # before the reports are read, so that none is missed
        reports = handle.metrics.to_pylist()
        for row in reports[passed:]:
            trial.report(row["held_out_loss"], step=row["epoch"])
            if trial.should_prune():
                handle.cancel()
                handle.exception()  # waits until the ranks have left their slots
                raise optuna.TrialPruned
        passed = len(reports)
        if ended:
            return float(handle.result())  # raises what a rank raised
        time.sleep(0.1)


def tune(
    data: dict[str, Source], *, np: int, at_a_time: int, trials: int, epochs: int
) -> optuna.Study:
    """Search for the learning rate and the width with the lowest loss.

    Args:
        data: the datasets of `train`.
        np: ranks of each trial.
        at_a_time: trials that run at the same time.
        trials: trials in all.
        epochs: epochs of a trial that is not pruned.
    """
    runner = HorovodRunner(
        np=np,
        env={"OMP_NUM_THREADS": "1"},  # other trials use the other cores
        progress=False,
        # One import of torch for all trials.
        cluster_config=ClusterConfig(preload_frameworks=["horovod.torch"]),
    )

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("rate", 1e-5, 1e-1, log=True)
        width = trial.suggest_int("width", 16, 128, log=True)
        return follow(trial, runner.start(train, **data, rate=rate, width=width, epochs=epochs))

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1),
    )
    study.enqueue_trial({"rate": 3e-3, "width": 64})  # begin with values that are known to work
    study.optimize(objective, n_trials=trials, n_jobs=at_a_time)
    return study


def start_spark(slots: int) -> SparkSession:
    """The session of spark-submit, or a local one."""
    builder = SparkSession.builder.appName("tune").config("spark.ui.showConsoleProgress", "false")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit sets it, and the master
        builder = builder.master(f"local[{slots}]").config("spark.log.level", "ERROR")
    return builder.getOrCreate()


def main() -> int:
    """Parse the command line, tune, and print the trials."""
    parser = argparse.ArgumentParser(description="Tune a network for handwritten digits.")
    parser.add_argument("--np", type=int, default=1, help="ranks of each trial")
    parser.add_argument("--slots", type=int, default=2, help="task slots for all trials together")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--shared-dir", help="a folder that driver and executors share")
    args = parser.parse_args()

    import pandas as pd
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    digits = pd.DataFrame({"image": (pixels / 16).tolist(), "label": labels})
    digits = digits.sample(frac=1, random_state=0)
    schema = "image array<double>, label long"
    with start_spark(args.slots) as spark:
        train_set = spark.createDataFrame(digits[:1440], schema)
        test_set = spark.createDataFrame(digits[1440:], schema)
        shared = args.shared_dir
        with (
            packed(train_set, shared_dir=shared) as rows,
            packed(test_set, shared_dir=shared) as test_rows,
        ):
            study = tune(
                {"digits": rows, "held_out": test_rows},
                np=args.np,
                at_a_time=max(1, args.slots // args.np),
                trials=args.trials,
                epochs=args.epochs,
            )
    for trial in study.trials:
        values = f"rate {trial.params['rate']:.5f}, width {trial.params['width']:3}"
        *_, epoch = trial.intermediate_values or [0]
        loss = trial.intermediate_values.get(epoch, float("nan"))
        end = trial.state.name.lower()
        print(f"trial {trial.number}: {values}: {end} after epoch {epoch:2}, loss {loss:.3f}")
    print(f"best: {study.best_params}, loss {study.best_value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
