"""Columns of every type from every source, in `run`, `fit` and `predict`.

The table of docs/howto/data.md says what each becomes; the tests compare it with what happens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_runner import DataError, fit, predict
from horovod_runner.data import Image, Shard, parquet
from tests.conftest import Ranks
from tests.pictures import encoded

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

# Without nothing_left: predict's models stay until the process ends.
pytestmark = [pytest.mark.spark, pytest.mark.warm("pyarrow")]

PAGE = Path(__file__).parents[2] / "docs/howto/data.md"
ROWS = 6
MAP = pa.map_(pa.string(), pa.float64())
ITEMS = pa.list_(pa.struct([("price", pa.float64()), ("name", pa.string())]))


# For each column of the table: its Arrow type, and the cell of a row.
COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "number": (pa.float64(), float),
    "whole": (pa.int32(), int),
    "flag": (pa.bool_(), lambda row: row % 2 == 0),
    "nulls": (pa.int64(), lambda row: None if row == 2 else row),
    "price": (pa.decimal128(10, 2), lambda row: Decimal(f"{row}.25")),
    "day": (pa.date32(), lambda row: datetime.date(2024, 1, 1 + row)),
    "moment": (pa.timestamp("us", "UTC"), lambda row: datetime.datetime(2024, 1, 1, row)),
    "name": (pa.string(), lambda row: f"name {row}"),
    "blob": (pa.binary(), lambda row: bytes([row])),
    "photo": (pa.binary(), lambda row: encoded(np.zeros((3, 3, 3), np.uint8))),
    "vector": (pa.list_(pa.float32()), lambda row: [row, 1, 2]),
    "tokens": (pa.list_(pa.int64()), lambda row: [1] * (row + 1)),
    "grid": (pa.list_(pa.list_(pa.int64())), lambda row: [[row, 1, 2], [3, 4, 5]]),
    "boxes": (pa.list_(pa.list_(pa.float32())), lambda row: [[1, 2, 3, 4]] * row),
    "words": (pa.list_(pa.string()), lambda row: ["a"] * row),
    "point": (
        pa.struct([("x", pa.int64()), ("y", pa.float32())]),
        lambda row: {"x": row, "y": 2.0},
    ),
    "items": (ITEMS, lambda row: [{"price": 1.5, "name": "a"}] * (row + 1)),
    "prefs": (MAP, lambda row: {"age": float(row), "size": 1.0} if row else {"age": 0.0}),
}
ASKED = [
    *("number", "whole", "flag", "nulls", "price", "day", "moment", "name", "blob", "photo"),
    *("vector", "tokens", "tokens, padded", "grid", "boxes", "boxes, padded", "words"),
    *("point.x", "point", "items.price", "items.price, padded", "items.name"),
    *("prefs.age", "prefs.size", "prefs"),
]


def table() -> pa.Table:
    arrays = {}
    for name, (type_, cell) in COLUMNS.items():
        cells = [cell(row) for row in range(ROWS)]
        if pa.types.is_map(type_):
            cells = [list(each.items()) for each in cells]
        arrays[name] = pa.array(cells, type_)
    return pa.table(arrays)


def rows_of(spark: SparkSession, folder: Path) -> DataFrame:
    """The same rows as a DataFrame of one partition."""
    pq.write_table(table(), folder / "0.parquet")
    return spark.read.parquet(str(folder / "0.parquet")).coalesce(1)


def frame() -> pd.DataFrame:
    """The same rows as a user of pandas has them, with a column of which Arrow knows nothing."""
    import pandas as pd

    rows = {name: [cell(row) for row in range(ROWS)] for name, (_, cell) in COLUMNS.items()}
    made = pd.DataFrame({**rows, "odd": [object() for _ in range(ROWS)]})
    made = made.astype({"whole": "int32", "nulls": "Int64"})
    for name in ("vector", "grid", "boxes"):
        dtype = np.int64 if name == "grid" else np.float32
        made[name] = [np.array(cell, dtype) for cell in made[name]]
    return made


def asked_for(asked: str) -> tuple[str, dict[str, Any]]:
    """A column, and the other arguments of a feed."""
    name, _, how = asked.partition(", ")
    options: dict[str, Any] = {"pad_ragged": {name: 0}} if how else {}
    if name == "photo":
        options["images"] = {name: Image(2, 2)}
    return name, options


def described(values: Any) -> str:
    """What a part of a batch is, in few words; the number of rows is left out."""
    if isinstance(values, np.ndarray):
        return f"{values.dtype} {values.shape[1:]}" if values.ndim > 1 else str(values.dtype)
    if isinstance(values[0], np.ndarray):
        return f"arrays of {values[0].dtype}"
    cell, lists = next(cell for cell in values if cell), 0
    while isinstance(cell, list):
        cell, lists = cell[0], lists + 1
    kind = {str: "text", bytes: "bytes"}.get(type(cell), "numbers")
    return f"{'lists of ' * lists}{kind}"


def describe(**data: Shard) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for source, shard in data.items():
        found[source] = {}
        for asked in ASKED:
            name, options = asked_for(asked)
            try:
                batch = next(iter(shard.batches(ROWS, [name], **options)))
            except DataError as error:
                assert f"'{name.partition('.')[0]}" in str(error), str(error)  # noqa: PT017
                found[source][asked] = "error"
            else:
                found[source][asked] = described(batch[name])
    return found


def on_the_page() -> dict[str, dict[str, str]]:
    """The table of the page, by source and column."""
    lines = PAGE.read_text().split("<!-- columns -->")[1].strip().splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    head, _, *body = rows
    return {source: {row[0]: row[at] for row in body} for at, source in enumerate(head) if at > 1}


def compare(source: str, found: Mapping[str, str]) -> None:
    stated = on_the_page()[source]
    assert stated == found, "\n".join(
        f"{PAGE.name}: {source}: {name} is {found.get(name)!r}, and the page says {cell!r}"
        for name, cell in stated.items()
        if found.get(name) != cell
    )


@pytest.mark.places("local")
def test_the_table_says_what_columns_of_tables_and_files_become(
    ranks: Ranks, tmp_path: Path
) -> None:
    pq.write_table(table(), tmp_path / "0.parquet")
    data = {"pandas": frame(), "arrow": table(), "files": parquet(str(tmp_path / "0.parquet"))}
    found = ranks.run(1, describe, **data)
    compare("pandas", found["pandas"])
    compare("Arrow, Parquet, Delta", found["arrow"])
    compare("Arrow, Parquet, Delta", found["files"])


@pytest.mark.places("spark", "connect")
def test_the_table_says_what_columns_of_a_dataframe_become_in_a_run_and_in_predict(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.spark is not None
    rows = rows_of(ranks.spark, tmp_path)
    # With columns that Spark cannot send to Python, of no type, and of the same name.
    odd = rows.selectExpr("*", "make_interval(1) AS odd", "NULL AS none", "1 AS two", "2 AS two")
    found = ranks.run(1, describe, data=odd)["data"]
    compare("Spark DataFrame", found)
    # The same in predict, whose model says what it gets.
    assert predicted(rows, [asked for asked in ASKED if found[asked] != "error"]) == {
        asked: said for asked, said in found.items() if said != "error"
    }
    for asked in (asked for asked in ASKED if found[asked] == "error"):
        with pytest.raises(Exception, match=f"'{asked}' (has nulls|is a map)"):  # Spark's, or ours
            predicted(rows, [asked])


def options_of(names: list[str], *, by_column: bool = False) -> dict[str, dict[str, Any]]:
    """The arguments for several columns; padding is named by the part of a batch, or by column."""
    options: dict[str, dict[str, Any]] = {"pad_ragged": {}, "images": {}}
    for asked in names:
        for option, values in asked_for(asked)[1].items():
            is_of_part = option == "pad_ragged" and not by_column
            options[option] |= {asked: 0} if is_of_part else values
    return options


def predicted(rows: DataFrame, asked: list[str]) -> dict[str, str]:
    """What the model of `predict` gets for some columns of the table."""
    columns = {each: asked_for(each)[0] for each in asked}
    options: dict[str, Any] = options_of(asked)
    scored = predict(rows, say, columns, {"p": "string"}, keep=[], batch_size=ROWS, **options)
    said: dict[str, str] = json.loads(scored.first()["p"])
    return said


def say(parts: Mapping[str, Any]) -> Any:
    text = json.dumps({name: described(values) for name, values in parts.items()})
    return np.array([text] * len(next(iter(parts.values()))), object)


def net(folder: Path, asked: list[str]) -> Any:
    """A network of torch that writes down what it gets, in training and in prediction."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, *parts: Any) -> torch.Tensor:
            said = {
                name: described(as_arrays(values))
                for name, values in zip(asked, parts, strict=True)
            }
            (folder / f"{'fit' if self.training else 'predict'}.json").write_text(json.dumps(said))
            return self.weight.expand(len(parts[0]))

    return Net()


def as_arrays(values: Any) -> Any:
    """A tensor as an array, and what holds tensors as what holds arrays."""
    if isinstance(values, list):
        return [as_arrays(each) for each in values]
    return values.cpu().numpy() if hasattr(values, "cpu") else values


def fitted(data: Any, folder: Path, asked: list[str], **options: Any) -> Any:
    """Train a network on some columns of the table."""
    x = {each: asked_for(each)[0] for each in asked}
    return fit(
        net(folder, asked),
        data,
        x=x,
        y="number",
        loss=mean_square,
        optimizer=descent,
        global_batch=ROWS,
        ranks=1,
        **options_of(asked),
        **options,
    )


def mean_square(output: Any, label: Any) -> Any:
    return (output - label).square().mean()


def descent(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, 0.1)


def compare_fitted(data: Any, folder: Path, scored: Any = None, **options: Any) -> None:
    """Compare with the page what `fit`, and `predict` of what it returns, give a network."""
    stated = on_the_page()["fit, PyTorch"]
    expected = {asked: cell for asked, cell in stated.items() if cell != "error"}
    result = fitted(data, folder, list(expected), **options)
    assert json.loads((folder / "fit.json").read_text()) == expected
    scored = result.predict(data if scored is None else scored)
    _ = scored.collect() if hasattr(scored, "collect") else scored
    assert json.loads((folder / "predict.json").read_text()) == expected
    for asked in stated.keys() - expected.keys():
        with pytest.raises(DataError, match=f"'{asked}"):
            fitted(data, folder, [asked], **options)


@pytest.mark.horovod
@pytest.mark.parametrize("kind", ["pandas", "arrow", "files"])
def test_the_table_says_what_columns_of_tables_and_files_become_in_fit(
    kind: str, tmp_path: Path
) -> None:
    if kind == "pandas":
        compare_fitted(frame(), tmp_path, where="local")
        return
    pq.write_table(table(), tmp_path / "0.parquet")
    data = table() if kind == "arrow" else parquet(str(tmp_path / "0.parquet"))
    compare_fitted(data, tmp_path, scored=table(), where="local")


@pytest.mark.horovod
@pytest.mark.places("spark", "connect")
def test_the_table_says_what_columns_of_a_dataframe_become_in_fit(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.spark is not None
    rows = rows_of(ranks.spark, tmp_path)
    compare_fitted(rows, tmp_path, where="spark")


@pytest.mark.horovod
@pytest.mark.places("spark")
def test_an_estimator_and_its_model_get_what_fit_gets(ranks: Ranks, tmp_path: Path) -> None:
    from horovod_runner.ml.torch import TorchEstimator

    assert ranks.spark is not None
    rows = rows_of(ranks.spark, tmp_path)
    stated = on_the_page()["fit, PyTorch"]
    expected = {asked: cell for asked, cell in stated.items() if cell != "error"}
    padded = [asked for asked in expected if asked.endswith(", padded")]
    for names in (sorted(expected.keys() - padded), padded):
        model = TorchEstimator(
            np=1,
            model=net(tmp_path, names),
            loss=mean_square,
            optimizer=descent,
            feature_cols=[asked_for(asked)[0] for asked in names],
            labelCol="number",
            batch_size=ROWS,
            **options_of(names, by_column=True),
        ).fit(rows)
        wanted = {asked: expected[asked] for asked in names}
        assert json.loads((tmp_path / "fit.json").read_text()) == wanted
        model.transform(rows).collect()
        assert json.loads((tmp_path / "predict.json").read_text()) == wanted


def test_predict_says_that_files_are_read_first(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Read files first: spark\.read\.parquet"):
        predict(parquet(str(tmp_path)), say, ["number"], {"p": "string"})
