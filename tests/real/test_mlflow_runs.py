"""What ranks log to MLflow themselves: it goes to the driver's run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.common.options import Options
from horovod_runner.results.run import Run
from horovod_runner.sinks import Sink
from horovod_runner.sinks.mlflow import MLflowSink, run_for_ranks
from horovod_runner.wire.job import Job
from horovod_runner.wire.job_file import MLflowRun
from horovod_runner.worker.mlflow_run import enter

pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("mlflow")]


def all_runs(mlflow: Any) -> list[str]:
    client = mlflow.MlflowClient()
    ids = [each.experiment_id for each in client.search_experiments()]
    return [run.info.run_id for run in client.search_runs(ids)]


def steps(mlflow: Any, run_id: str | None, name: str) -> list[int]:
    return [point.step for point in mlflow.MlflowClient().get_metric_history(run_id, name)]


def log(rank_of: str) -> list[Any]:
    """Log to MLflow on every rank; twice on rank 0."""
    import mlflow

    rank = int(os.environ[rank_of])
    mlflow.log_metric("score", rank, step=rank)
    mlflow.log_params({"depth": 3, "rate": 0.5})
    mlflow.log_text("text", f"notes{rank}.txt")
    mlflow.set_tags({f"tag{rank}": "set"})
    mlflow.log_metrics({"scores": 1.0}, step=rank, synchronous=False).wait()
    run = mlflow.active_run().info.run_id
    mlflow.end_run()
    with mlflow.start_run(None, None, "second", tags={f"again{rank}": "set"}):
        mlflow.log_metric("score", rank, step=10 + rank)
    return [run, mlflow.active_run()]


@pytest.mark.parametrize("mlflow", ["folder", "database"], indirect=True)
def test_what_main_logs_goes_to_the_active_run_from_rank_0_alone(mlflow: Any) -> None:
    with mlflow.start_run(run_name="mine") as active:
        mlflow.log_param("rate", 0.1)
        ran, _ = HorovodRunner(np=-2).run(log, rank_of="HOROVOD_RANK")
        logged = mlflow.get_run(active.info.run_id)
        assert ran == active.info.run_id
        assert logged.info.status == "RUNNING"  # it is the driver's, who ends it
    assert all_runs(mlflow) == [active.info.run_id]
    assert logged.info.run_name == "mine"
    assert logged.data.params == {"rate": "0.1", "depth": "3"}
    assert steps(mlflow, active.info.run_id, "score") == [0, 10]
    assert steps(mlflow, active.info.run_id, "scores") == [0]
    assert {"tag0", "again0"} < set(logged.data.tags)
    assert not {"tag1", "again1"} & set(logged.data.tags)
    files = mlflow.MlflowClient().list_artifacts(active.info.run_id)
    assert [each.path for each in files] == ["notes0.txt"]


def test_what_main_logs_goes_to_the_run_of_a_sink(mlflow: Any) -> None:
    sink = MLflowSink(experiment="digits")
    handle = HorovodRunner(np=-2, sinks=[sink]).start(log, rank_of="HOROVOD_RANK")
    assert handle.result()[0] == sink.run_id
    assert all_runs(mlflow) == [sink.run_id]
    assert steps(mlflow, sink.run_id, "score") == [0, 10]
    assert mlflow.get_run(sink.run_id).info.status == "FINISHED"


def test_ctrl_c_before_the_run_of_a_sink_is_known_ends_it(mlflow: Any) -> None:
    class Interrupted(MLflowSink):
        def run_for_ranks(self, patience: float) -> MLflowRun | None:
            raise KeyboardInterrupt

    runner = HorovodRunner(np=-1, sinks=[Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        runner.run(int)
    assert runner.last_run.status == "cancelled"
    (run_id,) = all_runs(mlflow)
    assert mlflow.get_run(run_id).info.status == "KILLED"


def test_a_run_begun_in_the_background_joins_the_active_run(mlflow: Any) -> None:
    with mlflow.start_run() as active:
        assert HorovodRunner(np=-1).start(log, rank_of="HOROVOD_RANK").result()[0] == (
            active.info.run_id
        )


def ask(third: str) -> None:
    import mlflow

    rank = os.environ["HOROVOD_RANK"]
    with mlflow.start_run(nested=True, run_name=f"child {rank}"):
        mlflow.log_metric("score", 1.0)
    with mlflow.start_run(experiment_id=third, run_name=f"third {rank}"):
        mlflow.log_metric("score", 3.0)
    with mlflow.start_run(), mlflow.start_run(None, third, f"inner {rank}", nested=True):
        mlflow.log_metric("score", 4.0)  # on rank 1 in the run that logs nothing
    if rank == "0":
        mlflow.set_experiment("another")
        mlflow.log_metric("score", 2.0)


def test_ranks_that_ask_for_runs_have_them(mlflow: Any) -> None:
    third = mlflow.MlflowClient().create_experiment("third")
    with mlflow.start_run() as active:
        HorovodRunner(np=-2).run(ask, third=third)
    client = mlflow.MlflowClient()
    runs = [client.get_run(run_id) for run_id in all_runs(mlflow)]
    in_third = [each for each in runs if each.info.experiment_id == third]
    assert {each.info.run_name for each in in_third} == {"third 0", "third 1", "inner 0"}
    runs = [each for each in runs if each not in in_third]
    parents = {each.info.run_name: each.data.tags.get("mlflow.parentRunId") for each in runs}
    assert parents["child 0"] == parents["child 1"] == active.info.run_id
    (other,) = (each for each in runs if each.info.experiment_id != active.info.experiment_id)
    assert other.data.metrics == {"score": 2.0}


def where(name: str) -> dict[str, str]:
    import mlflow

    mlflow.log_metric("score", 1.0)
    return {name: os.environ.get(name, "")}


def test_variables_that_the_user_sets_for_ranks_decide(mlflow: Any, tmp_path: Path) -> None:
    other = (tmp_path / "other").as_uri()
    with mlflow.start_run() as active:
        runner = HorovodRunner(np=-1, env={"MLFLOW_TRACKING_URI": other})
        assert runner.run(where, name="MLFLOW_RUN_ID") == {"MLFLOW_RUN_ID": ""}
    assert steps(mlflow, active.info.run_id, "score") == []
    assert (tmp_path / "other" / "0").is_dir()


def train_with_trainer(folder: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.layer(x)[:, 0], labels)}

    rows = [{"x": torch.ones(2) * n, "labels": torch.tensor(float(n))} for n in range(16)]
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        learning_rate=0.001,
        report_to=["mlflow"],
        disable_tqdm=True,
    )
    Trainer(Net(), arguments, train_dataset=rows).train()


# Slow: the ranks import transformers.
def test_the_trainers_own_logging_goes_to_the_drivers_run(mlflow: Any, tmp_path: Path) -> None:
    sink = MLflowSink()
    with mlflow.start_run(run_name="mine") as active:
        mlflow.log_param("learning_rate", "schedule")  # a name of TrainingArguments, too
        HorovodRunner(np=-2, sinks=[sink]).run(train_with_trainer, folder=str(tmp_path / "out"))
        logged = mlflow.get_run(active.info.run_id)
        assert logged.info.status == "RUNNING"
    assert all_runs(mlflow) == [active.info.run_id] == [sink.run_id]
    assert logged.info.run_name == "mine"
    assert logged.data.params["learning_rate"] == "schedule"
    assert logged.data.params["num_train_epochs"] == "1"
    assert steps(mlflow, active.info.run_id, "grad_norm") == [1, 2]


def train_with_lightning(folder: str, experiment: str | None) -> str:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import MLFlowLogger

    class Net(LightningModule):
        def __init__(self, rate: float = 0.01) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.hparams["rate"])

    logger = MLFlowLogger(**({} if experiment is None else {"experiment_name": experiment}))
    Trainer(
        max_epochs=1,
        strategy="ddp",
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    ).fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
    return str(logger.run_id)


# Slow: the ranks import Lightning.
@pytest.mark.parametrize("experiment", [None, "drivers", "another"])
def test_lightnings_logger_logs_to_the_drivers_run_unless_it_names_another_experiment(
    mlflow: Any, tmp_path: Path, experiment: str | None
) -> None:
    drivers = mlflow.MlflowClient().create_experiment("drivers")
    with mlflow.start_run(experiment_id=drivers) as active:
        ran = HorovodRunner(np=-2).run(
            train_with_lightning, folder=str(tmp_path), experiment=experiment
        )
        assert mlflow.get_run(active.info.run_id).info.status == "RUNNING"
    assert (ran == active.info.run_id) is (experiment != "another")
    assert sorted(all_runs(mlflow)) == sorted({ran, active.info.run_id})
    assert steps(mlflow, ran, "loss") == [0, 1]
    assert mlflow.get_run(ran).data.params["rate"] == "0.01"


@pytest.mark.parametrize("uri", ["file://{folder}", "file:{folder}", "{folder}"])
def test_rank_0_joins_a_run_in_a_folder_of_any_name(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "")  # restored at the end, like MLFLOW_TRACKING_URI
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    uri = uri.format(folder=quote(str(tmp_path / "my läufe")))
    made = mlflow.MlflowClient(uri).create_run("0").info.run_id
    enter(run_for_ranks(uri, made, "0"))
    with mlflow.start_run() as joined:
        assert joined.info.run_id == made


class HiddenStore(Sink):
    """Hides MLflow's folder during a run, as on another host."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._hidden = folder, folder.with_name("hidden")

    def prepare(self) -> None:
        self._folder.rename(self._hidden)

    def end(self, run: Run) -> None:
        shutil.rmtree(self._folder)  # the rank has made one
        self._hidden.rename(self._folder)


def test_a_store_that_the_ranks_host_does_not_see_is_named(
    mlflow: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mlflow.start_run() as active:
        sink = HiddenStore(tmp_path / "mlruns")
        HorovodRunner(np=-1, sinks=[sink]).run(where, name="HOROVOD_RANK")
    assert "is not on this rank's host, so MLflow has another run for it" in capfd.readouterr().err
    assert steps(mlflow, active.info.run_id, "score") == []


def test_rank_0_alone_gets_credentials_and_the_job_does_not_show_them(
    mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", "https://workspace")
    monkeypatch.setenv("DATABRICKS_TOKEN", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "password")
    run = run_for_ranks("databricks", "1", "2")
    assert run.variables["MLFLOW_TRACKING_URI"] == run.tracking_uri == "databricks"
    assert run.variables["DATABRICKS_TOKEN"] == "secret"
    assert run.variables["MLFLOW_TRACKING_PASSWORD"] == "password"
    assert run.for_rank(0) is run
    assert run.for_rank(1) == ("1", "2", "", {})
    assert "secret" not in repr(Job("id", 2, Options(np=-2), b"", mlflow_run=run))
