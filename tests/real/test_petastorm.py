"""Datasets that Petastorm has written, read without Petastorm and with it."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from horovod_runner.data import Image, petastorm
from horovod_runner.errors import DataError
from tests.places import Sessions
from tests.shards import as_rank, shard_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("petastorm", exc_type=ImportError)
pytest.importorskip("cv2", exc_type=ImportError)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS = 200


def row(number: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    return {
        "id": number,
        "small": number % 200,
        "name": f"row {number}",
        "price": Decimal(number) / 4,
        "maybe": None if number % 3 == 0 else float(number),
        "vector": random.normal(size=7).astype(np.float32),
        "matrix": random.normal(size=(3, 4)),
        "sequence": np.arange(number % 5, dtype=np.int16),
        "png": random.integers(0, 255, (6, 5, 3), dtype=np.uint8),
        "jpeg": np.full((8, 8, 3), number, np.uint8),
        "depth": random.integers(0, 60000, (5, 6)).astype(np.uint16),
        "photo": np.full((4 + number % 2, 4, 3), number, np.uint8),
    }


@pytest.fixture(scope="module")
def url(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> str:
    from petastorm.codecs import (
        CompressedImageCodec,
        CompressedNdarrayCodec,
        NdarrayCodec,
        ScalarCodec,
    )
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql import types

    schema = Unischema(
        "Rows",
        [
            UnischemaField("id", np.int64, (), ScalarCodec(types.LongType()), False),
            UnischemaField("small", np.uint8, (), ScalarCodec(types.IntegerType()), False),
            UnischemaField("name", np.str_, (), ScalarCodec(types.StringType()), False),
            UnischemaField("price", Decimal, (), ScalarCodec(types.DecimalType(10, 2)), False),
            UnischemaField("maybe", np.float64, (), ScalarCodec(types.DoubleType()), True),
            UnischemaField("vector", np.float32, (7,), NdarrayCodec(), False),
            UnischemaField("matrix", np.float64, (3, 4), CompressedNdarrayCodec(), False),
            UnischemaField("sequence", np.int16, (None,), NdarrayCodec(), False),
            UnischemaField("png", np.uint8, (6, 5, 3), CompressedImageCodec("png"), False),
            UnischemaField("jpeg", np.uint8, (8, 8, 3), CompressedImageCodec("jpeg", 95), False),
            UnischemaField("depth", np.uint16, (5, 6), CompressedImageCodec("png"), False),
            UnischemaField("photo", np.uint8, (None, None, 3), CompressedImageCodec("png"), False),
        ],
    )
    spark = sessions.get("spark")
    folder_url = f"file://{tmp_path_factory.mktemp('petastorm')}/rows"
    with materialize_dataset(spark, folder_url, schema, row_group_size_mb=1):
        rows = spark.sparkContext.parallelize(range(ROWS), 3).map(row)
        encoded = rows.map(lambda values: dict_to_spark_row(schema, values))
        frame = spark.createDataFrame(encoded, schema.as_spark_schema())
        frame.write.option("parquet.block.size", 20_000).parquet(folder_url)
    return folder_url


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))


def test_every_codec_is_read_without_petastorm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "petastorm", None)
    shard = shard_of(petastorm(url, fill_null={"maybe": -1.0}))
    seen = 0
    for batch in shard.batches(32, images={"photo": Image(4, 4)}, shuffle=True, last_batch="pad"):
        for place, number in enumerate(batch["id"]):
            for name, value in row(int(number)).items():
                read = batch[name][place]
                if name == "maybe":
                    assert read == (-1 if value is None else value)
                elif name in {"jpeg", "photo"}:
                    assert np.abs(read.astype(int) - int(number)).max() <= 2
                else:
                    assert np.array_equal(read, value), name
                if isinstance(value, np.ndarray):
                    assert read.dtype == value.dtype
            seen += 1
    assert seen == 224  # seven batches
    assert batch["small"].dtype == np.uint8


def test_columns_and_filter_are_applied(url: str) -> None:
    shard = shard_of(petastorm(url, columns=["id", "vector"], filter=[("id", "<", 50)]))
    assert (shard.columns, shard.rows) == (["id", "vector"], 50)
    with pytest.raises(DataError, match="it has no rows: check its path and filter"):
        shard_of(petastorm(url, filter=[("id", "<", 0)]))


def test_with_a_predicate_all_ranks_have_the_same_number_of_batches(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from petastorm.predicates import in_lambda

    source = petastorm(
        url,
        columns=["id", "name", "vector", "sequence", "png"],
        predicate=in_lambda(["id"], lambda number: number % 10 == 3 or number < 40),
    )
    shard = shard_of(source)
    wanted = [n for n in range(ROWS) if n % 10 == 3 or n < 40]
    seen: Counter[int] = Counter()
    steps = set()
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        feed = shard.batches(8, shuffle=True)
        steps.add(sum(1 for _ in feed))
        for batch in feed:
            for place in range(feed.real):
                number = int(batch["id"][place])
                seen[number] += 1
                for name in ("name", "vector", "sequence", "png"):
                    assert np.array_equal(batch[name][place], row(number)[name])
    assert steps == {3}
    assert seen == Counter(wanted)


def test_columns_of_an_ngram_are_named_by_their_distance_in_time(url: str) -> None:
    from petastorm.etl.dataset_metadata import get_schema_from_dataset_url
    from petastorm.ngram import NGram

    schema = get_schema_from_dataset_url(url)
    fields = {0: [schema.id, schema.vector], 1: [schema.id], 2: [schema.id, schema.small]}
    shard = shard_of(petastorm(url, ngram=NGram(fields, 10, schema.id)))
    assert set(shard.columns) == {"0.id", "0.vector", "1.id", "2.id", "2.small"}
    feed = shard.batches(16, {"ids": ["0.id", "1.id", "2.id"], "v": "0.vector"}, last_batch="drop")
    for batch in feed:
        first = batch["ids"][:, 0]
        assert batch["ids"].tolist() == [[n, n + 1, n + 2] for n in first]
        assert np.array_equal(batch["v"], [row(int(n))["vector"] for n in first])
    assert len(feed) >= 5


def test_a_transform_spec_is_applied(url: str) -> None:
    from petastorm.transform import TransformSpec

    def double(values: dict[str, Any]) -> dict[str, Any]:
        values["id"] = values["id"] * 2
        return values

    source = petastorm(url, columns=["id", "small"], transform_spec=TransformSpec(double))
    feed = shard_of(source).batches(50, ["id"])
    assert sorted(n for batch in feed for n in batch["id"]) == list(range(0, 2 * ROWS, 2))


@pytest.mark.parametrize(
    ("accept", "message"),
    [
        (lambda number: int("one"), "Petastorm .*: invalid literal for int"),
        (lambda number: number < 0, "no rows .*predicate"),
    ],
)
def test_a_predicate_that_fails_or_accepts_no_row_is_reported(
    url: str, accept: Any, message: str
) -> None:
    from petastorm.predicates import in_lambda

    with pytest.raises(DataError, match=message):
        petastorm(url, predicate=in_lambda(["id"], accept)).prepare("train", None)


def test_a_dataset_of_make_spark_converter_is_read(spark: SparkSession, tmp_path: Path) -> None:
    from petastorm.spark import SparkDatasetConverter, make_spark_converter

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{tmp_path}/cache")
    frame = spark.range(100).selectExpr("id", "array(id, id + 1) AS pair", "CAST(id AS double) x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converter = make_spark_converter(frame)
    try:
        shard = shard_of(petastorm(converter))
        assert shard.rows == 100
        for batch in shard.batches(25, shuffle=True):
            assert batch["pair"].tolist() == [[n, n + 1] for n in batch["id"]]
            assert batch["x"].dtype == np.float32  # Petastorm's converter does that
    finally:
        converter.delete()


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^filter .*predicate, ngram .*transform_spec"):
        petastorm("file:///x", predicate=object(), filter=[("a", "<", 1)])
    with pytest.raises(ValueError, match=r"ngram .*columns"):
        petastorm("file:///x", ngram=object(), columns=["a"])
    with pytest.raises(ValueError, match=r"^fill_null .*transform_spec"):
        petastorm("file:///x", predicate=object(), fill_null={"a": 1})


def test_a_folder_without_a_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^train: .*Parquet .*{tmp_path}"):
        petastorm(f"file://{tmp_path}").prepare("train", None)
