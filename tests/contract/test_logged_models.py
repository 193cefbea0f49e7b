"""Models in MLflow: logged by a run and by an estimator's model, loaded, and scored with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from horovod_runner import CheckpointError, DataError, HorovodRunner, predict, save_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("spark")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a tracking server with a database, and a registry of models."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/store.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # more processes that import MLflow
    }
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 400  # its imports alone take minutes on a busy machine
            while True:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                    break
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.2)  # a port offers no event
            yield url
        finally:
            process.terminate()


@pytest.fixture
def mlflow(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow with its tracking server."""
    import mlflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_REQUIREMENTS_INFERENCE_RAISE_ERRORS", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    return mlflow


@pytest.fixture
def df(spark: SparkSession) -> DataFrame:
    columns = ["id", "id / 10 as a", "array(cast(id as double), 1d) as b"]
    return spark.range(0, 40, 1, 1).selectExpr(*columns)


def network(outputs: int = 1) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Bilinear(1, 2, outputs)


def train(data: Any) -> None:
    save_checkpoint({"net": network().state_dict()}, step=1)


def expected(rows: int = 40, outputs: int = 1) -> Any:
    import torch

    a = torch.tensor([[n / 10] for n in range(rows)])
    b = torch.tensor([[float(n), 1.0] for n in range(rows)])
    return network(outputs)(a, b).detach().squeeze(1).numpy()  # one number of a row is no list


COLUMNS = {"first": ["a"], "second": "b"}


# Slow: a server of MLflow is started, which imports for seconds.
def test_a_run_logs_its_model_with_signature_and_example(
    mlflow: Any, spark: SparkSession, df: DataFrame
) -> None:
    runner = HorovodRunner(np=-1, progress=False, gpus_per_rank=0)
    runner.run(train, data=df)
    assert runner.last_run is not None
    info = runner.last_run.log_model(
        "net", network, columns=COLUMNS, output="p", registered_model_name="main.digits.net"
    )
    assert [each.name for each in info.signature.inputs] == ["a", "b"]
    assert [each.name for each in info.signature.outputs] == ["p"]
    assert info.saved_input_example_info is not None
    loaded = mlflow.pyfunc.load_model(info.model_uri)
    frame = df.select("a", "b").toPandas()
    np.testing.assert_allclose(loaded.predict(frame)["p"], expected(), rtol=1e-5)
    pinned = {line.partition("==")[0] for line in requirements_of(mlflow, info)}
    assert {"torch", "horovod_runner", "cloudpickle"} <= pinned
    udf = mlflow.pyfunc.spark_udf(spark, info.model_uri, env_manager="local")
    scored = df.withColumn("p", udf("a", "b"))
    got = [row.p for row in scored.orderBy("id").collect()]
    np.testing.assert_allclose([getattr(p, "p", p) for p in got], expected(), rtol=1e-5)
    again = predict(df, "models:/main.digits.net/1", ["a", "b"], output="p")
    np.testing.assert_allclose(
        [row.p for row in again.orderBy("id").collect()], expected(), rtol=1e-5
    )


def requirements_of(mlflow: Any, info: Any) -> list[str]:
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=info.model_uri))
    return (folder / "requirements.txt").read_text().splitlines()


def test_mistakes_of_log_model_are_told(df: DataFrame) -> None:
    runner = HorovodRunner(np=-1, progress=False, gpus_per_rank=0)
    runner.run(print)
    assert runner.last_run is not None
    with pytest.raises(CheckpointError, match=r"checkpoint .*save_checkpoint"):
        runner.last_run.log_model("net", network, columns=COLUMNS)

    def main() -> None:
        save_checkpoint({"net": network().state_dict()}, step=1)

    runner.run(main)
    with pytest.raises(DataError, match=r"had no dataset, .*signature .*none\."):
        runner.last_run.log_model("net", network, columns=COLUMNS)


def test_models_that_mlflow_logged_are_scored(mlflow: Any, df: DataFrame) -> None:
    """A module of torch as such; another flavour through pyfunc."""
    import torch

    # Without these MLflow imports what it logs in another process, to see what that takes.
    known = {"pip_requirements": ["torch"]}
    net = torch.nn.Linear(1, 1)
    info = mlflow.pytorch.log_model(net, name="net", serialization_format="pickle", **known)
    scored = predict(df, info, {"x": ["a"]}, output="p")
    wanted = net(torch.tensor([[n / 10] for n in range(40)])).detach().numpy()[:, 0]
    got = [row.p for row in scored.orderBy("id").collect()]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)

    class Double(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return model_input["a"] * 2

    double = mlflow.pyfunc.log_model(name="double", python_model=Double(), **known)
    scored = predict(df, double.model_uri, ["a"], output="p")
    got = [row.p for row in scored.orderBy("id").collect()]
    np.testing.assert_allclose(got, [n / 5 for n in range(40)])


def test_a_model_of_an_estimator_is_logged_with_one_number_of_a_row_or_several(
    mlflow: Any, df: DataFrame
) -> None:
    from horovod_runner.ml import TorchModel

    for outputs in (1, 3):
        model = TorchModel()
        model.setModel(network(outputs)).setFeatureCols([["a"], "b"])
        info = model.log_model("net", df)
        loaded = mlflow.pyfunc.load_model(info.model_uri)
        got = loaded.predict(df.select("a", "b").toPandas())["prediction"]
        np.testing.assert_allclose(np.stack(got), expected(outputs=outputs), rtol=1e-5)


def test_autologging_takes_an_estimator_as_others_of_spark_ml(
    mlflow: Any, spark: SparkSession, df: DataFrame
) -> None:
    import torch
    from pyspark.ml import Pipeline

    from horovod_runner.ml import TorchEstimator

    estimator = TorchEstimator(
        np=1,
        model=network(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=[["a"], "b"],
        label_cols=["a"],
        epochs=1,
        use_gpu=False,
        verbose=0,
    )
    mlflow.pyspark.ml.autolog(log_models=False)
    try:
        with mlflow.start_run() as run:
            Pipeline(stages=[estimator]).fit(df)
    finally:
        mlflow.pyspark.ml.autolog(disable=True)
    logged = mlflow.get_run(run.info.run_id).data
    assert logged.params[f"{type(estimator).__name__}.epochs"] == "1"
    assert logged.tags["estimator_name"] == "Pipeline"
