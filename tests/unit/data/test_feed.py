"""Feeds: the parts of a batch, the length of an epoch, and resuming in the middle of one."""

from __future__ import annotations

import os
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

from horovod_runner.data import Image, parquet, stores
from horovod_runner.data.feed import feed as feeds
from horovod_runner.data.shard import Shard
from horovod_runner.data.sources import source_of
from horovod_runner.errors import DataError
from horovod_runner.worker.profiling.clock import clock
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
def shard() -> Shard:
    return shard_of(TABLE)


def test_a_batch_has_the_parts_that_columns_names(shard: Shard) -> None:
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
def test_columns_side_by_side_have_the_given_order(names: list[str]) -> None:
    rows = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}  # packed into one matrix
    (batch,) = shard_of(pa.table(rows)).batches(2, {"x": names, "all": ["a", "b", "c"]})
    assert batch["x"].T.tolist() == [rows[name] for name in names]


def test_without_columns_a_batch_has_all_columns(shard: Shard) -> None:
    batch = next(iter(shard.batches(3)))
    assert list(batch) == [
        "a", "b", "label", "v", "text", "data", "ragged", "point.x", "point.y",
    ]  # fmt: skip
    assert list(next(iter(shard.batches(3, ["label", "text"])))) == ["label", "text"]
    assert (shard.rows, repr(shard)[:30]) == (100, "Shard(train: 100 rows of a, b,")


def test_pad_ragged_fills_up_short_rows(shard: Shard) -> None:
    batch = next(iter(shard.batches(3, ["ragged"], pad_ragged={"ragged": -1})))
    assert batch["ragged"].tolist() == [[-1, -1], [1, -1], [2, 2]]
    batch = next(iter(shard.batches(4, ["ragged"], pad_ragged={"ragged": (-1, 2)})))
    assert batch["ragged"].tolist() == [[-1, -1], [1, -1], [2, 2], [3, 3]]
    options: Any = {"pad_ragged": {"ragged": 0.5}, "dtypes": {"ragged": "float32"}}
    batch = next(iter(shard.batches(3, ["ragged"], **options)))
    assert batch["ragged"].dtype == np.float32
    assert batch["ragged"].tolist() == [[0.5, 0.5], [1, 0.5], [2, 2]]


@pytest.mark.parametrize(
    ("dtypes", "types"),
    [
        (None, ["float64", "float32", "int64", "int64"]),
        ({"x": "float32"}, ["float32", "float32", "int64", "int64"]),
        ("float32", ["float32"] * 4),
    ],
)
def test_numbers_keep_their_types_unless_dtypes_converts_them(
    shard: Shard, dtypes: Any, types: list[str]
) -> None:
    columns = {"x": ["a", "label"], "a": "a", "n": "label", "ragged": "ragged", "text": "text"}
    batch = next(iter(shard.batches(3, columns, dtypes=dtypes)))
    assert [*(batch[name].dtype for name in "xan"), batch["ragged"][2].dtype] == types
    assert batch["text"][2] == "row 2"


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    last_batch=st.sampled_from(["pad", "drop"]),
    shuffle=st.booleans(),
    chunk=st.sampled_from([1, 200, 1 << 22]),
)
def test_every_row_comes_once_and_all_ranks_have_the_same_number_of_batches(
    sizes: tuple[int, int], last_batch: Any, shuffle: bool, chunk: int
) -> None:
    size, batch_size = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeds, "_CHUNK_BYTES", chunk)  # no option: users have no use for it
        shard = shard_of(TABLE)
        seen, lengths = [], set()
        for rank in range(size):
            as_rank(patch, rank, size)
            if last_batch == "drop" and batch_size * size > ROWS:
                message = (
                    f"train .* {ROWS} rows.* {size} ranks .* {batch_size * size}: last_batch='drop'"
                )
                with pytest.raises(DataError, match=message):
                    shard.batches(batch_size, ["label"], shuffle=shuffle, last_batch=last_batch)
                return
            feed = shard.batches(batch_size, ["label"], shuffle=shuffle, last_batch=last_batch)
            steps = 0
            for batch in feed:
                assert len(batch["label"]) == batch_size
                seen += batch["label"][: feed.real].tolist()
                steps += 1
            assert steps == len(feed)
            lengths.add(steps)
    assert len(lengths) == 1
    whole = ROWS if last_batch == "pad" else ROWS // (batch_size * size) * batch_size * size
    assert len(seen) == len(set(seen)) == whole


def epoch(feed: Any) -> list[list[int]]:
    return [batch["label"].tolist() for batch in feed]


def test_a_saved_feed_resumes_with_any_number_of_ranks(
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


def test_a_feed_that_is_saved_at_the_last_batch_of_an_epoch_resumes_with_the_next_epoch(
    shard: Shard,
) -> None:
    feed = shard.batches(12, ["label"], shuffle=True, seed=5)
    for _ in feed:
        state = feed.state_dict()
    assert (state["epoch"], state["step"]) == (1, 0)
    resumed = shard.batches(12, ["label"], shuffle=True, seed=5)
    resumed.load_state_dict(state)
    assert epoch(resumed) == epoch(feed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 11}, "global_batch .* 11 .* 12 "),
        ({"seed": 6}, "seed .* 6 .* 5 "),
        ({"last_batch": "drop"}, "last_batch .*'drop'.*'pad'"),
    ],
)
def test_the_state_of_another_feed_is_refused(
    shard: Shard, options: dict[str, Any], message: str
) -> None:
    same: dict[str, Any] = {"batch_size": 12, "seed": 5}
    state = shard.batches(**same).state_dict()
    with pytest.raises(DataError, match=message):
        shard.batches(**{**same, **options}).load_state_dict(state)
    other = shard_of(TABLE.set_column(0, "a", pa.array(np.ones(ROWS, np.float32))))
    with pytest.raises(DataError, match=r"data .*'\w+'.*'\w+'"):
        other.batches(**same).load_state_dict(state)
    with pytest.raises(DataError, match=r"lacks data, epoch, .*state_dict\(\)"):
        shard.batches(**same).load_state_dict({"weights": 1})
    with pytest.raises(DataError, match=r"step 1000 .* 9 steps"):
        shard.batches(**same).load_state_dict({**state, "step": 1000})


def test_an_epoch_that_is_left_early_counts_as_an_epoch(shard: Shard) -> None:
    feed = shard.batches(10, ["label"], shuffle=True)
    whole = [epoch(feed) for _ in range(2)]
    feed = shard_of(TABLE).batches(10, ["label"], shuffle=True)
    for batch in feed:
        assert batch["label"].tolist() == whole[0][0]
        break
    assert epoch(feed) == whole[1]


def test_transform_runs_in_the_thread_that_prepares_batches(shard: Shard) -> None:
    threads = set()

    def double(batch: dict[str, Any]) -> Any:
        threads.add(threading.current_thread().name)
        return batch["label"] * 2

    assert [b.tolist() for b in shard.batches(50, ["label"], transform=double)] == [
        list(range(0, 100, 2)),
        list(range(100, 200, 2)),
    ]
    assert threads == {"horovod_runner-feed"}


@pytest.mark.parametrize(
    ("columns", "options", "numbers"),
    [
        ({"x": ["a", "b"], "y": "label"}, {}, 3 * 41 * 2),
        (["ragged"], {}, 0 + 1 + 2),
        (["ragged"], {"pad_ragged": {"ragged": 0}}, 3 * 41 * 3),
        (["label"], {"transform": lambda batch: batch["label"][:5]}, 3 * 5),
    ],
    ids=["uniform", "ragged", "padded", "transformed"],
)
def test_the_profile_counts_the_numbers_of_the_batches_that_are_handed_over(
    shard: Shard, columns: Any, options: dict[str, Any], numbers: int
) -> None:
    before = clock.batches, clock.cells
    feed = shard.batches(41, columns, **options)
    next(iter(feed))
    assert clock.batches == before[0] + 1
    before = clock.batches, clock.cells
    assert len(list(feed)) == 3
    assert (clock.batches - before[0], clock.cells - before[1]) == (3, numbers)


def test_leaving_an_iteration_ends_its_thread(shard: Shard) -> None:
    batches = iter(shard.batches(1, ["label"]))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name == "horovod_runner-feed"]


def test_a_pandas_dataframe_is_a_dataset_and_other_arguments_are_not() -> None:
    shard = shard_of(pd.DataFrame({"x": [1.5, 2.5]}, index=[7, 8]))
    assert (shard.rows, shard.columns) == (2, ["x"])
    for other in (None, 1, "text", [1], {"x": 1}, np.ones(3), object()):
        assert source_of(other) is None


LONG = pa.table({"n": [f"row {n}" for n in range(20_000)]})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LONG.slice(0, 10_000), LONG.slice(10_000)),
        (LONG.to_pandas().iloc[:10_000], LONG.to_pandas().iloc[10_000:]),
        (pa.table({"n": [*range(20_000), 0]}), pa.table({"n": [*range(20_000), 1]})),
        tuple(pa.table({"n": pa.array(texts).dictionary_encode()}) for texts in ("aba", "cdc")),
    ],
    ids=["slices", "slices of pandas", "the last row", "categories"],
)
def test_tables_with_other_values_are_other_datasets(first: Any, second: Any) -> None:
    for table in (first, second):
        (batch,) = shard_of(table).batches(len(table))
        assert list(batch["n"]) == list(pa.table(table)["n"].to_pylist())


def test_files_that_look_alike_are_other_datasets(tmp_path: Path) -> None:
    values = {"train": 1, "valid": 2}
    for name, value in values.items():
        path = tmp_path / name / "0.parquet"
        path.parent.mkdir()
        pq.write_table(pa.table({"n": [value]}), path)
        os.utime(path, (0, 0))
    for name, value in values.items():
        reader = parquet(str(tmp_path / name)).prepare(name, None)
        (batch,) = Shard(name, reader).batches(1)
        assert batch["n"].tolist() == [value]


def test_padding_has_the_weight_0(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        feed = shard.batches(8, ["label"], sample_weights=True)
        for batch in feed:
            assert list(batch) == ["label", "weight"]
            assert batch["weight"].tolist() == [1.0] * feed.real + [0.0] * (8 - feed.real)
            weights.append(batch["weight"].sum())
    assert sum(weights) == ROWS


def test_columns_may_have_any_names() -> None:
    names = ["a/b", "..", "c d", "é" * 200, "x.y", "x"]
    shard = shard_of(pa.table({name: [f"{name} 1", f"{name} 2"] for name in names}))
    (batch,) = shard.batches(2)
    assert batch == {name: [f"{name} 1", f"{name} 2"] for name in names}


def test_long_packing_reports_its_progress(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.batches(3, ["a"])
    assert capsys.readouterr().out == ""
    # No argument: users would find it in the signature of Shard.
    monkeypatch.setattr(stores, "_PROGRESS_SECONDS", 0)
    shard.batches(3, ["b"])
    assert capsys.readouterr().out.startswith("train: 1 of 1 parts packed on ")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"columns": {"x": "nowhere"}}, DataError, "'nowhere'.* a, b, label"),
        ({"columns": {"x": ["a", "text"]}}, DataError, "part 'x'.*'text'"),
        ({"columns": ["a"], "pad_ragged": {"b": 0}}, DataError, "pad_ragged .*'b'.* a$"),
        ({"columns": ["a"], "dtypes": {"b": "int8"}}, DataError, "dtypes names 'b'"),
        ({"columns": {"a", "b"}}, TypeError, "^columns .*list.* {"),
        ({"columns": "label"}, TypeError, "^columns .*list.* 'label'"),
        ({"columns": [3]}, TypeError, r"^columns .*list.* \[3\]"),
        ({"columns": {"x": {"a", "b"}}}, TypeError, r"columns=\{'x': ...\} .*list"),
        ({"columns": []}, ValueError, "columns is empty"),
        ({"columns": {}}, ValueError, "columns is empty"),
        ({"columns": {"x": []}}, ValueError, r"columns=\{'x': ...\} is empty"),
        ({"pad_ragged": 0}, TypeError, "pad_ragged .* 0$"),
        ({"pad_ragged": {"ragged": 0.5}}, DataError, "{'ragged': 0.5} .*int64"),
        ({"pad_ragged": {"ragged": float("nan")}}, DataError, "{'ragged': nan} .*int64"),
        ({"pad_ragged": {"ragged": [0, 5]}}, DataError, r"{'ragged': \[0, 5\]} .*int64"),
        ({"dtypes": {"text": "float32"}}, DataError, "dtypes .*'text'.*numbers"),
        ({"dtypes": {"a": "float99"}}, TypeError, "dtypes .*NumPy.*'float99'"),
        ({"images": {"nope": Image(2, 2)}}, DataError, "'nope'.*images"),
        ({"batch_size": 2.5}, TypeError, r"batch_size .* 2\.5"),
        ({"batch_size": 0}, ValueError, "batch_size .* 1 .* 0$"),
        ({"batch_size": None}, TypeError, "batch_size .* None .*global_batch .* None$"),
        ({"global_batch": 8}, TypeError, "batch_size .* 8 .*global_batch .* 8$"),
        ({"global_batch": 0}, ValueError, "global_batch .* 1 .* 0$"),
        ({"global_batch": 1.5}, TypeError, r"global_batch .* 1\.5"),
        ({"last_batch": "short"}, ValueError, "last_batch='short' .*global_batch"),
        ({"last_batch": "keep"}, ValueError, r"last_batch .*'pad', 'drop'.*'short'.*'keep'"),
    ],
)
def test_arguments_that_are_wrong_or_do_not_fit_the_columns_are_refused(
    shard: Shard, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        shard.batches(**{"batch_size": 8, **options})


def test_sample_weights_do_not_replace_a_column_called_weight() -> None:
    shard = shard_of(pd.DataFrame({"weight": [7.0, 8.0]}))
    with pytest.raises(DataError, match=r"sample_weights=True.*'weight'.*columns="):
        shard.batches(2, sample_weights=True)
    [batch] = shard.batches(2, {"importance": "weight"}, sample_weights=True)
    assert (batch["importance"].tolist(), batch["weight"].tolist()) == ([7, 8], [1, 1])


def test_a_shard_outside_main_is_refused() -> None:
    with pytest.raises(DataError, match=r"train .*Shard.* main\b"):
        Shard("train").batches(8)
    assert repr(Shard("train")) == "Shard(train)"  # for a debugger, or the last line of a cell


def test_a_pandas_dataframe_with_objects_is_refused() -> None:
    with pytest.raises(DataError, match=r"^train: .*'odd' of the pandas.*Arrow"):
        shard_of(pd.DataFrame({"odd": [object(), object()]}))


LISTS = pa.table(
    {
        "boxes": pa.array(
            [[[1.0, 2.0]], [], [[3.0, 4.0], [5.0]]], pa.list_(pa.list_(pa.float64()))
        ),
        "words": [["a"], [], ["b", "c"]],
        "grid": pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int64()))),
    }
)


def test_lists_of_lists_are_padded_at_every_level() -> None:
    train = shard_of(LISTS)
    [batch] = train.batches(3, ["boxes"], pad_ragged={"boxes": -1})
    assert batch["boxes"].tolist() == [
        [[1, 2], [-1, -1]],
        [[-1, -1], [-1, -1]],
        [[3, 4], [5, -1]],
    ]
    [batch] = train.batches(3, ["boxes"], pad_ragged={"boxes": (0, (1, 3))}, dtypes="float32")
    assert batch["boxes"].dtype == "float32"
    assert batch["boxes"].tolist() == [[[1, 2, 0]], [[0, 0, 0]], [[3, 4, 0]]]
    with pytest.raises(DataError, match=r"'boxes', which has lists in 2 levels: .*\(8, 8\)"):
        train.batches(3, ["boxes"], pad_ragged={"boxes": (0, 4)})
    with pytest.raises(DataError, match=r"'words', whose lists hold text.*transform="):
        train.batches(3, ["words"], pad_ragged={"words": 0})


def test_columns_that_nobody_asks_for_are_not_looked_at(tmp_path: Path) -> None:
    odd = LISTS.append_column("none", pa.nulls(3)).append_column("x", pa.array([1, 2, 3]))
    pq.write_table(odd.select(["words", "x", "none"]), tmp_path / "0.parquet")
    for data in (odd, parquet(str(tmp_path / "0.parquet"))):
        train = shard_of(data)
        [batch] = train.batches(3, ["x"])
        assert batch["x"].tolist() == [1, 2, 3]
        with pytest.raises(DataError, match=r"^train: .*'none'.*Without columns= all"):
            train.batches(3)


def test_an_error_during_packing_names_the_dataset(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, None], "v": [[1.0], None]}), tmp_path / "0.parquet")
    train = shard_of(parquet(str(tmp_path)))
    with pytest.raises(DataError, match=r"^train: .*'a'.*nulls \(1 .*fill_null={'a': 0}"):
        train.batches(1, ["a"])
    with pytest.raises(DataError, match=r"^train: .*'v'.*nulls") as caught:
        train.batches(1, ["v"])
    assert "fill_null" not in str(caught.value)


def test_feeds_that_are_made_anew_go_on_with_the_next_epoch(shard: Shard) -> None:
    once = shard.batches(10, ["label"], shuffle=True, seed=7)
    orders = [epoch(once) for _ in range(4)]
    assert len({str(order) for order in orders}) == 4
    anew = shard_of(TABLE)
    for number, order in enumerate(orders):
        feed = anew.batches(10, ["label"], shuffle=True, seed=7)
        assert feed.state_dict()["epoch"] == number
        assert epoch(feed) == order
    # Feeds with other columns count by themselves.
    assert epoch(anew.batches(10, {"label": "label"}, shuffle=True, seed=7)) == orders[0]


def test_an_iteration_that_is_left_early_is_an_epoch_of_feeds_made_anew(shard: Shard) -> None:
    firsts = [next(iter(shard.batches(10, ["label"], shuffle=True)))["label"] for _ in range(3)]
    assert len({first.tobytes() for first in firsts}) == 3
    assert shard.batches(10, ["label"], shuffle=True).state_dict()["epoch"] == 3


def test_a_feed_that_lags_behind_another_turns_no_epochs_back(shard: Shard) -> None:
    once = shard.batches(10, ["label"], shuffle=True)
    orders = [epoch(once) for _ in range(3)]
    here = shard_of(TABLE)
    ahead, behind = (here.batches(10, ["label"], shuffle=True) for _ in range(2))
    assert [epoch(ahead), epoch(ahead), epoch(behind)] == [orders[0], orders[1], orders[0]]
    assert epoch(here.batches(10, ["label"], shuffle=True)) == orders[2]


def test_feeds_made_anew_go_on_after_a_loaded_state(shard: Shard) -> None:
    once = shard.batches(10, ["label"], shuffle=True)
    epoch(once)
    state = once.state_dict()
    orders = [epoch(once) for _ in range(3)]
    resumed = shard_of(TABLE)
    for number, order in enumerate(orders):
        feed = resumed.batches(10, ["label"], shuffle=True)
        if number == 0:
            feed.load_state_dict(state)
        assert epoch(feed) == order


def test_a_state_that_is_loaded_twice_is_reported_once(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = shard.batches(10, ["label"], shuffle=True).state_dict()
    for rank in (1, 0):
        as_rank(monkeypatch, rank, 2)
        here = shard_of(TABLE)
        for _ in range(3):
            feed = here.batches(5, ["label"], shuffle=True)
            feed.load_state_dict(state)
            epoch(feed)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("HorovodRunner: a feed of train begins with epoch 0, step 0 for the")
    assert "Load a state once, before the loop over epochs" in lines[0]
