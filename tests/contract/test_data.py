"""Datasets as arguments of a run, with every launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_runner import DataError, RankFailedError, log_to_driver
from horovod_runner.common.spark_session import with_fixed_files
from horovod_runner.data import Shard, evaluate, packed, parquet, petastorm
from tests.conftest import Ranks, own_files
from tests.programs import Program

if TYPE_CHECKING:
    import pandas as pd

pytestmark = [
    pytest.mark.spark,
    pytest.mark.warm("pyarrow"),
    pytest.mark.usefixtures("nothing_left"),
]

ROWS = 1003


def frame_of(values: Any, **options: Any) -> pd.DataFrame:
    import pandas as pd  # not at the top: the ranks import this module too

    return pd.DataFrame(values, **options)


def table(rows: int = ROWS) -> pd.DataFrame:
    return frame_of(
        {
            "a": np.arange(rows, dtype=np.float32),
            "b": np.arange(rows, dtype=np.float32) * 2,
            "label": np.arange(rows),
            "text": [f"row {number}" for number in range(rows)],
        }
    )


def dataset(ranks: Ranks, frame: pd.DataFrame, parts: int = 3) -> Any:
    """A dataset with these rows: a Spark DataFrame, or a pandas DataFrame without Spark."""
    if ranks.spark is None:
        return frame
    return ranks.spark.createDataFrame(frame).repartition(parts)


def log_labels(train: Shard, **options: Any) -> int:
    """Log the labels of two epochs, one line per batch, and return the steps of an epoch."""
    rank = os.environ["HOROVOD_RANK"]
    feed = train.batches(columns={"x": ["a", "b"], "y": "label", "text": "text"}, **options)
    for epoch in range(2):
        for step, batch in enumerate(feed):
            real = feed.real
            assert batch["x"][:, 1].tolist() == [2 * a for a in batch["x"][:, 0]]
            assert batch["text"] == [f"row {number}" for number in batch["y"]]
            labels = ",".join(str(label) for label in batch["y"][:real])
            log_to_driver(f"{epoch} {step} {rank} {labels}")
    return len(feed)


def labels_by_step(text: str) -> dict[tuple[int, int], list[int]]:
    """The global batches by epoch and step, from the lines that the ranks logged."""
    lines = sorted(
        (int(epoch), int(step), int(rank), [int(label) for label in labels.split(",") if label])
        for epoch, step, rank, labels in (
            line.split(" ") for line in text.splitlines() if line[:1].isdigit()
        )
    )
    batches: dict[tuple[int, int], list[int]] = {}
    for epoch, step, _, labels in lines:
        batches.setdefault((epoch, step), []).extend(labels)
    return batches


@pytest.mark.places("local", "spark", "cluster", "connect")
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_comes_once_an_epoch_and_ranks_have_the_same_number_of_batches(
    ranks: Ranks, shuffle: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ranks.run(3, log_labels, train=dataset(ranks, table()), batch_size=32, shuffle=shuffle)
    batches = labels_by_step(capsys.readouterr().out)
    assert len(batches) == 2 * steps
    orders: list[list[int]] = [[], []]
    for (epoch, _), labels in sorted(batches.items()):
        orders[epoch] += labels
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(ROWS))
    assert (orders[0] == orders[1]) != shuffle


def test_files_give_the_same_global_batches_to_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in range(3):
        whole = pa.Table.from_pandas(table().iloc[part::3])
        pq.write_table(whole, tmp_path / f"{part}.parquet", row_group_size=100)
    by_size = []
    train, options = parquet(str(tmp_path)), {"shuffle": True, "seed": 3}
    for size in (1, 2, 4):
        ranks.run(size, log_labels, train=train, batch_size=64 // size, **options)
        by_size.append(labels_by_step(capsys.readouterr().out))
    assert by_size[0] == by_size[1] == by_size[2]
    assert len(by_size[0]) == 2 * 16


def test_a_run_may_have_several_datasets(ranks: Ranks) -> None:
    def main(train: Shard, valid: Shard, scale: float) -> Any:
        return train.rows, valid.rows, valid.columns, scale

    valid = pa.table({"x": [1.0, 2.0]})
    result = ranks.run(2, main, train=dataset(ranks, table()), valid=valid, scale=0.5)
    assert result == (ROWS, 2, ["x"], 0.5)


@pytest.mark.places("spark", "cluster", "connect")
def test_a_run_may_have_two_dataframes(ranks: Ranks) -> None:
    assert ranks.spark is not None

    def main(train: Shard, valid: Shard) -> Any:
        feeds = [
            valid.batches(3, ["x"], last_batch="drop"),
            train.batches(10, ["label"], last_batch="drop"),
        ]
        return train.rows, valid.rows, [len(feed) for feed in feeds]

    valid = ranks.spark.createDataFrame([(float(n),) for n in range(12)], "x double")
    *rows, steps = ranks.run(2, main, train=dataset(ranks, table(100)), valid=valid)
    assert rows == [100, 12]
    # Spark spreads rows evenly only up to a few.
    assert steps[0] in {1, 2}
    assert steps[1] in {4, 5}


@pytest.mark.places("local", "spark", "cluster", "connect")
def test_there_may_be_fewer_rows_than_ranks_and_empty_partitions(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ranks.run(4, log_labels, train=dataset(ranks, table(2), 6), batch_size=4)
    assert steps == 1
    batches = labels_by_step(capsys.readouterr().out)
    assert [sorted(labels) for labels in batches.values()] == [[0, 1], [0, 1]]


def test_a_dataset_without_rows_fails_the_run(ranks: Ranks) -> None:
    some = dataset(ranks, table(4))
    none = some.query("label > 9") if ranks.spark is None else some.where("label > 9")
    with pytest.raises(DataError, match=r"train: .*no rows"):
        ranks.run(2, log_labels, train=none, batch_size=4)


@pytest.mark.places("spark", "connect")
def test_spark_types_become_arrays(ranks: Ranks) -> None:
    assert ranks.spark is not None
    from pyspark.ml.linalg import Vectors

    frame = ranks.spark.range(6).selectExpr(
        "CAST(id AS int) AS n",
        "date_add(date'1970-01-01', CAST(id AS int)) AS day",
        "timestamp_micros(id) AS at",
        "CAST(id AS decimal(10,2)) / 4 AS price",
        "id % 2 = 0 AS flag",
        "array(CAST(id AS float), CAST(1 AS float)) AS fixed",
        "sequence(0L, id) AS ragged",
        "named_struct('x', CAST(id AS double), 'y', CAST(-id AS double)) AS point",
        "CAST(CAST(id AS string) AS binary) AS blob",
    )
    vectors = ranks.spark.createDataFrame(
        [(Vectors.dense([1.0, 2.0, 3.0]),), (Vectors.sparse(3, [2], [4.0]),)], ["features"]
    )

    def main(train: Shard, vectors: Shard) -> Any:
        batch = next(iter(train.batches(6, pad_ragged={"ragged": -1})))
        order = np.argsort(batch["n"])
        arrays = {name: np.asarray(values)[order] for name, values in batch.items()}
        features = next(iter(vectors.batches(2)))["features"]
        return (
            {name: (str(v.dtype), v[2].tolist()) for name, v in arrays.items()},
            sorted(features.tolist()),
        )

    arrays, features = ranks.run(1, main, train=frame, vectors=vectors)
    assert arrays == {
        "n": ("int32", 2),
        "day": ("int32", 2),
        "at": ("int64", 2),
        "price": ("float64", 0.5),
        "flag": ("bool", True),
        "fixed": ("float32", [2.0, 1.0]),
        "ragged": ("int64", [0, 1, 2, -1, -1, -1]),
        "point.x": ("float64", 2.0),
        "point.y": ("float64", -2.0),
        "blob": ("|S1", b"2"),
    }
    assert features == [[0.0, 0.0, 4.0], [1.0, 2.0, 3.0]]


# For each mistake: an Arrow table or columns of pandas that have it, a Spark query, and the error.
MAPS = pa.table({"what": pa.array([[("k", 1)], []] * 2, pa.map_(pa.string(), pa.int64()))})
NULLS = pa.table({"what": [1.0, 2.0, None, 3.0]})
MISTAKES: dict[str, tuple[Any, str, str]] = {
    "map": (MAPS, "map('k', 1) AS what", "'what' is a map"),
    "key": (MAPS, "map('j', 1) AS what", r"'what\.k' has nulls"),
    "null": (NULLS, "IF(id = 2, NULL, id) AS what", "'what' has nulls"),
    "names": (["what", "what"], "id what", "two columns .*'what'"),
}


def asks(train: Shard, columns: list[str]) -> list[int]:
    """The good rows, and then what a rank is refused."""
    good = [int(row) for batch in train.batches(1, ["good"]) for row in batch["good"]]
    log_to_driver(f"good {good}")
    train.batches(1, columns)
    return good


@pytest.mark.places("local", "spark", "connect")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_column_is_refused_only_when_main_asks_for_it(
    ranks: Ranks, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, query, message = MISTAKES[mistake]
    if ranks.spark is not None:
        twice = [query] if mistake == "names" else []
        data = ranks.spark.range(4).selectExpr("id AS good", query, *twice)
    elif isinstance(bad, list):
        data = frame_of([[row, 0, 0] for row in range(4)], columns=["good", *bad])
    else:
        data = bad.append_column("good", pa.array(range(4)))
    with pytest.raises(DataError, match=f"train: .*{message}"):
        ranks.run(1, asks, train=data, columns=["what.k" if mistake == "key" else "what"])
    assert "good [" in capsys.readouterr().out


@pytest.mark.places("local", "spark", "connect")
def test_a_dataset_of_which_nothing_can_be_used_is_refused_before_the_launch(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    data = frame_of([[1, 2]], columns=["a", "a"])
    if ranks.spark is not None:
        data = ranks.spark.range(3).selectExpr("id a", "id a")
    with pytest.raises(DataError, match=r"train: two columns .*'a'"):
        ranks.run(1, asks, train=data, columns=["a"])
    assert "good" not in capsys.readouterr().out


@pytest.mark.places("local", "spark", "connect")
def test_columns_may_have_dots_in_their_names(ranks: Ranks) -> None:
    frame = frame_of({"a.b": [10, 20], "a": [1, 2], "c`d": [5, 6]})
    given = frame if ranks.spark is None else ranks.spark.createDataFrame(frame)

    def main(train: Shard) -> list[list[int]]:
        [batch] = train.batches(2 // int(os.environ["HOROVOD_SIZE"]), last_batch="drop")
        return [batch[name].tolist() for name in ("a.b", "a", "c`d")]

    columns = ranks.run(1, main, train=given)
    assert sorted(zip(*columns, strict=True)) == [(10, 1, 5), (20, 2, 6)]


@pytest.mark.places("spark", "cluster")
def test_with_a_shared_folder_batches_do_not_depend_on_the_number_of_ranks(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks.spark is not None
    # Without a shuffle, after which Spark has rows in another order each time.
    frame = ranks.spark.createDataFrame(table())
    by_size = []
    for size in (1, 4):
        options = {"shared_dir": tmp_path}
        ranks.run(size, log_labels, options, train=frame, batch_size=64 // size, shuffle=True)
        by_size.append(labels_by_step(capsys.readouterr().out))
        assert list(tmp_path.iterdir()) == []
    assert by_size[0] == by_size[1]


def test_a_dataset_larger_than_disk_limit_is_refused(ranks: Ranks) -> None:
    with pytest.raises(DataError, match=r"train: .* [kM]B .*disk_limit"):
        ranks.run(2, log_labels, {"disk_limit": 5000}, train=dataset(ranks, table()), batch_size=8)


def test_rows_that_petastorm_reads_are_spread_evenly(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicates = pytest.importorskip("petastorm.predicates")
    for part in range(5):
        whole = pa.Table.from_pandas(table().iloc[part * 200 : part * 200 + 200])
        pq.write_table(whole, tmp_path / f"{part}.parquet", row_group_size=90)
    odd = predicates.in_lambda(["label"], lambda label: label % 2 == 1)
    train = petastorm(f"file://{tmp_path}", predicate=odd)
    assert ranks.run(3, log_labels, train=train, batch_size=16, shuffle=True) == 11
    batches = labels_by_step(capsys.readouterr().out)
    seen = Counter(label for labels in batches.values() for label in labels)
    assert seen == Counter(list(range(1, 1000, 2)) * 2)


@pytest.mark.horovod
@pytest.mark.places("local")
@pytest.mark.parametrize(
    "framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.xdist_group("tensorflow"))]
)
def test_evaluate_gives_every_rank_the_mean_over_all_rows(ranks: Ranks, framework: str) -> None:
    def main(valid: Shard) -> list[list[float]]:
        columns = {"a": "a", "label": "label"}

        def measure(batch: Any) -> dict[str, Any]:
            return {"label": batch[1], "is_small": batch[0] < 10}

        if framework == "torch":
            import horovod.torch as hvd
            import torch

            hvd.init()
            means = evaluate(valid.to_torch(64, columns, shuffle=True), measure)
            gathered = hvd.allgather(torch.tensor([list(means.values())], dtype=torch.float64))
        else:
            import horovod.tensorflow as hvd
            import tensorflow as tf

            hvd.init()
            means = evaluate(valid.to_tf(64, columns, shuffle=True), measure)
            gathered = hvd.allgather(tf.constant([list(means.values())], tf.float64))
        assert list(means) == ["label", "is_small"]
        return gathered.numpy().tolist()  # type: ignore[no-any-return]

    if framework == "tensorflow":
        ranks.needs_tensorflow()
    options = {"preload_frameworks": [f"horovod.{framework}"]}
    first, second = ranks.run(2, main, options, valid=dataset(ranks, table()))
    assert first == second
    assert first == pytest.approx([(ROWS - 1) / 2, 10 / ROWS])


@pytest.mark.places("local", "spark", "cluster")
def test_the_files_of_a_killed_rank_are_removed(ranks: Ranks) -> None:
    def main(train: Shard) -> None:
        next(iter(train.batches(4)))
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    before = own_files()
    with pytest.raises(RankFailedError) as caught:
        ranks.run(2, main, train=dataset(ranks, table()))
    assert caught.value.exit_code == -signal.SIGKILL
    assert own_files() == before


@pytest.mark.places("local")
def test_the_next_run_removes_the_files_of_a_killed_driver(ranks: Ranks, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import signal, sys
        import pyarrow as pa
        from horovod_runner import HorovodRunner

        def main(train):
            next(iter(train.batches(4)))
            print("packed", flush=True)
            signal.pause()

        HorovodRunner(np=-1).run(main, train=pa.table({"x": list(range(100))}))
    """)
    (tmp_path / "main.py").write_text(script)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "main.py"]
    with Program(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "packed"
        driver.kill()
        driver.wait()
    assert list(tmp_path.glob("horovod_runner-*/*/*/fixed-0"))
    assert list(tmp_path.glob("horovod_runner-*/*-checkpoints"))
    again = script.replace("signal.pause()", "")
    subprocess.run([sys.executable, "-c", again], cwd=tmp_path, env=environment, check=True)
    assert list(tmp_path.glob("horovod_runner-*")) == []


def ids_of(train: Shard) -> list[int]:
    return [number for batch in train.batches(10, ["id"]) for number in batch["id"].tolist()]


@pytest.mark.places("spark")
def test_the_query_of_a_packed_dataframe_is_executed_once_for_several_runs(
    ranks: Ranks, tmp_path: Path
) -> None:
    def leave_a_file(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tempfile.mkstemp(dir=folder)
        yield from batches

    folder = str(tmp_path)
    assert ranks.spark is not None
    dataframe = ranks.spark.range(100, numPartitions=2).mapInArrow(leave_a_file, "id long")
    with packed(dataframe) as rows:
        handles = [ranks.runner(1).start(ids_of, train=rows) for _ in range(2)]
        for handle in handles:
            assert sorted(handle.result()) == list(range(100))
    assert len(list(tmp_path.iterdir())) == 2  # one for each partition
    assert list(Path(tempfile.gettempdir()).glob("*/packed-*")) == []


@pytest.mark.places("spark")
def test_only_a_spark_dataframe_with_rows_can_be_packed(ranks: Ranks) -> None:
    assert ranks.spark is not None
    with pytest.raises(TypeError, match="not pandas"), packed(table()):
        raise AssertionError
    with pytest.raises(DataError, match="no rows"), packed(ranks.spark.range(0)):
        raise AssertionError


@pytest.mark.places("connect")
def test_a_dataframe_of_a_cluster_is_packed_in_a_shared_folder_alone(ranks: Ranks) -> None:
    assert ranks.spark is not None
    with pytest.raises(DataError, match="shared_dir="), packed(ranks.spark.range(10)):
        raise AssertionError


@pytest.mark.places("spark")
def test_a_dataframe_is_planned_once_unless_its_plan_changes_while_it_runs(ranks: Ranks) -> None:
    assert ranks.spark is not None
    # Spark takes the time when it plans a query, as it looks for a table's files then.
    frame = ranks.spark.range(1).selectExpr("current_timestamp() AS moment")
    fixed = with_fixed_files(frame)
    assert fixed.schema == frame.schema
    assert len({row for _ in range(2) for row in fixed.toDF("x").collect()}) == 1
    assert len({row for _ in range(2) for row in frame.toDF("x").collect()}) == 2
    counts = ranks.spark.range(2).groupBy("id").count()
    assert with_fixed_files(counts) is counts
