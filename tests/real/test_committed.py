"""Commits in real ranks, which agree which one to load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import (
    ClusterConfig,
    HorovodRunner,
    RanksChangedError,
    commit,
    load_checkpoint,
    save_checkpoint,
)

# This process imports the frameworks.
pytestmark = pytest.mark.xdist_group("frameworks")


def agree(folders: list[str], library: str) -> Any:
    """Commit on the last rank's host, and load on all; the ranks' ``main``."""
    import numpy as np

    from horovod_runner.worker import context

    if library == "horovod.tensorflow":
        import horovod.tensorflow as hvd
    else:
        import horovod.torch as hvd
    if library == "torch":
        import torch

        torch.distributed.init_process_group("gloo")
    else:
        hvd.init()
    rank = context.current()
    assert rank is not None
    rank.commits = folders[rank.rank]
    rank.local_rank = 0
    assert load_checkpoint() is None
    save_checkpoint({"x": np.zeros(3)}, 1)
    if rank.rank == 2:
        commit({"x": np.arange(1000)}, 5, {"loss": 0.5})
    first = load_checkpoint()
    rank.host_commits = None
    second = load_checkpoint()  # now each host has it
    assert first is not None
    assert second is not None
    return [(each.step, dict(each.metrics), int(each.state["x"].sum())) for each in (first, second)]


@pytest.mark.horovod
@pytest.mark.parametrize("library", ["horovod.torch", "horovod.tensorflow", "torch"])
def test_ranks_on_three_hosts_load_the_commit_of_one(tmp_path: Path, library: str) -> None:
    folders = [str(tmp_path / name) for name in "abc"]
    for folder in folders:
        os.mkdir(folder)
    warm = ClusterConfig(preload_frameworks=[library])
    runner = HorovodRunner(np=-3, progress=False, cluster_config=warm)
    values = runner.run_all(agree, folders=folders, library=library)
    assert values == [[(5, {"loss": 0.5}, 499500)] * 2] * 3


def leave_in_fit(folder: str, library: str) -> str:
    """Train while the driver wants the ranks to leave; the name of what ends the training."""
    import numpy as np

    from horovod_runner.wire.job_file import leave_file
    from horovod_runner.worker import context

    rank = context.current()
    assert rank is not None
    rank.commits = folder
    Path(leave_file(folder, rank.attempt)).touch()
    try:
        if library == "keras":
            import keras

            from horovod_runner.keras.callbacks import ReportCallback

            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(
                np.ones((8, 3)), np.ones(8), epochs=3, verbose=0, callbacks=[ReportCallback()]
            )
        else:
            fit_lightning()
    except RanksChangedError as error:
        return str(error)
    return "nothing"


def fit_lightning() -> None:
    import lightning
    import torch

    from horovod_runner.lightning import HorovodStrategy, ReportCallback

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    trainer = lightning.Trainer(
        strategy=HorovodStrategy(),
        accelerator="cpu",
        callbacks=[ReportCallback()],
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 3), 4))


@pytest.mark.horovod
@pytest.mark.parametrize("library", ["keras", "lightning"])
def test_a_fit_ends_at_the_checkpoint_at_which_the_ranks_change(
    tmp_path: Path, library: str
) -> None:
    pytest.importorskip(library)
    cold = ClusterConfig(preload_frameworks=False)  # no later run would have these settings
    runner = HorovodRunner(np=-1, progress=False, cluster_config=cold)
    ended_by = runner.run(leave_in_fit, folder=str(tmp_path), library=library)
    assert "the checkpoint of step" in ended_by
    assert runner.last_run is not None
    assert [each.metrics["epoch"] for each in runner.last_run.checkpoints] in ([1], [0])


def count_on(last: int) -> tuple[int, list[float]]:
    """Count, commit every number, and kill two ranks on the way; the first number, the weights."""
    import signal

    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    first = 0 if loaded is None else loaded.step
    weights = torch.zeros(3) if loaded is None else loaded.state["weights"]
    for step in range(first + 1, last + 1):
        weights += hvd.allreduce(torch.ones(3), name=f"step {step}")
        if step == 6 and first == 4 and hvd.rank() == 1:  # rank 0 has committed step 5
            os.kill(os.getpid(), signal.SIGKILL)
        commit({"weights": weights}, step)
        if step == 4 and first == 0 and hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return first, weights.tolist()


@pytest.mark.horovod
def test_a_run_goes_on_from_its_commit_after_the_rank_that_wrote_it_was_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warm = ClusterConfig(preload_frameworks=["horovod.torch"])
    runner = HorovodRunner(np=(-2, -2), progress=False, max_restarts=2, cluster_config=warm)
    first, weights = runner.run(count_on, last=8)
    assert first in (5, 6)
    assert weights == [8.0, 8.0, 8.0]
    assert runner.last_run is not None
    assert len(runner.last_run.attempts) == 3
    shown = capsys.readouterr().err
    assert "load_checkpoint returns the commit of step 4" in shown
    # A commit is progress: the second loss lets nobody wait longer than the first one.
    assert "attempt 3 begins in 0 s" in shown
