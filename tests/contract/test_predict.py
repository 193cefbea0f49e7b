"""Predictions over a DataFrame: every kind of model and column, on classic Spark and Connect."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from horovod_runner import DataError, PredictionError, SerializationError, predict
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.data import Image
from tests.pictures import encoded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("spark", "connect")]
on_classic_spark = pytest.mark.places("spark")
everywhere = pytest.mark.places("spark", "connect", "cluster")

ROWS = 1000


@pytest.fixture
def df(spark: SparkSession) -> DataFrame:
    """Numbers, text and a struct, in two partitions: each Python worker imports a framework."""
    from pyspark.sql import functions as f

    numbers = f.col("id")
    return spark.range(0, ROWS, 1, 2).select(
        numbers,
        (numbers / 10).alias("a"),
        (numbers % 7).cast("float").alias("b.c"),
        f.struct((numbers * 2).alias("x"), (numbers * 3).cast("double").alias("y")).alias("s"),
        f.concat(f.lit("row "), numbers.cast("string")).alias("text"),
    )


def values(scored: DataFrame, *columns: str) -> list[Any]:
    """Columns of a DataFrame in the order of ids."""
    rows = scored.orderBy("id").collect()
    return [
        row[columns[0]] if len(columns) == 1 else tuple(row[c] for c in columns) for row in rows
    ]


def total(parts: Mapping[str, Any]) -> Any:
    return parts["x"].sum(axis=1)


@everywhere
def test_a_function_scores_all_rows_and_keeps_their_columns(df: DataFrame) -> None:
    scored = predict(
        df,
        total,
        {"x": ["a", "b.c", "s.x"]},
        output="p",
        batch_size=64,
        ship_modules=[sys.modules[__name__]],
    )
    assert scored.columns == [*df.columns, "p"]
    assert scored.schema["p"].dataType.simpleString() == "double"
    found = values(scored, "p", "text")
    assert [text for _, text in found] == [f"row {n}" for n in range(ROWS)]
    np.testing.assert_allclose([p for p, _ in found], [n / 10 + n % 7 + 2 * n for n in range(ROWS)])


def test_several_outputs_have_their_names_and_types(df: DataFrame) -> None:
    def model(parts: Mapping[str, Any]) -> Any:
        x = parts["x"]
        return {"p": x[:, 0], "top": np.argsort(x, axis=1), "word": [f"{n:g}" for n in x[:, 0]]}

    scored = predict(df, model, {"x": ["a", "s.y"]}, output=["word", "p", "top"])
    types = {field.name: field.dataType.simpleString() for field in scored.schema}
    assert [types[name] for name in ("word", "p", "top")] == ["string", "double", "array<bigint>"]
    assert values(scored, "word", "p", "top")[10] == ("1", 1.0, [0, 1])
    given = predict(df, model, {"x": ["a", "s.y"]}, output={"p": "float", "top": "array<int>"})
    assert given.schema["top"].dataType.simpleString() == "array<int>"
    assert values(given, "p", "top")[10] == (1.0, [0, 1])


def test_given_types_run_nothing_before_the_rows_are_used(df: DataFrame) -> None:
    def model(parts: Mapping[str, Any]) -> Any:
        raise ValueError("no rows yet")

    scored = predict(df, model, {"x": ["a"]}, output={"p": "float"})
    with pytest.raises(Exception, match="no rows yet"):
        scored.collect()
    with pytest.raises(PredictionError, match="no rows yet"):
        predict(df, model, {"x": ["a"]}, output="p")


def test_a_torch_module_computes_what_it_computes_here(df: DataFrame) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(2, 8), torch.nn.Dropout(), torch.nn.Linear(8, 3)
            )

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    net = Net()
    scored = predict(df, net, {"x": ["a", "s.y"]}, output="p")
    assert scored.schema["p"].dataType.simpleString() == "array<float>"
    x = torch.tensor([[n / 10, n * 3.0] for n in range(ROWS)])
    with torch.no_grad():
        expected = net.eval()(x).numpy()
    np.testing.assert_allclose(values(scored, "p"), expected, rtol=1e-4, atol=1e-4)


def test_inputs_are_passed_by_name_where_the_module_has_them(df: DataFrame) -> None:
    torch = pytest.importorskip("torch")

    class Difference(torch.nn.Module):  # type: ignore[misc]
        def forward(self, first: Any, second: Any) -> Any:
            return first - second

    by_name = predict(df, Difference(), {"second": "a", "first": "s.y"}, output="p")
    in_order = predict(df, Difference(), {"u": "a", "v": "s.y"}, output="p")
    assert values(by_name, "p")[10] == 29.0
    assert values(in_order, "p")[10] == -29.0
    with pytest.raises(PredictionError, match=r"'second' .*'first': .* first, second\."):
        predict(df, Difference(), {"second": "a", "v": "s.y"}, output="p")


@on_classic_spark
def test_torchscript_and_exported_programs(df: DataFrame) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 1)
    x = torch.tensor([[n / 10, n * 3.0] for n in range(ROWS)])
    expected = net(x).detach().numpy()[:, 0]
    rows = torch.export.Dim("rows", min=1)
    exported = torch.export.export(net, (x,), dynamic_shapes=({0: rows},))
    for model in (torch.jit.trace(net, x), exported):
        scored = predict(df, model, {"x": ["a", "s.y"]}, output="p", batch_size=300)
        np.testing.assert_allclose(values(scored, "p"), expected, rtol=1e-5)


@on_classic_spark
def test_a_lightning_module_predicts_by_its_predict_step(df: DataFrame) -> None:
    torch = pytest.importorskip("torch")
    lightning = pytest.importorskip("lightning.pytorch")

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def predict_step(self, batch: Any, index: int) -> Any:
            return batch[:, 0] * 2

    assert values(predict(df, Net(), {"x": ["a"]}, output="p"), "p")[10] == 2.0


@on_classic_spark
def test_a_keras_model_computes_what_it_computes_here(df: DataFrame) -> None:
    keras = pytest.importorskip("keras")

    class Double(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs * 2

    left, right = keras.Input((2,), name="left"), keras.Input((1,), name="right")
    joined = keras.layers.Concatenate()([Double()(left), right])
    model = keras.Model([left, right], keras.layers.Dense(1)(joined))
    columns = {"right": ["a"], "left": ["a", "s.y"]}
    scored = predict(df.coalesce(1), model, columns, output="p")
    rows = np.array([[n / 10, n * 3.0] for n in range(ROWS)], np.float32)
    expected = model.predict({"left": rows, "right": rows[:, :1]}, verbose=0)[:, 0]
    np.testing.assert_allclose(values(scored, "p"), expected, rtol=1e-4, atol=1e-3)


def saved(state: Any, folder: Path) -> Checkpoint:
    """A checkpoint with a state, as a run saves it."""
    from horovod_runner import HorovodRunner, save_checkpoint

    def main() -> None:
        save_checkpoint(state, 1)

    runner = HorovodRunner(np=-1, checkpoint_dir=folder, progress=False, gpus_per_rank=0)
    runner.run(main)
    assert runner.last_run is not None
    assert runner.last_run.best_checkpoint is not None
    return runner.last_run.best_checkpoint


def test_a_checkpoint_scores_with_the_network_that_build_returns(
    df: DataFrame, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(1, 1)
    weights = {f"module.{name}": value for name, value in net.state_dict().items()}
    checkpoint = saved({"net": weights, "epoch": 3}, tmp_path)
    scored = predict(df, checkpoint, {"x": ["a"]}, "p", build=lambda: torch.nn.Linear(1, 1))
    expected = net(torch.tensor([[n / 10] for n in range(ROWS)])).detach().numpy()[:, 0]
    np.testing.assert_allclose(values(scored, "p"), expected, rtol=1e-5)
    with pytest.raises(TypeError, match=r"^Checkpoint\(.* weights, .*build=Net$"):
        predict(df, checkpoint, {"x": ["a"]}, "p")
    text = r"^Checkpoint\(.* weights .*Linear, .*state\['net'\] has also weight bias\."
    with pytest.raises(Exception, match=text):
        predict(df, checkpoint, {"x": ["a"]}, "p", build=lambda: torch.nn.Linear(1, 1, bias=False))


def picture(number: int) -> bytes:
    return encoded(np.full((6, 8, 3), number, np.uint8))


def columns_of_all_types(spark: SparkSession) -> DataFrame:
    """A column of each type that training takes, with nulls where a value may replace them."""
    from pyspark.ml.linalg import Vectors

    numbers = spark.range(20).selectExpr(
        "id",
        "id % 2 = 0 AS flag",
        "IF(id % 5 = 0, NULL, CAST(id AS int)) AS some",
        "id / 3 AS number",
        "CAST(id AS decimal(10,2)) / 4 AS money",
        "date_add(date'2024-01-01', CAST(id AS int)) AS day",
        "timestamp_micros(id) AS time",
        "concat('row ', id) AS text",
        "array(CAST(id AS float), CAST(id + 1 AS float)) AS vector",
        "slice(sequence(0, 20), 1, CAST(id AS int)) AS ragged",
    )
    others = [
        (
            n,
            Vectors.dense([n, 1.0]) if n % 2 else Vectors.sparse(2, [0], [n]),
            bytearray(picture(n)),
        )
        for n in range(20)
    ]
    return numbers.join(spark.createDataFrame(others, ["id", "ml", "photo"]), "id")


def described(parts: Mapping[str, Any]) -> list[str]:
    """Each row of a batch as text, with types and shapes."""
    count = len(parts["id"])
    return [
        "; ".join(
            f"{name} {getattr(part[row], 'dtype', '')} {np.asarray(part[row]).tolist()}"
            for name, part in parts.items()
        )
        for row in range(count)
    ]


def test_rows_become_what_training_gets(spark: SparkSession) -> None:
    """The inputs of each column type are equal to the batches of a rank."""
    from pyspark.sql import functions as f

    df = columns_of_all_types(spark)
    options: dict[str, Any] = {
        "images": {"photo": Image(3, 4)},
        "pad_ragged": {"ragged": (-1, 5)},
    }
    scored = predict(df, described, output="p", fill_null={"some": -1}, **options)
    got = dict(values(scored.select("id", "p"), "id", "p"))

    from horovod_runner import HorovodRunner

    def main(data: Any) -> list[str]:
        feed = data.batches(20, **options)
        return [row for batch in feed for row in described(batch)]

    filled = df.withColumn("some", f.coalesce("some", f.lit(-1)))
    trained = HorovodRunner(np=-1, progress=False, gpus_per_rank=0).run(main, data=filled)
    assert sorted(got.values()) == sorted(trained)


def test_the_value_of_a_key_that_a_row_lacks_is_filled_or_left_out(spark: SparkSession) -> None:
    rows = spark.range(4).selectExpr(
        "id", "map(IF(id = 2, 'b', 'a'), CAST(id AS double)) AS m", "1 AS two", "2 AS two"
    )

    def same(parts: Any) -> Any:
        return parts["m.a"]

    options: dict[str, Any] = {"columns": ["m.a"], "output": {"p": "double"}, "keep": ["id"]}
    filled = predict(rows, same, fill_null={"m.a": -1.0}, **options)
    assert values(filled, "id", "p") == [(0, 0.0), (1, 1.0), (2, -1.0), (3, 3.0)]
    left_out = predict(rows, same, on_error="null", **options)
    assert values(left_out, "id", "p") == [(0, 0.0), (1, 1.0), (2, None), (3, 3.0)]
    with pytest.raises(DataError, match=r"'two'.*keep="):
        predict(rows, same, **{**options, "keep": None})


def test_rows_that_cannot_be_scored_are_null_and_counted(spark: SparkSession) -> None:
    from pyspark.sql import Observation

    rows = [
        (0, 1.0, picture(0)),
        (1, None, picture(1)),
        (2, 3.0, b"no picture"),
        (3, 4.0, picture(3)),
    ]
    df = spark.createDataFrame(
        [(n, a, bytearray(photo)) for n, a, photo in rows], "id long, a double, photo binary"
    ).coalesce(1)
    observation = Observation("scored")

    def model(parts: Mapping[str, Any]) -> Any:
        return parts["a"] + parts["photo"].mean(axis=(1, 2, 3))

    scored = predict(
        df,
        model,
        ["a", "photo"],
        "p",
        images={"photo": Image(2, 2)},
        on_error="null",
        error_column="why",
        observation=observation,
    )
    found = values(scored, "p", "why")
    assert [p for p, _ in found] == [1.0, None, None, 7.0]
    assert found[1][1] == "row 1: 'a' is null"
    assert "not a complete image" in found[2][1]
    assert found[0][1] is None
    assert observation.get == {"rows": 4, "bad_rows": 2}
    strict = predict(df, model, ["a", "photo"], {"p": "double"}, images={"photo": Image(2, 2)})
    with pytest.raises(Exception, match=r"rows 0 to 3 \(columns a, photo\): .*'a' .*nulls"):
        strict.collect()


def test_empty_and_tiny_partitions(spark: SparkSession) -> None:
    df = spark.range(0, 3, 1, 1).repartition(8)
    scored = predict(df, lambda parts: parts["id"] * 2, ["id"], "p")
    assert values(scored, "p") == [0, 2, 4]
    nothing = predict(df.filter("id > 5"), lambda parts: parts["id"] * 2, ["id"], "p")
    assert nothing.columns == ["id", "p"]
    assert nothing.collect() == []
    with pytest.raises(DataError, match=r"empty, .*output=\{'p': 'float'\}"):
        predict(spark.createDataFrame([], "t string"), lambda parts: parts["t"], ["t"], "p")


def test_a_stream_is_scored(spark: SparkSession, tmp_path: Path) -> None:
    source, sink = str(tmp_path / "in"), str(tmp_path / "out")
    spark.range(0, 10).write.parquet(source)
    stream = spark.readStream.schema("id long").parquet(source)
    scored = predict(stream, lambda parts: parts["id"] * 2, ["id"], "p")
    query = (
        scored.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "state"))
        .trigger(availableNow=True)
        .start(sink)
    )
    query.awaitTermination()
    assert values(spark.read.parquet(sink), "p") == [2 * n for n in range(10)]


def test_a_filter_on_an_output_computes_it_once(spark: SparkSession, tmp_path: Path) -> None:
    if spark.version < "4.1":
        pytest.skip("whole rows are mapped, which Spark never repeats")
    calls = str(tmp_path / "calls")

    def model(parts: Mapping[str, Any]) -> Any:
        with open(calls, "a") as file:
            file.write("call\n")
        return parts["id"]

    df = spark.range(0, 10, 1, 1)
    scored = predict(df, model, ["id"], {"p": "bigint"}).filter("p >= 5")
    assert len(scored.collect()) == 5
    assert Path(calls).read_text() == "call\n"


@pytest.mark.places("connect", "cluster")  # what they refuse, or have to send
def test_a_large_model_reaches_the_executors(df: DataFrame) -> None:
    """Too large for the function: it goes as a file."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(1, 300_000, bias=False)
    summed = torch.nn.Sequential(net, torch.nn.AdaptiveAvgPool1d(1))
    scored = predict(df, summed, {"x": ["a"]}, "p", batch_size=50)
    mean = float(net.weight.detach().double().mean())
    np.testing.assert_allclose(
        values(scored, "p"), [n / 10 * mean for n in range(ROWS)], rtol=1e-2, atol=1e-4
    )


@pytest.mark.places("spark")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"columns": ["nope"]}, DataError, "column 'nope': .* id, a, "),
        ({"output": "a"}, DataError, "column 'a'.*output='a_2'"),
        ({"output": {"p": "map<int,int>"}}, ValueError, "'map<int,int>'"),
        ({"batch_size": 0}, ValueError, "^batch_size .* 1 .* 0$"),
        ({"on_error": "ignore"}, ValueError, "^on_error .*'raise' .*'null', .*'ignore'$"),
        ({"error_column": "why"}, ValueError, "^error_column .*on_error='null'$"),
        ({"fill_null": {"nope": 0}}, DataError, "^fill_null .*'nope'"),
        ({"fill_null": {"a": "x"}}, DataError, "^fill_null .*'x' .*column 'a'"),
        ({"build": list}, TypeError, "^build .*checkpoint"),
        ({"model": 3}, TypeError, "^predict .*model, .* 3:"),
        ({"model": dict}, TypeError, "^predict .*model, .*'dict'>:"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    df: DataFrame, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        predict(df, **{"model": total, "columns": {"x": ["a"]}, "output": "p", **arguments})


@pytest.mark.places("spark")
def test_a_model_that_cannot_be_sent_is_named(df: DataFrame) -> None:
    lock = threading.Lock()

    def model(parts: Mapping[str, Any]) -> Any:
        return parts, lock

    with pytest.raises(SerializationError, match=r"model \(function\) .*_thread\.lock"):
        predict(df, model, {"x": ["a"]}, "p")
