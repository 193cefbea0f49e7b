"""Spark ML estimators: what they train, how they take part in a Pipeline, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from horovod_runner import DataError
from tests.conftest import Ranks
from tests.learned import assert_close, weights_of
from tests.preload import ALIKE, KERAS_AND_LIGHTNING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.horovod,
    pytest.mark.places("spark", "connect"),
    pytest.mark.usefixtures("folder_of_models", "nothing_left"),
]
on_classic_spark = pytest.mark.places("spark")

ROWS = 203


WARM = {"preload_frameworks": ["horovod.torch"], "env": ALIKE}
QUIET = {"verbose": 0, "use_gpu": False, "runner_options": WARM}
WITH_KERAS_AND_LIGHTNING = {
    **QUIET,
    "runner_options": {**WARM, "preload_frameworks": KERAS_AND_LIGHTNING},
}


def line(spark: SparkSession, rows: int = ROWS) -> DataFrame:
    """y = 2a - b + 1, in order of id."""
    from pyspark.sql import functions as f

    df = spark.range(0, rows, 1, 2).select(
        "id", (f.col("id") % 13 / 13).alias("a"), (f.col("id") % 7 / 7).alias("b")
    )
    return df.withColumn("label", 2 * df.a - df.b + 1)


def classes(spark: SparkSession, rows: int = ROWS) -> DataFrame:
    """Two classes that a line divides; the class is a double, as StringIndexer makes it."""
    from pyspark.sql import functions as f

    df = line(spark, rows)
    return df.withColumn("label", (df.a > df.b).cast("double")).withColumn(
        "fold", (f.col("id") % 4 == 0)
    )


def net(outputs: int = 1, seed: int = 0) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))


def sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def regression(**params: Any) -> Any:
    import torch

    from horovod_runner.ml import TorchEstimator

    given = {
        "model": net(),
        "optimizer": sgd,
        "loss": torch.nn.MSELoss(),
        "feature_cols": [["a", "b"]],
        "epochs": 3,
        **QUIET,
    }
    return TorchEstimator(**{**given, **params})


def _torch_elsewhere(rows: Any) -> tuple[Any, Any]:
    import torch

    network = torch.nn.Sequential(net(), torch.nn.Dropout(0.5))  # does nothing when it scores
    return net()(torch.from_numpy(rows)).detach().numpy()[:, 0], network


def _lightning_elsewhere(rows: Any) -> tuple[Any, Any]:
    import lightning

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            raise NotImplementedError

        def forward(self, x: Any) -> Any:
            return self.net(x)

    return _torch_elsewhere(rows)[0], Line()


def _keras_elsewhere(rows: Any) -> tuple[Any, Any]:
    import keras

    network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return network.predict(rows, verbose=0)[:, 0], network


TRAINED_ELSEWHERE = {
    "Torch": _torch_elsewhere,
    "Lightning": _lightning_elsewhere,
    "Keras": _keras_elsewhere,
}


def by_hand(data: Any, epochs: int, batch_size: int) -> list[Any]:
    """The training loop that an estimator stands for, on all rows of a dataset."""
    import torch

    model, criterion = net(), torch.nn.MSELoss()
    optimizer = sgd(model.parameters())
    feed = data.to_torch(batch_size, {"x": ["a", "b"], "y": "label"}, shuffle=True, seed=0)
    for _ in range(epochs):
        for x, y in feed:
            optimizer.zero_grad()
            criterion(model(x[: feed.real])[:, 0], y[: feed.real]).backward()
            optimizer.step()
    return [value.numpy() for value in model.state_dict().values()]


@on_classic_spark
def test_columns_inside_others_train_and_score_as_plain_ones(spark: SparkSession) -> None:
    """Beside columns that nobody asks for, which Spark cannot even send to Python."""
    from pyspark.sql import functions as f

    df = line(spark).coalesce(1)
    odd = df.select(
        "id",
        f.create_map(f.lit("a"), "a", f.lit("other"), "id").alias("prefs"),
        f.struct("b", f.create_map("id", "id").alias("odd")).alias("point"),
        "label",
        f.expr("make_interval(1)").alias("gap"),
        f.lit(1).alias("two"),
        f.lit(2).alias("two"),
        f.expr("IF(id = 3, NULL, id)").alias("nulls"),
    )
    inside = regression(feature_cols=[["prefs.a", "point.b"]]).fit(odd)
    plain = regression().fit(df)
    assert_close(weights_of(inside), weights_of(plain), rtol=0)
    scored = inside.transform(odd.select("id", "prefs", "point")).sort("id")
    expected = [row.prediction for row in plain.transform(df).sort("id").collect()]
    assert [row.prediction for row in scored.collect()] == expected
    with pytest.raises(DataError, match=r"two columns .*'two'.*feature_cols"):
        regression(feature_cols=[["prefs.a", "two"]]).fit(odd)
    with pytest.raises(DataError, match=r"train: column 'nulls' has nulls .*Imputer"):
        regression(feature_cols=[["prefs.a", "nulls"]]).fit(odd)


@on_classic_spark
@pytest.mark.parametrize("np_", [1, 2])
def test_the_weights_are_those_of_a_loop_by_hand(spark: SparkSession, np_: int) -> None:
    """With one rank and with two, the last batch of an epoch included, which is not full."""
    from horovod_runner import HorovodRunner

    df = line(spark).coalesce(1)
    model = regression(np=np_, batch_size=32 // np_).fit(df)
    runner = HorovodRunner(np=-1, progress=False, gpus_per_rank=0)
    expected = runner.run(by_hand, data=df.select("a", "b", "label"), epochs=3, batch_size=32)
    assert_close(weights_of(model), expected, rtol=1e-4, atol=1e-5)
    assert list(model.history) == ["loss"]
    assert len(model.history["loss"]) == 3
    assert model.history["loss"][2] < model.history["loss"][0]


def test_a_regression_predicts_doubles(spark: SparkSession) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator

    df = line(spark)
    model = regression(np=2, epochs=30, batch_size=16).fit(df)
    scored = model.transform(df)
    assert scored.columns == [*df.columns, "prediction"]
    assert scored.schema["prediction"].dataType.simpleString() == "double"
    assert RegressionEvaluator(metricName="r2").evaluate(scored) > 0.95


@on_classic_spark
def test_a_classification_predicts_classes_and_probabilities(spark: SparkSession) -> None:
    import torch
    from pyspark.ml.evaluation import (
        BinaryClassificationEvaluator,
        MulticlassClassificationEvaluator,
    )

    def accuracy(output: Any, label: Any) -> Any:
        return (output.argmax(dim=1) == label).float().mean()

    df = classes(spark)
    model = regression(
        model=net(2),
        loss=torch.nn.CrossEntropyLoss(),
        epochs=20,
        validation="fold",
        metrics=[accuracy],
        np=2,
        batch_size=16,
    ).fit(df)
    assert sorted(model.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert model.history["val_accuracy"][-1] > 0.8
    scored = model.transform(df)
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.9
    area = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored)
    assert area > 0.9
    first = scored.first()
    assert first["prediction"] == float(np.argmax(first["probability"].toArray()))
    assert abs(sum(first["probability"].toArray()) - 1) < 1e-6


@on_classic_spark
def test_a_pipeline_is_searched_saved_and_loaded(spark: SparkSession, tmp_path: Path) -> None:
    """Two folds of three settings, two at a time, and the best one kept."""
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    df = line(spark)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = regression(epochs=4, np=1)
    estimator.clear(estimator.feature_cols)
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.0, 1e-4, 0.1]).build()
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(metricName="rmse"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    model = Pipeline(stages=[assembler, search]).fit(df)
    metrics = model.stages[1].avgMetrics
    assert np.argmin(metrics) == 2
    best = PipelineModel([model.stages[0], model.stages[1].bestModel])
    path = str(tmp_path / "pipeline")
    best.write().overwrite().save(path)
    loaded = PipelineModel.load(path)
    expected = [row.prediction for row in best.transform(df).orderBy("id").collect()]
    got = [row.prediction for row in loaded.transform(df).orderBy("id").collect()]
    assert got == expected
    assert loaded.stages[1].history == model.stages[1].bestModel.history


@on_classic_spark
def test_only_fits_with_the_same_validation_share_rows(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = classes(spark)
    estimator = regression(np=1)
    monkeypatch.setattr(type(estimator), "fit_rows", lambda _, rows: rows)

    def rows_of(*maps: dict[Any, Any]) -> list[Any]:
        return [rows for _, rows in sorted(estimator.fitMultiple(df, maps))]

    first, second = rows_of({estimator.epochs: 1}, {estimator.feature_cols: ["id"]})
    assert first is second
    assert {*first.packed} == {"train"}
    without, by_column = rows_of({}, {estimator.validation: "fold"})
    assert without.packed is by_column.packed is without.valid is None
    assert (by_column.train.count(), by_column.valid.count()) == (152, 51)
    drawn = rows_of(*({estimator.validation: 0.5, estimator.random_seed: n} for n in (1, 2)))
    assert len({str(rows.valid.toPandas()) for rows in drawn}) == 2
    assert rows_of() == []


@on_classic_spark
@pytest.mark.parametrize("framework", ["Torch", "Lightning", "Keras"])
def test_a_network_that_was_trained_elsewhere_is_a_stage_of_a_pipeline(
    spark: SparkSession, tmp_path: Path, framework: str
) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    from horovod_runner import ml

    df = line(spark, 8)
    wanted, network = TRAINED_ELSEWHERE[framework](df.toPandas()[["a", "b"]].to_numpy(np.float32))
    kind = getattr(ml, f"{framework}Model")
    stage = kind(model=network, featuresCol="f", predictionCol="p")
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="f")
    fitted = Pipeline(stages=[assembler, stage]).fit(df)
    path = str(tmp_path / "pipeline")
    fitted.write().overwrite().save(path)
    for model in (fitted, PipelineModel.load(path)):
        got = [row.p for row in model.transform(df).orderBy("id").collect()]
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert stage.getModel() is network
    with pytest.raises(TypeError, match="model must be a"):
        kind(model="network")
    with pytest.raises(TypeError, match="no argument 'epochs'"):
        kind(model=network, epochs=3)
    with pytest.raises(ValueError, match="has no network"):
        kind(featuresCol="f").transform(df)
    with pytest.raises(ValueError, match="needs loss_name"):
        kind(model=network, task="classification")


@on_classic_spark
def test_an_estimator_and_its_model_are_saved_and_loaded(
    spark: SparkSession, tmp_path: Path
) -> None:
    from horovod_runner.ml import TorchEstimator, TorchModel

    df = line(spark)
    estimator = regression(epochs=1)
    path = str(tmp_path / "estimator")
    estimator.save(path)
    loaded = TorchEstimator.load(path)
    assert loaded.uid == estimator.uid
    assert loaded.getEpochs() == 1
    first, second = estimator.fit(df), loaded.fit(df)
    assert_close(weights_of(second), weights_of(first), rtol=0)
    with pytest.raises(FileExistsError, match=r"write\(\)\.overwrite\(\)\.save"):
        first.save(path)
    for place in (path, *2 * ["memory://models/line"]):
        first.write().overwrite().save(place)
        again = TorchModel.load(place)
        assert_close(weights_of(again), weights_of(first), rtol=0)
        assert again.features == {"a+b": ["a", "b"]}
    with pytest.raises(DataError, match=r"TorchEstimator, got .*TorchModel"):
        TorchEstimator.load(path)


def test_what_cannot_be_read_is_not_taken_for_nothing(spark: SparkSession, tmp_path: Path) -> None:
    from horovod_runner.integrations.spark_ml.persistence import store_of

    path = str(tmp_path / "estimator")
    regression().save(path)
    (metadata,) = (tmp_path / "estimator" / "metadata").glob("part-*")
    metadata.write_bytes(b"other bytes than Spark has a checksum of")
    with pytest.raises(FileExistsError, match=r"write\(\)\.overwrite\(\)\.save"):
        regression().save(path)
    assert not store_of(str(tmp_path / "other")).has("metadata")
    with pytest.raises(Exception, match="nosuch"):
        store_of("nosuch://place/estimator").has("metadata")


@pytest.mark.parametrize("where", ["spark", "fsspec"])
def test_what_was_saved_in_part_is_not_loaded(
    spark: SparkSession, tmp_path: Path, where: str
) -> None:
    from horovod_runner.integrations.spark_ml.persistence import store_of

    store = store_of(str(tmp_path / "there") if where == "spark" else f"memory://{tmp_path}")
    intact = tmp_path / "params"
    intact.write_bytes(b"of the first")
    store.write("first", {"params": intact})
    assert store.read_metadata() == "first"
    store.remove()
    with pytest.raises(FileNotFoundError, match="gone"):  # as a crash in the middle
        store.write("second", {"params": intact, "gone": tmp_path / "gone"})
    with pytest.raises((DataError, FileNotFoundError)):
        store.read_metadata()
    assert store.has("objects")
    store.write("third", {"params": intact})
    assert store.read_metadata() == "third"


# Slow: TensorFlow is imported by the ranks, by Spark's Python workers and by this process.
@on_classic_spark
def test_a_keras_model_of_a_subclass_begins_with_text_and_is_not_built(
    spark: SparkSession, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.needs_tensorflow()
    import keras
    from pyspark.sql import functions as f

    from horovod_runner.ml import KerasEstimator, KerasModel

    layers = keras.layers

    class Words(keras.Model):  # type: ignore[misc, name-defined]
        # Keras alone could not load it, because it has no **kwargs for Keras's own arguments.
        def __init__(self, units: int = 4) -> None:
            super().__init__()
            self.numbers = layers.TextVectorization(vocabulary=["good", "bad", "film"])
            self.vectors, self.score = layers.Embedding(8, units), layers.Dense(1)

        def call(self, text: Any) -> Any:
            return self.score(keras.ops.mean(self.vectors(self.numbers(text)), axis=1))

    good = f.when(f.col("id") % 3 == 0, "good film").otherwise("bad film")
    df = line(spark, 48).select(good.alias("text"), (f.col("id") % 3 == 0).cast("float").alias("y"))
    keras.utils.set_random_seed(0)
    estimator = KerasEstimator(
        model=Words(),
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss="mse",
        feature_cols=["text"],
        labelCol="y",
        epochs=20,
        batch_size=4,
        validation=0.2,
        np=2,
        **WITH_KERAS_AND_LIGHTNING,
    )
    model = estimator.fit(df)
    assert {"loss", "val_loss"} <= set(model.history)
    scored = {row.text: row.prediction for row in model.transform(df).distinct().collect()}
    assert scored == pytest.approx({"good film": 1.0, "bad film": 0.0}, abs=0.2)
    with pytest.raises(ValueError, match=r"Words .*get_config that returns the arguments"):
        estimator.setModel(Words(8)).fit(df)
    model.save(str(tmp_path / "words"))
    again = KerasModel.load(str(tmp_path / "words")).transform(df).distinct().collect()
    assert {row.text: row.prediction for row in again} == pytest.approx(scored)


@on_classic_spark
def test_lightning_trains_and_predicts(spark: SparkSession) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    import torch
    from pyspark.ml.evaluation import RegressionEvaluator

    from horovod_runner.ml import LightningEstimator

    class Line(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, a: Any, b: Any) -> Any:
            return self.layer(torch.stack([a, b], dim=1))

        def training_step(self, batch: Any, index: int) -> Any:
            outputs = self(batch["a"], batch["b"])[:, 0]
            loss = torch.nn.functional.mse_loss(outputs, batch["label"])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    df = line(spark)
    torch.manual_seed(5)  # after other weights the line is not found in as many steps
    estimator = LightningEstimator(
        np=2,
        model=Line(),
        feature_cols=["a", "b"],
        epochs=20,
        batch_size=16,
        **WITH_KERAS_AND_LIGHTNING,
    )
    model = estimator.fit(df)
    assert len(model.history["loss"]) == 20
    assert RegressionEvaluator(metricName="r2").evaluate(model.transform(df)) > 0.9


@on_classic_spark
def test_a_training_resumes_from_its_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """Each epoch has 3 steps, although there are rows for 7."""
    df = line(spark)
    steps = {"train_steps_per_epoch": 3}
    folder = {"checkpoint_dir": str(tmp_path), "run_id": "one"}
    whole = regression(epochs=3, **steps).fit(df)
    regression(epochs=2, **steps, **folder).fit(df)
    resumed = regression(epochs=3, resume=True, **steps, **folder).fit(df)
    assert len(resumed.history["loss"]) == 3
    assert_close(weights_of(resumed), weights_of(whole), rtol=1e-5, atol=1e-6)


@on_classic_spark
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"model": None}, ValueError, r"TorchEstimator\(model=...\)"),
        ({"loss": None}, ValueError, r"TorchEstimator\(loss=...\)"),
        ({"feature_cols": ["nope"]}, DataError, "column 'nope': .*feature_cols"),
        ({"labelCol": "nope"}, DataError, "column 'nope': .*label_cols"),
        ({"labelCol": "text"}, ValueError, "'text' .*StringIndexer"),
        ({"feature_cols": ["a"]}, ValueError, r"^model .* a \(4,\)\. .*feature_cols"),
        ({"label_cols": ["a", "b"]}, ValueError, " 1 outputs .* 2 labels"),
        ({"feature_cols": ["a", "b"]}, ValueError, r"feature_cols=\[\['age', 'income'\]\]"),
        ({"feature_cols": ["empty"]}, DataError, "no rows .*nulls .*Imputer"),
        ({"validation": 1.5}, ValueError, r"^validation .* 0 .* 1 .* 1\.5$"),
        ({"validation": "nope"}, ValueError, "^validation .*'nope'"),
        ({"batch_size": 0}, ValueError, "^batch_size .* 1 .* 0$"),
        ({"optimizer": 3}, TypeError, "^optimizer .*torch.* 3$"),
        ({"runner_options": {"nope": 1}}, TypeError, "no option 'nope'"),
    ],
)
def test_mistakes_are_told_before_anything_is_launched(
    spark: SparkSession, params: dict[str, Any], error: type[Exception], message: str
) -> None:
    from pyspark.sql import functions as f

    df = line(spark).withColumn("text", f.lit("a")).withColumn("empty", f.lit(None).cast("float"))
    estimator = regression(**{name: value for name, value in params.items() if value is not None})
    for name, value in params.items():
        if value is None:
            estimator.clear(estimator.getParam(name))
    with pytest.raises(error, match=message):
        estimator.fit(df)


@on_classic_spark
def test_rows_are_split_by_a_column_or_a_fraction(spark: SparkSession) -> None:
    from pyspark.sql import functions as f

    from horovod_runner.integrations.training.rows import split

    df = classes(spark).withColumn("fold", f.when(f.col("id") > 0, f.col("fold")))  # a NULL
    train, valid = split(df, "fold", 0)
    assert valid is not None
    assert (train.filter("fold").count(), valid.filter("not fold").count()) == (0, 0)
    assert train.count() + valid.count() == ROWS
    train, valid = split(df, 0.25, 0)
    assert valid is not None
    assert train.count() + valid.count() == ROWS
    assert 0.15 * ROWS < valid.count() < 0.35 * ROWS
    assert split(df, None, 0) == (df, None)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'epoch': .* epochs, "):
        regression(epoch=3)
