"""The training that faults.py interrupts, and its driver process.

    python benchmarks/faults_training.py FOLDER CHECKPOINT_DIR BALLAST_BYTES MASTER

It writes into FOLDER: ``begun``, a line for each rank that begins; ``steps``, each rank's latest
step; ``result``, its result or error. MASTER is Spark's master, empty for ranks on this machine. A
rank's weights depend only on the number of steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod_runner

SIZE = 2
STEPS = 300
STEP_SECONDS = 0.01  # plus the duration of the step itself
EVERY = 20  # steps, then a checkpoint
KEEP = 3
# Two executors with one slot each.
_CONF = {
    "spark.executor.cores": "2",
    "spark.task.cpus": "2",
    "spark.executor.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def train(folder: str, ballast_bytes: int) -> str:
    """Train; the ranks' ``main``. Returns a digest of the weights."""
    import hashlib

    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 1e-3), named_parameters=model.named_parameters()
    )
    # Changes with each step, so that a checkpoint that mixes two steps is detected.
    ballast = torch.zeros(ballast_bytes // 4)
    loaded, start = horovod_runner.load_checkpoint(), 0
    if loaded is not None:
        start = loaded.step
        model.load_state_dict(loaded.state["model"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        if not bool((loaded.state["ballast"] == start).all()):
            raise AssertionError(f"the checkpoint of step {start} is not of that step")
    with open(f"{folder}/begun", "a") as file:  # one line, so it is written at once
        file.write(f"{json.dumps([hvd.rank(), os.getpid(), start])}\n")
    steps = os.open(f"{folder}/steps", os.O_WRONLY | os.O_CREAT)
    for step in range(start + 1, STEPS + 1):
        generator = torch.Generator().manual_seed(step * hvd.size() + hvd.rank())
        x = torch.randn(32, 16, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        ballast.fill_(step)
        time.sleep(STEP_SECONDS)
        os.pwrite(steps, step.to_bytes(8, "little"), 8 * hvd.rank())
        horovod_runner.report(loss=loss, step=step)
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            horovod_runner.save_checkpoint({**state, "ballast": ballast}, step)
    os.close(steps)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def drive(folder: str, checkpoints: str, ballast_bytes: int, master: str) -> None:
    """Run the training to its end."""
    options: dict[str, Any] = {"np": -SIZE}
    spark = None
    if master:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master)
        for name, value in _CONF.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        cluster = horovod_runner.ClusterConfig(spark=spark, slot_timeout=120)
        options = {"np": SIZE, "cluster_config": cluster}
    runner = horovod_runner.HorovodRunner(
        **options,
        checkpoint_dir=checkpoints,
        checkpoint_config=horovod_runner.CheckpointConfig(num_to_keep=KEEP),
        resume=True,
        max_restarts=2,
    )
    weights = runner.run(train, folder=folder, ballast_bytes=ballast_bytes)
    assert runner.last_run is not None
    told = [attempt.resumed_from for attempt in runner.last_run.attempts]
    Path(folder, "result").write_text(json.dumps({"weights": weights, "resumed_from": told}))
    if spark is not None:
        spark.stop()


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
