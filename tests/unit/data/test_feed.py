"""Batches: what they hold, how long an epoch is, and how one goes on in the middle."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.data import Image, parquet
from horovod_runner.data import feed as feeds
from horovod_runner.data import shard as shards
from horovod_runner.data.shard import Shard
from horovod_runner.data.sources import source_of
from horovod_runner.errors import DataError
from tests.shards import as_rank, shard_of

ROWS = 100
TABLE = pa.table(
    {
        "a": np.arange(ROWS, dtype=np.float32),
        "b": np.arange(ROWS, dtype=np.float32) * 2,
        "label": np.arange(ROWS),
        "v": [[n, n] for n in range(ROWS)],
        "text": [f"row {n}" for n in range(ROWS)],
        "data": [b"%d" % n for n in range(ROWS)],
        "ragged": [[n] * (n % 4) for n in range(ROWS)],
        "point": [{"x": n, "y": -n} for n in range(ROWS)],
    }
)


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))
    return shard_of(TABLE)


def test_a_batch_holds_what_was_asked_for(shard: Shard) -> None:
    columns = {
        "x": ["b", "a"],
        "y": "label",
        "mixed": ["a", "label", "v"],
        "xy": "point",
        "words": "text",
        "blob": "data",
        "lists": "ragged",
    }
    for batch in shard.batches(7, columns, shuffle=True):
        label = batch["y"]
        assert list(batch) == list(columns)
        assert batch["x"].dtype == np.float32
        assert batch["x"].tolist() == [[2 * n, n] for n in label]
        assert batch["mixed"].tolist() == [[n, n, n, n] for n in label]
        assert batch["xy"].tolist() == [[n, -n] for n in label]
        assert batch["words"] == [f"row {n}" for n in label]
        assert batch["blob"] == [b"%d" % n for n in label]
        assert [list(row) for row in batch["lists"]] == [[n] * (n % 4) for n in label]


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a", "b"], ["a", "c"], ["c", "a"], ["b", "b"]])
def test_columns_side_by_side_are_those_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))
    rows = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}  # packed into one matrix
    (batch,) = shard_of(pa.table(rows)).batches(2, {"x": names, "all": ["a", "b", "c"]})
    assert batch["x"].T.tolist() == [rows[name] for name in names]


def test_all_columns_come_by_their_names(shard: Shard) -> None:
    batch = next(iter(shard.batches(3)))
    assert list(batch) == [
        "a", "b", "label", "v", "text", "data", "ragged", "point.x", "point.y",
    ]  # fmt: skip
    assert list(next(iter(shard.batches(3, ["label", "text"])))) == ["label", "text"]
    assert (shard.rows, repr(shard)[:30]) == (100, "Shard(train: 100 rows of a, b,")


def test_ragged_rows_are_filled_up_where_it_is_said_with_what(shard: Shard) -> None:
    batch = next(iter(shard.batches(3, ["ragged"], pad={"ragged": -1})))
    assert batch["ragged"].tolist() == [[-1, -1], [1, -1], [2, 2]]
    batch = next(iter(shard.batches(4, ["ragged"], pad={"ragged": (-1, 2)})))
    assert batch["ragged"].tolist() == [[-1, -1], [1, -1], [2, 2], [3, 3]]


def test_types_are_turned_where_it_is_asked_for(shard: Shard) -> None:
    columns = {"x": ["a", "label"], "y": "label", "text": "text"}
    batch = next(iter(shard.batches(3, columns)))
    assert [batch["x"].dtype, batch["y"].dtype] == ["float64", "int64"]
    batch = next(iter(shard.batches(3, columns, dtypes={"x": "float32"})))
    assert [batch["x"].dtype, batch["y"].dtype] == ["float32", "int64"]
    batch = next(iter(shard.batches(3, columns, dtypes="float32")))
    assert [batch["x"].dtype, batch["y"].dtype] == ["float32", "float32"]


@pytest.mark.parametrize(
    ("columns", "options", "told"),
    [
        ({"x": "nowhere"}, {}, "there is no column 'nowhere': there are a, b"),
        ({"x": ["a", "text"]}, {}, "'x' cannot hold 'text' beside others"),
        (["a"], {"pad": {"b": 0}}, "pad names 'b'; the parts are a"),
        (["a"], {"dtypes": {"b": "int8"}}, "dtypes names 'b'"),
    ],
)
def test_what_cannot_be_asked_for_is_told(
    shard: Shard, columns: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        shard.batches(3, columns, **options)


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    last=st.sampled_from(["pad", "drop"]),
    shuffle=st.booleans(),
    chunk=st.sampled_from([1, 200, 1 << 22]),
)
def test_every_row_comes_once_over_all_ranks_which_have_as_many_batches(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tuple[int, int],
    last: Any,
    shuffle: bool,
    chunk: int,
) -> None:
    size, batch_size = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setattr(feeds, "_CHUNK_BYTES", chunk)
        shard = shard_of(TABLE)
        seen, lengths = [], set()
        for rank in range(size):
            as_rank(patch, rank, size)
            if last == "drop" and batch_size * size > ROWS:
                with pytest.raises(DataError, match="last='drop' leaves none"):
                    shard.batches(batch_size, ["label"], shuffle=shuffle, last=last)
                return
            feed = shard.batches(batch_size, ["label"], shuffle=shuffle, last=last)
            steps = 0
            for batch in feed:
                assert len(batch["label"]) == batch_size
                seen += batch["label"][: feed.real].tolist()
                steps += 1
            assert steps == len(feed)
            lengths.add(steps)
    assert len(lengths) == 1
    whole = ROWS if last == "pad" else ROWS // (batch_size * size) * batch_size * size
    assert len(seen) == len(set(seen)) == whole


def epoch(feed: Any) -> list[list[int]]:
    return [batch["label"].tolist() for batch in feed]


def test_a_feed_goes_on_where_another_one_was_with_any_number_of_ranks(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 0, 1)
    first = shard.batches(12, ["label"], shuffle=True, seed=5)
    epoch(first)
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    assert (state["epoch"], state["step"]) == (1, 2)
    rest = [batch["label"].tolist() for batch in batches]
    parts = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        feed = shard.batches(4, ["label"], shuffle=True, seed=5)
        feed.load_state_dict(state)
        parts.append(epoch(feed))
        assert feed.state_dict() == {**state, "epoch": 2, "step": 0}
    assert [a + b + c for a, b, c in zip(*parts, strict=True)] == rest


@pytest.mark.parametrize(
    ("batch_size", "options", "told"),
    [
        (11, {"seed": 5}, "global_batch is 11 here and was 12 there"),
        (12, {"seed": 6}, "seed is 6 here and was 5 there"),
        (12, {"seed": 5, "last": "drop"}, "last is 'drop' here and was 'pad' there"),
    ],
)
def test_a_state_of_another_feed_is_refused(
    shard: Shard, batch_size: int, options: dict[str, Any], told: str
) -> None:
    state = shard.batches(12, ["label"], seed=5).state_dict()
    with pytest.raises(DataError, match=told):
        shard.batches(batch_size, ["label"], **options).load_state_dict(state)


def test_a_state_of_other_data_is_refused(shard: Shard) -> None:
    state = shard.batches(12).state_dict()
    other = shard_of(TABLE.set_column(0, "a", pa.array(np.ones(ROWS, np.float32))))
    with pytest.raises(DataError, match=r"data is '.*' here and was '.*' there"):
        other.batches(12).load_state_dict(state)


def test_an_epoch_that_is_left_early_counts_as_one(shard: Shard) -> None:
    feed = shard.batches(10, ["label"], shuffle=True)
    whole = [epoch(feed) for _ in range(2)]
    feed = shard.batches(10, ["label"], shuffle=True)
    for batch in feed:
        assert batch["label"].tolist() == whole[0][0]
        break
    assert epoch(feed) == whole[1]


def test_batches_are_transformed_in_the_thread_beside(shard: Shard) -> None:
    threads = set()

    def double(batch: dict[str, Any]) -> Any:
        threads.add(threading.current_thread().name)
        return batch["label"] * 2

    assert [b.tolist() for b in shard.batches(50, ["label"], transform=double)] == [
        list(range(0, 100, 2)),
        list(range(100, 200, 2)),
    ]
    assert threads == {"horovod_runner-feed"}


def test_what_a_transform_raises_is_raised_here(shard: Shard) -> None:
    def fail(batch: dict[str, Any]) -> Any:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        list(shard.batches(50, ["label"], transform=fail))


def test_no_thread_is_left_of_an_iteration_that_was_left(shard: Shard) -> None:
    batches = iter(shard.batches(1, ["label"]))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name == "horovod_runner-feed"]


def test_pandas_tables_are_datasets_and_other_arguments_are_not() -> None:
    shard = shard_of(pd.DataFrame({"x": [1.5, 2.5]}, index=[7, 8]))
    assert (shard.rows, shard.columns) == (2, ["x"])
    for other in (None, 1, "text", [1], {"x": 1}, np.ones(3), object()):
        assert source_of(other) is None


def test_a_dataset_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="train: it has no rows"):
        shard_of(TABLE[:0])


def test_padding_has_no_weight(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        feed = shard.batches(8, ["label"], weights=True)
        for batch in feed:
            assert list(batch) == ["label", "weight"]
            assert batch["weight"].tolist() == [1.0] * feed.real + [0.0] * (8 - feed.real)
            weights.append(batch["weight"].sum())
    assert sum(weights) == ROWS


def test_a_value_that_is_none_of_the_options_is_refused(shard: Shard) -> None:
    with pytest.raises(ValueError, match="batch_size must be 1 or more, not 0"):
        shard.batches(0)
    with pytest.raises(ValueError, match="last must be 'pad' or 'drop', not 'keep'"):
        shard.batches(4, last="keep")  # type: ignore[arg-type]


def test_columns_may_have_any_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))
    names = ["a/b", "..", "c d", "é" * 200, "x.y"]
    shard = shard_of(pa.table({name: [f"{name} 1", f"{name} 2"] for name in names}))
    (batch,) = shard.batches(2)
    assert batch == {name: [f"{name} 1", f"{name} 2"] for name in names}


def test_packing_that_takes_long_tells_where_it_is(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.batches(3, ["a"])
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(shards, "_TELL_SECONDS", 0)
    shard.batches(3, ["b"])
    assert capsys.readouterr().out.startswith("train: 1 of 1 parts packed on ")


def test_a_column_may_be_called_like_the_field_of_a_struct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))
    shard = shard_of(pd.DataFrame({"a.b": [10, 20], "a": [1, 2]}))
    [batch] = shard.batches(2, ["a", "a.b"])
    assert (batch["a"].tolist(), batch["a.b"].tolist()) == ([1, 2], [10, 20])


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"columns": {"a", "b"}}, TypeError, "columns takes a list of names of columns, not {"),
        ({"columns": "label"}, TypeError, "columns takes a list of names of columns, not 'label'"),
        ({"columns": [3]}, TypeError, r"not \[3\]"),
        ({"columns": {"x": {"a", "b"}}}, TypeError, r"columns=\{'x': ...\} takes a list of names"),
        ({"columns": []}, ValueError, "columns names no column"),
        ({"columns": {}}, ValueError, "columns names no column"),
        ({"columns": {"x": []}}, ValueError, r"columns=\{'x': ...\} names no column"),
        ({"pad": 0}, TypeError, "pad takes a number for each part"),
        ({"pad": {"ragged": 0.5}}, DataError, "pad={'ragged': 0.5} does not fit int64"),
        ({"pad": {"ragged": float("nan")}}, DataError, "does not fit int64"),
        ({"pad": {"ragged": [0, 5]}}, DataError, r"pad={'ragged': \[0, 5\]} does not fit int64"),
        ({"dtypes": {"text": "float32"}}, DataError, "dtypes names 'text', which is text"),
        ({"dtypes": {"a": "float99"}}, TypeError, "types of NumPy's, as 'float32', not 'float99'"),
        ({"images": {"nope": Image(2, 2)}}, DataError, "column 'nope' holds no images"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be a whole number, not 2.5"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(
    shard: Shard, options: dict[str, Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        shard.batches(**{"batch_size": 8, **options})


def test_one_type_for_all_leaves_text_and_turns_ragged_lists(shard: Shard) -> None:
    batch = next(iter(shard.batches(8, ["text", "ragged", "label"], dtypes="float32")))
    assert isinstance(batch["text"][0], str)
    assert {row.dtype.name for row in batch["ragged"]} == {"float32"}
    assert batch["label"].dtype == np.float32


def test_weights_do_not_take_the_place_of_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))
    shard = shard_of(pd.DataFrame({"weight": [7.0, 8.0]}))
    with pytest.raises(DataError, match="call yours otherwise"):
        shard.batches(2, weights=True)
    [batch] = shard.batches(2, {"own": "weight"}, weights=True)
    assert (batch["own"].tolist(), batch["weight"].tolist()) == ([7, 8], [1, 1])


def test_what_is_no_state_is_refused(shard: Shard) -> None:
    batches = shard.batches(8, ["label"])
    with pytest.raises(DataError, match="no state of a feed: it lacks data, epoch"):
        batches.load_state_dict({"weights": 1})
    with pytest.raises(DataError, match="step 1000 of an epoch of 13 steps"):
        batches.load_state_dict({**batches.state_dict(), "step": 1000})


def test_a_shard_that_left_its_run_says_so() -> None:
    with pytest.raises(DataError, match=r"train is one rank's part .* inside main alone"):
        Shard("train").batches(8)


def test_what_pandas_cannot_give_is_told() -> None:
    with pytest.raises(DataError, match="the pandas DataFrame cannot be turned into columns"):
        shard_of(pd.DataFrame({"odd": [object(), object()]}))


def test_nulls_that_packing_meets_are_told_with_the_datasets_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, None], "v": [[1.0], None]}), tmp_path / "0.parquet")
    train = shard_of(parquet(str(tmp_path)))
    with pytest.raises(DataError, match=r"^train: column 'a' has nulls \(1 .* fill={'a': 0}"):
        train.batches(1, ["a"])
    with pytest.raises(DataError, match=r"^train: column 'v' has nulls .*Leave those rows out$"):
        train.batches(1, ["v"])


def test_a_batch_that_nothing_fills_is_told_with_how_many_rows_there_are(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 1, 4)
    told = f"train has {shard.rows} rows, and a batch on each of 4 ranks takes 4000: last='drop'"
    with pytest.raises(DataError, match=told):
        shard.batches(1000, last="drop")
