"""Scripts for Horovod Elastic run unchanged, and lose a rank on the way."""

from __future__ import annotations

import ast
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import ClusterConfig, HorovodRunner
from horovod_runner.driver.elastic.pool import Pool
from tests import programs
from tests.preload import COMMAND, WARM

pytestmark = pytest.mark.horovod

# What happens to the ranks. It is not part of the script, which knows Horovod alone.
EVENTS = """
import os, signal

def event(rank, epoch, batch):
    from horovod_runner import current_attempt
    from horovod_runner.wire import job_file
    from horovod_runner.worker import context

    now = (current_attempt(), epoch, batch)
    if "HOSTILE" not in os.environ:
        return
    if now == (1, 1, 1) and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if now == (2, 2, 1):  # as if the driver had found another slot
        open(job_file.leave_file(context.current().commits, now[0]), "w").close()
"""
TORCH = """
import horovod.torch as hvd
import torch
from events import event
from horovod_runner import load_checkpoint

EPOCHS, ROWS, BATCH = 3, 48, 4


class Best:
    def __init__(self):
        self.epochs = {-1}


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(torch.arange(ROWS), x, x.sum(1, keepdim=True))
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.weight, 1.0 + hvd.rank())
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert load_checkpoint() is None  # it knows no commits of states
    resets = []

    @hvd.elastic.run
    def train(state):
        begins = (state.epoch, state.batch)
        while state.epoch < EPOCHS:
            for rows, inputs, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), labels).backward()
                optimizer.step()
                state.seen = state.seen + [(state.epoch, *hvd.allgather(rows).tolist())]
                sampler.record_batch(state.batch, BATCH)
                event(hvd.rank(), state.epoch, state.batch)
                state.batch += 1
                if state.batch % 3 == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            state.best.epochs.add(state.epoch)
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)
            state.commit()
        return begins

    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, epoch=0, batch=0, seen=[], best=Best()
    )
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    begins = train(state)
    weights = [*model.weight.tolist()[0], *model.bias.tolist()]
    every = hvd.allgather_object((weights, begins, resets, state.seen, state.best.epochs))
    return every


if __name__ == "__main__":
    every = main()
    if hvd.rank() == 0:
        print("RESULT", every, flush=True)
"""
KERAS = """
import random

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
from events import event

EPOCHS, STEPS = 3, 4


class Events(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = state.epoch

    def on_train_batch_end(self, batch, logs=None):
        event(hvd.rank(), self.epoch, batch)


hvd.init()
random.seed(hvd.rank())  # from which Keras draws its seeds
x = np.random.default_rng(5).normal(size=(STEPS * 8, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


@hvd.elastic.run
def train(state):
    begins = state.epoch
    model.fit(
        x, x.sum(1), batch_size=8, shuffle=False, epochs=EPOCHS - state.epoch, verbose=0,
        callbacks=[
            Events(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ],
    )
    return begins


begins = train(state)
weights = [float(value) for each in model.get_weights() for value in each.ravel()]
every = hvd.allgather_object(
    (weights, begins, resets, int(model.optimizer.iterations), state.epoch, state.batch)
)
if hvd.rank() == 0:
    print("RESULT", every, flush=True)
"""
TENSORFLOW = """
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from events import event

hvd.init()
x = np.random.default_rng(5).normal(size=(8, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)
free = tf.Variable([0.0])


@hvd.elastic.run
def train(state):
    begins = state.epoch
    while state.epoch < 3:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x)[:, 0] - x.sum(1)) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        state.epoch += 1
        state.commit()
    return begins


@hvd.elastic.run
def count(state):
    begins = state.epoch
    while state.epoch < 3:
        for batch in range(2):
            free.assign_add(hvd.allreduce(tf.constant([1.0])))
            event(hvd.rank(), state.epoch, batch)
        state.epoch += 1
        state.commit()
    return begins


first = train(hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0))
second = count(hvd.elastic.TensorFlowState([free], epoch=0))
weights = [float(v) for each in model.get_weights() for v in each.ravel()]
every = hvd.allgather_object(
    (weights, int(optimizer.iterations), float(free.numpy()[0]), first, second)
)
if hvd.rank() == 0:
    print("RESULT", every, flush=True)
"""

TWO_RANKS = ("--np=-2:-2", "--max-restarts", "2")


def run(script: str, folder: Path, *arguments: str, **env: str) -> tuple[Any, str]:
    """Run a script with ``horovod-runner run``; what it printed as its result, and all output."""
    (folder / "events.py").write_text(EVENTS)
    (folder / "train.py").write_text(script)
    words = (*WARM, COMMAND, "run", *arguments, "train.py")
    done = programs.run(*words, cwd=folder, variables=env)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    line = next(line for line in done.stdout.splitlines() if "RESULT" in line)
    return ast.literal_eval(line.partition("RESULT")[2].strip()), output


def test_a_torch_script_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    """A rank is killed, then the ranks are to change: the result is that of a quiet run."""
    every, output = run(TORCH, tmp_path, "--np=-2:-3", "--max-restarts", "2", HOSTILE="1")
    quiet, quiet_output = run(TORCH, tmp_path, "--np", "-3")
    weights, begins, _, seen, best = every[0]
    assert all(each[0] == weights for each in every)
    assert weights == quiet[0][0]
    # Each row once in each epoch.
    rows = sorted((epoch, row) for epoch, *batch in seen for row in batch)
    assert rows == [(epoch, row) for epoch in range(3) for row in range(48)]
    assert seen == quiet[0][3]
    assert best == {-1, 0, 1, 2}
    # The third attempt: what check_host_updates kept had no commit of the script's own.
    assert begins == (2, 2), output
    assert all(each[2] == [3] for each in every)
    assert "attempt 3 begins" in output
    assert "hvd.elastic.run" not in output
    assert quiet[0][1:3] == ((0, 0), [])
    assert "np=(2, 8)" in quiet_output
    assert quiet_output.count("hvd.elastic.run calls its function once") == 1


def shrink_and_grow(rows: int, batch: int) -> dict[str, Any]:
    """Go through all rows three times: with three ranks, with two, and with three again."""
    import signal

    import horovod.torch as hvd
    import torch

    from horovod_runner import current_attempt
    from horovod_runner.wire import job_file
    from horovod_runner.worker import context

    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(rows))
    loader = torch.utils.data.DataLoader(range(rows), batch, sampler=sampler)
    resets: list[int] = []

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.epoch < 3:
            for own in loader:
                if (current_attempt(), len(state.sizes), hvd.rank()) == (1, 5, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                done = hvd.allgather(own).tolist()
                state.seen = [*state.seen, *((state.epoch, row) for row in done)]
                state.sizes = [*state.sizes, hvd.size()]
                sampler.record_batch(0, len(own))
                rank = context.current()
                assert rank is not None
                if current_attempt() == 2 and len(state.sizes) == 9:
                    open(job_file.leave_file(rank.commits, 2), "w").close()
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(sampler=sampler, epoch=0, seen=[], sizes=[])
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    return {"seen": state.seen, "sizes": state.sizes, "resets": resets}


def test_no_row_is_lost_when_the_number_of_ranks_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([3, 2, 3])
    ready = Pool.slots

    def slots(launcher: Pool, *args: Any) -> int:
        ready(launcher, *args)
        return next(sizes)

    monkeypatch.setattr(Pool, "slots", slots)
    warm = ClusterConfig(preload_frameworks=["horovod.torch"])
    runner = HorovodRunner(np=(-2, -3), max_restarts=1, progress=False, cluster_config=warm)
    rows = 36
    result = runner.run(shrink_and_grow, rows=rows, batch=2)
    attempts = runner.last_run.attempts
    assert [attempt.size for attempt in attempts] == [3, 2, 3]
    assert [bool(attempt.error) for attempt in attempts] == [True, False, False]
    assert sorted(Counter(result["sizes"]).items()) == [(2, 4), (3, 5 + 11)]
    assert result["resets"] == [3]
    seen = Counter(result["seen"])
    assert set(seen) == {(epoch, row) for epoch in range(3) for row in range(rows)}
    assert seen.total() < 3 * rows + 3  # the sampler repeats rows to fill the last batch


def test_all_states_of_a_tensorflow_script_come_back(tmp_path: Path) -> None:
    """The second of two states loses a rank: the first one is complete, and stays so."""
    every, output = run(TENSORFLOW, tmp_path, *TWO_RANKS, HOSTILE="1")
    weights = every[0][0]
    assert all(each == [weights, 3, 6.0, 3, 3] for each in map(list, every)), output
    assert "attempt 3 begins" in output


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_keras_script_goes_on_from_its_last_commit(tmp_path: Path, backend: str) -> None:
    script = KERAS if backend == "tensorflow" else KERAS.replace("tensorflow.keras", "keras")
    every, output = run(script, tmp_path, *TWO_RANKS, HOSTILE="1", KERAS_BACKEND=backend)
    weights = every[0][0]
    # The third attempt began after the last epoch. Each of the 12 steps was done once.
    assert all(each == [weights, 3, [2], 12, 3, 0] for each in map(list, every)), output
    assert "attempt 3 begins" in output
