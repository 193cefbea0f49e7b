"""Code that was written for horovod.spark: its names lead to this package and do what they did."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest

from horovod_runner import DataError
from horovod_runner.host.folders.folder import local_path
from horovod_runner.integrations.horovod_spark.batches import Arrange
from horovod_runner.integrations.horovod_spark.frameworks.store_trainings import (
    StoreKerasTraining,
    StoreLightningTraining,
)
from horovod_runner.integrations.training.keras import KerasTraining
from horovod_runner.integrations.training.lightning import LightningTraining
from horovod_runner.integrations.training.training import Trained
from horovod_runner.worker.imports import replacements
from tests.learned import assert_close, weights_of
from tests.preload import KERAS_AND_LIGHTNING, TORCH
from tests.stand_ins import as_rank

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.horovod,
    pytest.mark.places("spark"),
    pytest.mark.usefixtures("horovod_spark", "folder_of_models", "nothing_left"),
]


SMALL = {"batch_size": 8, "verbose": 0, "use_gpu": False}


@pytest.fixture
def horovod_spark() -> Iterator[None]:
    """The names of horovod.spark, for one test."""
    import horovod_runner.horovod_spark as ours

    ours.install()
    yield
    sys.meta_path[:] = [each for each in sys.meta_path if "horovod_spark" not in repr(type(each))]
    for name in [name for name in sys.modules if name.startswith("horovod.spark")]:
        del sys.modules[name]
    replacements._installed.clear()


class InAProcess:
    """A backend of the user's own: one rank in a process that knows nothing of this package."""

    CALL = (
        "import cloudpickle, pathlib, sys; path = pathlib.Path(sys.argv[1]); "
        "call, args, kwargs = cloudpickle.loads(path.read_bytes()); "
        "path.write_bytes(cloudpickle.dumps(call(*args, **kwargs)))"
    )

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "call"
            path.write_bytes(cloudpickle.dumps((fn, args, kwargs)))
            environment = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-c", self.CALL, str(path)]
            subprocess.run(command, check=True, env=environment)
            return [cloudpickle.loads(path.read_bytes()), None]  # only rank 0 returns something

    def num_processes(self) -> int:
        return 1


def backend(num_proc: int, frameworks: Sequence[str] = TORCH) -> Any:
    from horovod.spark.common.backend import SparkBackend

    return SparkBackend(num_proc, verbose=0, preload_frameworks=frameworks)


def xor(spark: SparkSession, rows: int = 64) -> DataFrame:
    from pyspark.ml.feature import VectorAssembler

    data = [
        (n % 2, n // 2 % 2, float(n % 2 != n // 2 % 2), 0.5 + n % 3, n % 4 == 0)
        for n in range(rows)
    ]
    df = spark.createDataFrame(data, "x1 int, x2 int, y float, weight float, val boolean")
    return VectorAssembler(inputCols=["x1", "x2"], outputCol="features").transform(df.coalesce(1))


def net(outputs: int = 1) -> Any:
    import torch

    class Xor(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(2, 8)
            self.second = torch.nn.Linear(8, outputs)

        def forward(self, features: Any) -> Any:
            return torch.sigmoid(self.second(torch.tanh(self.first(features.float()))))

    torch.manual_seed(1)
    return Xor()


def estimator(store: Path | None = None, **params: Any) -> Any:
    """Horovod's estimator with what its own tests give it."""
    import torch
    from horovod.spark.common.store import Store
    from horovod.spark.torch import TorchEstimator

    model = net()
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        "loss": torch.nn.functional.binary_cross_entropy,
        "input_shapes": [[2]],
        "feature_cols": ["features"],
        "label_cols": ["y"],
        "epochs": 2,
        **SMALL,
        **params,
    }
    if store is not None:
        given["store"] = Store.create(str(store))
    if "backend" not in given:
        given["backend"] = backend(-1)
    return TorchEstimator(**given)


def test_run_returns_the_values_of_all_ranks(spark: SparkSession) -> None:
    import horovod.spark

    def main(start: int, *, step: int) -> tuple[int, str]:
        import os

        import horovod.torch as hvd

        hvd.init()
        return start + step * hvd.rank(), os.environ["OWN"]

    values = horovod.spark.run(
        main, args=(10,), kwargs={"step": 5}, num_proc=2, env={"OWN": "mine"}, verbose=0
    )
    assert values == [(10, "mine"), (15, "mine")]
    with pytest.raises(ValueError, match=r"executable='python2'.*PYSPARK_PYTHON"):
        horovod.spark.run(main, executable="python2")


def test_a_subclass_of_the_backend_uses_horovods_attributes_and_output_its_prefix(
    spark: SparkSession,
) -> None:
    """As SynapseML's backend does."""
    import horovod.spark
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.task import get_available_devices

    class Own(SparkBackend):  # type: ignore[misc]
        def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
            given = {"num_proc": self._num_proc, "env": {**self._env, **(env or {})}}
            return horovod.spark.run(fn, args=args, kwargs=kwargs or {}, **given, **self._kwargs)

    def main() -> Any:
        print("[7] a line")
        return os.environ["OWN"], get_available_devices()

    out, err = io.StringIO(), io.StringIO()
    made = Own(2, env={"OWN": "mine"}, verbose=0, stdout=out, stderr=err, gpus_per_rank=0)
    assert made.run(main) == [("mine", [])] * 2
    assert sorted(out.getvalue().splitlines()) == [f"[{n}]<stdout>:[7] a line" for n in range(2)]


def test_stores_have_horovods_methods_and_refuse_other_urls(tmp_path: Path) -> None:
    from horovod.spark.common.store import HDFSStore, Store

    hdfs = HDFSStore("hdfs://nn:8020/a")
    assert hdfs.get_full_path("/b") == "hdfs://nn:8020/b"
    assert hdfs.get_train_data_path(1) == "hdfs://nn:8020/a/intermediate_train_data.1"
    assert hdfs.get_localized_path("hdfs://nn:8020/a/b") == "/a/b"
    assert HDFSStore("/a").get_full_path("/b") == "hdfs:///b"
    for prefix in ("/a", "hdfs:///a", "hdfs://other/a"):
        named = HDFSStore(prefix, host="nn", port=8020)
        assert named.get_run_path("one") == "hdfs://nn:8020/a/runs/one"
        assert named.storage_options == {}  # which a fit refuses
    for wrong in ("file:///a", "s3://bucket/a", "hdfs://nn:8020", "a/b"):
        with pytest.raises(ValueError, match=r"hdfs://"):
            HDFSStore(wrong)
    store = Store.create(str(tmp_path / "store"))
    with store.get_local_output_dir_fn("one")() as folder:
        (Path(folder) / "in").mkdir()
        (Path(folder) / "in" / "file").write_text("x")
        store.to_remote("one", 0).sync(folder)
    assert (tmp_path / "store/runs/one/in/file").read_text() == "x"
    assert store.get_data_metadata_path("/a/").endswith("_cached_metadata.pkl")


@pytest.mark.parametrize("start", ["", "file:", "file://"])
def test_a_store_is_in_the_folder_that_its_path_names(tmp_path: Path, start: str) -> None:
    from horovod.spark.common.store import Store

    folder = tmp_path / "my größer 100% #1"
    folder.mkdir()
    store = Store.create(f"{start}{folder}")
    assert store.exists(store.prefix_path)
    run = local_path(store.get_checkpoint_path("one"))  # where ranks and their driver write
    assert run == folder / "runs" / "one"


def test_the_ranks_get_all_variables_of_an_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the backend those that differ from this process's: of a copy of all."""
    from horovod.spark.common.backend import SparkBackend

    monkeypatch.setenv("OWN", "mine")
    runner = SparkBackend(1, env={**os.environ, "MORE": "1"}).runner({"OWN": "mine"})
    assert dict(runner.options.env) == {"MORE": "1", "OWN": "mine"}


@pytest.mark.parametrize("shape", [[-1, -1], [-1, -1, 3], [-1, 6], [6], [-1, 2, 3]])
def test_a_shape_may_have_several_free_sizes(shape: list[int]) -> None:
    values = np.zeros((4, 2, 3) if len(shape) == 3 else (4, 6))
    arrange = Arrange({"x": "column"}, {"x": shape})
    assert arrange({"x": values})["x"].shape == values.shape


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("horovod.spark.data_loaders", "reads rows with Petastorm"),
        ("horovod.spark.keras.datamodule", "reads rows with Petastorm"),
        ("horovod.spark.driver", "is internal to Horovod's way"),
    ],
)
def test_modules_that_are_missing_say_why(module: str, message: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=message):
        import_module(module)


def test_run_elastic_replaces_a_lost_rank_and_goes_on_from_its_commit(spark: SparkSession) -> None:
    import horovod.spark

    def main(last: int) -> tuple[int, int, list[int]]:
        import os
        import signal

        import horovod.torch as hvd

        from horovod_runner import current_attempt

        hvd.init()
        begins = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            begins.append(state.epoch)
            while state.epoch < last:
                if state.epoch == 2 and current_attempt() == 1 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.allreduce(state.ones, name="step")
                state.epoch += 1
                state.commit()

        import torch

        train(hvd.elastic.TorchState(epoch=0, ones=torch.ones(1)))
        return hvd.size(), current_attempt(), begins

    values = horovod.spark.run_elastic(
        main, (4,), num_proc=2, min_np=1, max_num_proc=3, reset_limit=1, verbose=0
    )
    assert values == [(3, 2, [2])] * 3
    with pytest.raises(ValueError, match=r"np=\(2, 3\)"):
        horovod.spark.run_elastic(main, (4,), num_proc=2, min_num_proc=3)


def test_run_elastic_calls_a_function_that_fails_again_as_often_as_its_limit_says(
    spark: SparkSession, tmp_path: Path
) -> None:
    import horovod.spark

    def fail() -> None:
        with open(tmp_path / "calls", "a") as file:
            file.write("called ")
        raise RuntimeError("it fails")

    with pytest.raises(RuntimeError, match="it fails"):
        horovod.spark.run_elastic(fail, num_proc=1, reset_limit=0, verbose=0)
    assert (tmp_path / "calls").read_text() == "called "


# Slow: trains with our estimator, and what it learns with one process.
def test_two_ranks_train_as_horovods_estimator_does(spark: SparkSession, tmp_path: Path) -> None:
    """The learning rate is scaled; the model, its optimizer and its history have Horovod's form."""
    import torch

    from horovod_runner import ml

    df = xor(spark)

    def accuracy(output: Any, label: Any) -> Any:
        return ((output > 0.5) == (label > 0.5)).float().mean()

    model = net()
    groups = [{"params": [*layer.parameters()]} for layer in (model.first, model.second)]
    trained = estimator(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(groups, lr=0.1, momentum=0.5),
        backend=backend(2),
        sample_weight_col="weight",
        validation="val",
        metrics=[[accuracy]],
        run_id="first",
    ).fit(df)
    doubled = ml.TorchEstimator(
        model=net(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.5),
        loss=torch.nn.functional.binary_cross_entropy,
        feature_cols=["features"],
        label_cols=["y"],
        sample_weight_col="weight",
        validation="val",
        batch_size=8,
        epochs=2,
        np=2,
        use_gpu=False,
        verbose=0,
        runner_options={"preload_frameworks": ["horovod.torch"]},
    ).fit(df)
    assert_close(weights_of(trained), weights_of(doubled), rtol=1e-5)
    assert [entry["epoch"] for entry in trained.getHistory()] == [0, 1]
    last = trained.getHistory()[1]
    assert last["train"]["loss"] == pytest.approx(doubled.history["loss"][1], rel=1e-5)
    assert 0 <= last["validation"]["all_metrics"][0]["group_0_y"] <= 1
    optimizer = trained.getOptimizer()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])
    assert set(optimizer.state) == set(trained.getModel().parameters())
    assert all("momentum_buffer" in state for state in optimizer.state.values())
    assert trained.getRunId() == "first"

    scored = trained.transform(df)
    assert scored.columns == [*df.columns, "y__output"]
    assert scored.schema["y__output"].dataType.simpleString() == "float"
    with torch.no_grad():
        expected = trained.getModel()(torch.tensor([[0.0, 1.0]])).item()
    row = scored.filter("x1 = 0 and x2 = 1").first()
    assert row["y__output"] == pytest.approx(expected, rel=1e-5)


def test_a_run_id_goes_on_from_its_checkpoint_in_the_store(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A training that had ended trains further epochs, however many; its logs are there, too."""
    df = xor(spark)
    both = estimator(tmp_path, epochs=4).fit(df)
    store = estimator(tmp_path).getStore()
    assert not store.exists(store.get_checkpoint_path("mine"))
    first = estimator(tmp_path, epochs=1, run_id="mine").fit(df)
    assert store.exists(store.get_checkpoint_path("mine"))
    assert store.get_checkpoints("mine", ".pt")
    second = estimator(tmp_path, epochs=3, run_id="mine").fit(df)
    assert [entry["epoch"] for entry in second.getHistory()] == [0, 1, 2]
    losses = [entry["train"]["loss"] for entry in (*first.getHistory(), *second.getHistory())]
    assert losses == pytest.approx([entry["train"]["loss"] for entry in both.getHistory()])
    assert_close(weights_of(second), weights_of(both), rtol=1e-5)
    events = list((tmp_path / "runs" / "mine" / "logs").rglob("events.*"))
    assert events


def test_an_interrupted_training_goes_on_to_its_end(spark: SparkSession, tmp_path: Path) -> None:
    import torch

    steps: list[int] = []

    def fails(output: Any, label: Any) -> Any:
        steps.append(1)
        if len(steps) > 12:  # in the second epoch of eight steps
            raise OSError("no good")
        return torch.nn.functional.binary_cross_entropy(output, label)

    df = xor(spark)
    with pytest.raises(OSError, match="no good"):
        estimator(tmp_path, epochs=3, run_id="mine", loss=fails).fit(df)
    resumed = estimator(tmp_path, epochs=3, run_id="mine").fit(df)
    ended = resumed.run.metrics["epoch"].to_pylist()
    assert {*ended} == {1, 2, 3}


# Slow: prepares Petastorm's files with Spark before two trainings.
def test_a_backend_of_ones_own_trains_from_the_store(spark: SparkSession, tmp_path: Path) -> None:
    from horovod.spark.common.util import prepare_data

    df = xor(spark)
    ours = estimator(tmp_path / "ours").fit(df)
    theirs = estimator(tmp_path / "theirs", backend=InAProcess(), run_id="mine")
    fitted = theirs.fit(df)
    assert_close(weights_of(fitted), weights_of(ours), rtol=1e-5)
    store = theirs.getStore()
    assert store.exists(store.get_checkpoint_path("mine"))
    again = theirs.fit(df)
    assert again.getHistory()[0]["train"]["loss"] < fitted.getHistory()[1]["train"]["loss"]

    with prepare_data(1, store, df, ["y"], ["features"], validation="val") as number:
        assert store.is_parquet_dataset(store.get_train_data_path(number))
        for each in (InAProcess(), backend(-1)):
            read = estimator(tmp_path / "theirs", backend=each, validation="val")
            fitted = read.fit_on_parquet(dataset_idx=number)
            assert set(fitted.getHistory()[0]) == {"epoch", "train", "validation"}
    with pytest.raises(ValueError, match=r"InAProcess .*store=Store\.create"):
        estimator(backend=InAProcess()).fit(df)


def test_rows_do_not_stay_in_the_store_when_further_ones_cannot_be_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.errors import PySparkException
    from pyspark.sql import functions

    broken = functions.raise_error(functions.lit("no good")).cast("float")
    df = xor(spark).withColumn("y", functions.when(functions.col("val"), broken).otherwise(0.5))
    with pytest.raises(PySparkException, match="no good"):
        estimator(tmp_path, backend=InAProcess(), validation="val").fit(df)
    assert not list(tmp_path.glob("intermediate_train_data*"))


def test_a_scalar_label_and_several_outputs_make_a_vector(spark: SparkSession) -> None:
    from horovod.spark.common import util
    from horovod.spark.torch import TorchModel

    df = xor(spark)
    model = TorchModel(
        history=None,
        model=net(outputs=2),
        input_shapes=[[2]],
        feature_columns=["features"],
        label_columns=["y"],
        _metadata=util._get_metadata(df),
    )
    scored = model.transform(df)
    assert scored.schema["y__output"].dataType.typeName() == "vectorudt"
    assert len(scored.first()["y__output"]) == 2
    whole = TorchModel(
        model=net(), feature_columns=["features"], label_columns=["x1"], input_shapes=[[-1, 2]]
    ).setParams(_metadata=util._get_metadata(df))
    assert whole.transform(df).schema["x1__output"].dataType.simpleString() == "int"


def test_the_users_own_step_trains_a_minibatch(spark: SparkSession) -> None:
    def step(  # noqa: PLR0917 - as Horovod calls it
        model: Any,
        optimizer: Any,
        transform_outputs: Any,
        loss_fn: Any,
        inputs: Any,
        labels: Any,
        sample_weights: Any,
    ) -> Any:
        optimizer.zero_grad()
        outputs, labels = transform_outputs(model(*inputs), labels)
        loss = loss_fn(outputs, labels, sample_weights)
        loss.backward()
        optimizer.step()
        return outputs, loss

    df = xor(spark, rows=61)  # the ranks have different numbers of rows in their last step
    usual = estimator(backend=backend(-2)).fit(df)
    own = estimator(backend=backend(-2), train_minibatch_fn=step).fit(df)
    assert_close(weights_of(own), weights_of(usual), rtol=1e-6)
    losses = [[entry["train"]["loss"] for entry in each.getHistory()] for each in (own, usual)]
    assert losses[0] == pytest.approx(losses[1])


def test_an_estimator_and_its_model_are_saved_without_backend_and_store(
    spark: SparkSession, tmp_path: Path
) -> None:
    from horovod.spark.torch import TorchEstimator, TorchModel

    df = xor(spark)
    path = str(tmp_path / "estimator")
    estimator(tmp_path / "store").save(path)
    loaded = TorchEstimator.load(path)
    assert loaded.getBackend() is loaded.getStore() is None
    assert loaded.getInputShapes() == [[2]]
    model = loaded.fit(df, params={loaded.backend: backend(-1)})
    model.write().overwrite().save(str(tmp_path / "model"))
    read = TorchModel.load(str(tmp_path / "model"))
    assert read.getHistory() == model.getHistory()
    assert read.transform(df).collect() == model.transform(df).collect()


# Slow: TensorFlow is imported in Spark's Python workers and in ranks.
def test_keras_gets_the_shapes_of_its_inputs(spark: SparkSession, tmp_path: Path) -> None:
    import keras
    from horovod.spark.common.store import LocalStore
    from horovod.spark.keras import KerasEstimator, KerasModel
    from pyspark.ml.linalg import Vectors

    rows = [
        (Vectors.dense(np.eye(8)[n % 2].tolist() * 2), Vectors.dense(np.eye(2)[n % 2]), n % 2)
        for n in range(64)
    ]
    df = spark.createDataFrame(rows, ["features", "label_vec", "label"]).coalesce(1)
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    estimator = KerasEstimator(
        backend=backend(2, KERAS_AND_LIGHTNING),
        store=LocalStore(str(tmp_path)),
        model=model,
        optimizer=keras.optimizers.SGD(0.5),
        loss=keras.losses.categorical_crossentropy,
        metrics=["accuracy"],
        feature_cols=["features"],
        label_cols=["label_vec"],
        epochs=3,
        **SMALL,
        run_id="mine",
        callbacks=[keras.callbacks.TensorBoard()],
        checkpoint_callback=keras.callbacks.ModelCheckpoint("replaced.keras"),
    )
    trained = estimator.fit(df)
    assert list(trained.getHistory()) == ["accuracy", "loss"]
    assert trained.getHistory()["accuracy"][-1] == 1.0
    assert float(trained.getModel().optimizer.learning_rate) == 0.5
    assert list((tmp_path / "runs" / "mine" / "logs").rglob("*train*"))
    scored = trained.setOutputCols(["label_prob"]).transform(df)
    assert all(int(row.label_prob.toArray().argmax()) == row.label for row in scored.collect())
    trained.write().overwrite().save(str(tmp_path / "model"))
    read = KerasModel.load(str(tmp_path / "model"))
    assert read.getOutputCols() == ["label_prob"]
    assert read.transform(df).collect() == scored.collect()
    again = estimator.fit(df).getHistory()  # goes on from the checkpoint
    assert len(again["loss"]) == 3
    assert again["loss"][0] < trained.getHistory()["loss"][-1]


@pytest.mark.parametrize("only_weights", [False, True])
def test_a_callback_that_saves_models_or_their_weights_chooses_the_model(
    only_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])

    def train(training: Any, *shards: Any) -> Trained:
        """Train with the best weight, and then with another one."""
        network = training.read_model()
        for callback in training.callbacks:
            callback.set_model(network)
            network.set_weights([np.array([[2.0]])])
            callback.on_epoch_end(0, {"loss": 0.1})
            network.set_weights([np.array([[3.0]])])
            callback.on_epoch_end(1, {"loss": 0.2})
        return Trained(network.get_weights(), {})

    monkeypatch.setattr(KerasTraining, "train", train)
    ending = ".weights.h5" if only_weights else ".keras"
    saver = keras.callbacks.ModelCheckpoint(
        f"replaced{ending}", monitor="loss", save_best_only=True, save_weights_only=only_weights
    )
    training = StoreKerasTraining(
        model=model,
        features={"x": "x"},
        labels=["y"],
        loss="mse",
        optimizer="sgd",
        checkpoint_callback=saver,
    ).for_ranks()
    with as_rank(0, 1):
        trained = training.train(None, None)  # type: ignore[arg-type]
    assert trained is not None
    assert trained.weights[0].item() == 2.0


def test_a_best_model_of_before_a_restart_is_passed_over_where_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import pytorch_lightning

    trained = Trained(b"the last weights", {})
    monkeypatch.setattr(LightningTraining, "train", lambda *_: trained)
    saver = pytorch_lightning.callbacks.ModelCheckpoint(monitor="loss")
    saver.best_model_path = str(tmp_path / "gone.ckpt")
    training = StoreLightningTraining(
        model=lightning_module(), features={"x": "x"}, labels=["y"], callbacks=[saver]
    )
    assert training.train(None, None) is trained  # type: ignore[arg-type]


def lightning_module() -> Any:
    """A module for Lightning 1, with a hook that Lightning 2 refuses."""
    import pytorch_lightning
    import torch

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, features: Any) -> Any:
            return self.net(features)

        def _loss(self, batch: Any) -> Any:
            output = self(batch["features"])[:, 0]
            return torch.nn.functional.binary_cross_entropy(output, batch["y"])

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self._loss(batch)
            self.log("train_loss", loss)
            self.logger.experiment.add_scalar("own", loss, index)  # as Horovod's example does
            return loss

        def validation_step(self, batch: Any, index: int) -> Any:
            return {"val_loss": self._loss(batch)}

        def validation_epoch_end(self, outputs: Any) -> None:
            losses = torch.stack([each["val_loss"] for each in outputs])
            self.log("avg_val_loss", losses.mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def test_a_module_for_lightning_1_trains(spark: SparkSession, tmp_path: Path) -> None:
    import pytorch_lightning
    from horovod.spark.common.store import Store
    from horovod.spark.lightning import TorchEstimator

    counted = tmp_path / "counted"

    class Counting(pytorch_lightning.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, trainer: Any, module: Any) -> None:
            with counted.open("a") as file:
                file.write("epoch\n")

    df = xor(spark)
    given = {
        "backend": backend(2, KERAS_AND_LIGHTNING),
        "store": Store.create(str(tmp_path / "store")),
        "model": lightning_module(),
        "input_shapes": [[-1, 2]],
        "feature_cols": ["features"],
        "label_cols": ["y"],
        "epochs": 2,
        "validation": "val",
        **SMALL,
    }
    saver = pytorch_lightning.callbacks.ModelCheckpoint(monitor="avg_val_loss")
    rates = pytorch_lightning.callbacks.LearningRateMonitor()  # requires a logger
    given |= {"callbacks": [Counting(), saver, rates], "log_every_n_steps": 1, "run_id": "one"}
    trained = TorchEstimator(**given).fit(df)
    assert set(trained.getHistory()) >= {"train_loss", "avg_val_loss"}
    logs = [file.read_bytes() for file in tmp_path.glob("store/runs/one/logs/events.*")]
    for tag in (b"lr-SGD", b"own"):
        assert any(tag in content for content in logs)
    assert counted.read_text().count("epoch") >= 2 * 2
    scored = trained.transform(df)
    assert scored.schema["y__output"].dataType.simpleString() == "float"
    with pytest.raises(ValueError, match=r"^loss .*training_step"):
        TorchEstimator(**given, loss=len).fit(df)


def test_a_transformation_adds_and_removes_columns_of_a_lightning_module(
    spark: SparkSession,
) -> None:
    """As SynapseML's classifier of texts."""
    import torch
    from horovod.spark.lightning import TorchEstimator

    class Reads(type(lightning_module())):  # type: ignore[misc]
        validation_epoch_end = None

        def training_step(self, batch: Any, index: int) -> Any:
            kinds = {name: value.dtype for name, value in batch.items()}
            assert kinds == {"ids": torch.int64, "labels": torch.int64, "w": torch.float64}, kinds
            features, y = batch["ids"].float(), batch["labels"].float()
            return super().training_step({"features": features, "y": y}, index)

    def tokens(row: Any) -> Any:
        numbers = [int(number) for number in row["text"].split()]
        return {"ids": numbers, "labels": torch.tensor(row["y"], dtype=int), "w": row["w"]}

    rows = [(f"{n % 2} {n // 2 % 2}", float(n % 2), n / 3) for n in range(16)]
    df = spark.createDataFrame(rows, "text string, y double, w double").coalesce(1)
    given = {
        "backend": backend(-1),
        "model": Reads(),
        "feature_cols": ["text", "w"],
        "label_cols": ["y"],
        "transformation_fn": tokens,
        "transformation_edit_fields": [("ids", np.int64, (2,), False), ("labels", int, (), False)],
        "transformation_removed_fields": ["text", "y"],
        **SMALL,
    }
    trained = TorchEstimator(**given).fit(df)
    assert "train_loss" in trained.getHistory()
    with pytest.raises(ValueError, match="one is 'ids'"):
        TorchEstimator(**{**given, "transformation_edit_fields": ["ids"]}).fit(df)


def test_subclasses_make_their_own_backend_rows_and_model(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As SynapseML's classifiers: paths of files become inputs, row by row."""
    import horovod.spark.lightning as hvd
    import torch
    from pyspark.ml.param import Param, Params

    class Model(hvd.TorchModel):  # type: ignore[misc]
        path_col = Param(Params._dummy(), "path_col", "the column of paths")

        def __init__(self, **params: Any) -> None:
            super().__init__()
            self._setDefault(path_col="path", outputCols=["output"])
            self._set(**params)

        def get_prediction_fn(self) -> Any:
            column = self.getOrDefault(self.path_col)

            def predict(model: Any, row: Any) -> Any:
                numbers = [float(number) for number in Path(row[column]).read_text().split()]
                with torch.no_grad():
                    return model(torch.tensor([numbers]))

            return predict

        def _transform(self, dataset: Any) -> Any:
            self.setFeatureColumns([self.getOrDefault(self.path_col)])
            self.setLabelColoumns(["y"])
            return super()._transform(dataset)

    class Classifier(hvd.TorchEstimator):  # type: ignore[misc]
        scale = Param(Params._dummy(), "scale", "multiplies the inputs")

        def __init__(self, **params: Any) -> None:
            super().__init__()
            self._setDefault(scale=1.0, feature_cols=["path"], label_cols=["y"])
            self._set(**params)
            scale = self.getOrDefault(self.scale)

            def read(row: Any) -> Any:
                numbers = [float(number) for number in Path(row["path"]).read_text().split()]
                return {"path": np.array(numbers, np.float32) * scale, "y": row["y"]}

            self.setTransformationFn(read)

        def _get_or_create_backend(self) -> Any:
            return backend(-1)

        def get_model_class(self) -> Any:
            return Model

        def _get_model_kwargs(
            self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any
        ) -> Any:
            return {"history": history, "model": model, "run_id": run_id, "_metadata": metadata}

    class Reads(type(lightning_module())):  # type: ignore[misc]
        validation_epoch_end = None

        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step({"features": batch["path"], "y": batch["y"]}, index)

    for n in range(16):
        (tmp_path / f"{n}.txt").write_text(f"{n % 2} {n // 2 % 2}")
    rows = [(str(tmp_path / f"{n}.txt"), float(n % 2 != n // 2 % 2)) for n in range(16)]
    df = spark.createDataFrame(rows, "path string, y float").coalesce(1)
    trained = Classifier(model=Reads(), batch_size=4, epochs=2, verbose=0, use_gpu=False).fit(df)
    assert type(trained) is Model
    scored = trained.transform(df).collect()
    with torch.no_grad():
        expected = trained.getModel()(torch.tensor([[1.0, 0.0]])).item()
    assert scored[1]["output"] == pytest.approx(expected, rel=1e-5)


def test_mistakes_are_told_before_anything_is_launched(spark: SparkSession) -> None:
    from horovod.spark.torch import TorchEstimator

    df = xor(spark)
    with pytest.raises(ValueError, match=r"TorchEstimator .* model$"):
        TorchEstimator(feature_cols=["features"], label_cols=["y"]).fit(df)
    with pytest.raises(TypeError, match=r"'modle': .*label_cols"):
        TorchEstimator(modle=net())
    with pytest.raises(ValueError, match="loss or loss_constructors"):
        estimator(loss_constructors=[len])
    with pytest.raises(ValueError, match="backend or num_proc"):
        estimator(num_proc=2).fit(df)
    with pytest.raises(ValueError, match="data_module"):
        estimator(data_module=object).fit(df)
    with pytest.raises(DataError, match="no column 'nope'"):
        estimator(feature_cols=["nope"]).fit(df)
    with pytest.raises(DataError, match=r"'features' .*\(2,\) .*\[-1, 3\] .*input_shapes"):
        estimator(input_shapes=[[-1, 3]]).fit(df.limit(4))
