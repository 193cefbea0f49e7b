"""The elastic training that faults_elastic.py disturbs, and its driver process.

    python benchmarks/faults_elastic_training.py FOLDER PARQUET MASTER DRIVER_ADDRESS RESUME

It writes into FOLDER: ``begun``, a line for each rank that begins; ``rows``, a line for each step
of a rank, with the numbers of its rows; ``checkpoints``; ``result``, the weights and the attempts.
MASTER is Spark's master; if it is empty, the ranks run on this machine. RESUME is 0 or 1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod_runner
from horovod_runner.data import Shard, parquet

ROWS = 1000
BATCH = 24  # rows of all ranks together
STEPS = 400
STEP_SECONDS = 0.02  # plus the duration of the step itself
COMMIT_EVERY = 10  # steps
SAVE_EVERY = 50
LOCAL, ON_SPARK = (-2, -3), (2, 4)
_BALLAST = 4 << 20  # numbers, so that a commit takes long enough to be hit
_CONF = {
    "spark.executor.cores": "2",
    "spark.executor.memory": "1g",
    "spark.decommission.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def train(data: Shard, folder: str, resumed: bool = False) -> list[float]:
    """Train; the ranks' ``main``. Returns the weights.

    Args:
        data: the rows.
        folder: for the notes.
        resumed: whether the driver was started again; its attempts are then noted as 101, 102, ...
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.double()  # the order in which the ranks' gradients are added changes the last digits
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    feed = data.to_torch(
        global_batch=BATCH, columns={"x": list("abcd"), "row": "row"}, shuffle=True, seed=3
    )
    # Changes with each step, so that a state that mixes two steps is detected.
    ballast = torch.zeros(_BALLAST)
    loaded, step = horovod_runner.load_checkpoint(), 0
    if loaded is not None:
        step = loaded.step
        model.load_state_dict(loaded.state["model"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        feed.load_state_dict(loaded.state["feed"])
        ballast = loaded.state["ballast"]
        if not bool((ballast == step).all()):
            raise AssertionError(f"the state of step {step} is not of that step")
    attempt = horovod_runner.current_attempt() + 100 * resumed
    begun = [attempt, hvd.rank(), hvd.size(), os.getpid(), step, os.uname().nodename, os.getcwd()]
    rows = os.open(f"{folder}/rows", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(f"{folder}/begun", "a") as file:  # one line, so it is written at once
        file.write(f"{json.dumps(begun)}\n")
    while step < STEPS:
        for inputs, numbers in feed:
            step += 1
            # Before the gradients are reduced: then all ranks have noted each finished step.
            real = numbers[: feed.real].tolist()
            note = json.dumps([attempt, hvd.rank(), step, (step - 1) // len(feed), real])
            os.write(rows, f"{note}\n".encode())
            optimizer.zero_grad()
            x = inputs.double()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            ballast.fill_(step)
            time.sleep(STEP_SECONDS)
            horovod_runner.report(loss=loss, step=step)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "feed": feed.state_dict(),
                "ballast": ballast,
            }
            if step % SAVE_EVERY == 0:
                horovod_runner.save_checkpoint(state, step)
            if step % COMMIT_EVERY == 0:
                horovod_runner.commit(state, step)
            if step == STEPS:
                break
    os.close(rows)
    return [float(value) for each in model.parameters() for value in each.detach().flatten()]


def drive(folder: Path, rows: str, master: str, address: str, resume: bool) -> None:
    """Run the training to its end."""
    options: dict[str, Any] = {"np": LOCAL}
    spark = None
    if master:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master).config("spark.driver.host", address)
        for name, value in _CONF.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        cluster = horovod_runner.ClusterConfig(spark=spark, slot_timeout=60)
        # The namespaces share the machine's memory: without this a cut would not stop the ranks.
        env = {"UCX_TLS": "self,tcp"}
        options = {"np": ON_SPARK, "cluster_config": cluster, "gpus_per_rank": 0, "env": env}
    runner = horovod_runner.HorovodRunner(
        **options,
        checkpoint_dir=str(folder / "checkpoints"),
        resume=resume,
        max_restarts=6,
        grow_after=1.0,
    )
    weights = runner.run(train, data=parquet(rows), folder=str(folder), resumed=resume)
    assert runner.last_run is not None
    attempts = [
        [attempt.size, attempt.error or "", attempt.change or "", attempt.pause]
        for attempt in runner.last_run.attempts
    ]
    (folder / "result").write_text(json.dumps({"weights": weights, "attempts": attempts}))
    if spark is not None:
        spark.stop()


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5] == "1")
