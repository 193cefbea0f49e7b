"""Feeds with the real frameworks, and on a disk that is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data import Image, Shard, evaluate
from horovod_runner.errors import DataError
from tests.pictures import encoded
from tests.shards import as_rank, shard_of

# This process imports the frameworks, which takes longer than all tests together.
pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("frameworks")]

ROWS = 1000


TABLE = pa.table(
    {
        "a": np.arange(ROWS, dtype=np.float32),
        "b": np.arange(ROWS, dtype=np.float32) * 2,
        "c": np.arange(ROWS, dtype=np.float64) * 3,
        "n": np.arange(ROWS),
        "flag": np.arange(ROWS) % 2 == 0,
        "v": [[n, n + 1, n + 2] for n in range(ROWS)],
        "text": [f"row {n}" for n in range(ROWS)],
        "ragged": [[n] * (n % 4) for n in range(ROWS)],
        "image": [encoded(np.full((4, 5, 3), n % 256, np.uint8)) for n in range(ROWS)],
        "words": [["w"] * (n % 3) for n in range(ROWS)],
        "boxes": [[[n] * (n % 2 + 1)] * (n % 3) for n in range(ROWS)],
    }
)
COLUMNS = {"x": ["a", "b"], "y": "n"}


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))
    return shard_of(TABLE)


def test_torch_gets_tuples_of_tensors(shard: Shard) -> None:
    import torch

    seen = []
    feed = shard.to_torch(64, COLUMNS, shuffle=True, device="cpu")
    for x, y in feed:
        assert (x.dtype, x.shape, y.dtype) == (torch.float32, (64, 2), torch.int64)
        assert torch.equal(x, torch.stack([y, 2 * y], dim=1).float())
        seen += y[: feed.real].tolist()
    assert sorted(seen) == list(range(ROWS))
    assert len(feed) == 16


def test_torch_gets_dicts_for_a_list_of_columns(shard: Shard) -> None:
    feed = shard.to_torch(10, ["flag", "text", "ragged", "v"], device="cpu", sample_weights=True)
    batch = next(iter(feed))
    assert batch["flag"].tolist() == [True, False] * 5
    assert batch["text"][3] == "row 3"
    assert [row.tolist() for row in batch["ragged"]] == [[n] * (n % 4) for n in range(10)]
    assert batch["v"].shape == (10, 3)
    assert batch["weight"].tolist() == [1.0] * 10


def test_a_transform_of_torch_batches_gets_arrays(shard: Shard) -> None:
    import torch

    def halve(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"] / 2, "y": batch["y"]}

    x, y = next(iter(shard.to_torch(8, COLUMNS, transform=halve, device="cpu")))
    assert isinstance(x, torch.Tensor)
    assert x[:, 1].tolist() == y.tolist()


def test_what_a_transform_nests_stays_nested(shard: Shard) -> None:
    import torch

    def nest(batch: dict[str, Any]) -> Any:
        return {"x": batch["x"], "words": ["a"]}, [batch["y"], batch["y"]]

    inputs, labels = next(iter(shard.to_torch(8, COLUMNS, transform=nest, device="cpu")))
    assert isinstance(inputs.pop("x"), torch.Tensor)
    assert inputs == {"words": ["a"]}
    assert [label.tolist() for label in labels] == [list(range(8))] * 2


def test_batches_may_be_changed_in_place(shard: Shard) -> None:
    first = [x.add_(1).sum().item() for x, _ in shard.to_torch(100, COLUMNS, device="cpu")]
    second = [x.add_(1).sum().item() for x, _ in shard.to_torch(100, COLUMNS, device="cpu")]
    assert first == second


def test_work_on_another_stream_waits_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the streams of a GPU; `horovod-runner verify` reads on real ones."""
    import torch

    from horovod_runner.data.feed.torch_feed import CopiedBatches

    calls: list[Any] = []

    class Stream:
        device = torch.device("cpu")

        def record_event(self) -> str:
            return "the copies"

        def wait_event(self, event: str) -> None:
            calls.append((self, event))

    copying, other = Stream(), Stream()
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: calls.append((stream, tensor.item()))
    )
    current = [copying]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    x, y, z = torch.arange(3.0)
    chunk: Any = CopiedBatches([(x, "text"), {"y": [y, z]}], copying)  # type: ignore[arg-type]
    batches = iter(chunk)
    assert next(batches)[1] == "text"
    assert calls == []
    current[0] = other
    assert next(batches) == {"y": [y, z]}
    assert calls == [(other, "the copies"), (other, 1.0), (other, 2.0)]


# With "spawn" each worker imports torch for itself: one is enough.
@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (1, "spawn")])
def test_a_dataloader_gets_single_rows(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, workers: int, start: str | None
) -> None:
    from torch.utils.data import DataLoader

    seen, steps = [], set()
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        rows = shard.to_torch_dataset({"x": ["a", "b"], "y": "n", "text": "text"})
        how: Any = {"num_workers": workers, "multiprocessing_context": start}
        loader: Any = DataLoader(rows, batch_size=50, shuffle=True, **how)
        for x, y, text in loader:
            assert x[:, 1].tolist() == [2 * n for n in y.tolist()]
            assert list(text) == [f"row {n}" for n in y.tolist()]
            seen += y.tolist()
        steps.add(len(loader))
    assert steps == {7}
    assert len(seen) == 1002  # padded to three times 334
    assert set(seen) == set(range(ROWS))


def test_rows_for_a_dataloader_may_be_dicts_and_transformed(shard: Shard) -> None:
    rows = shard.to_torch_dataset(
        ["n", "image"],
        images={"image": Image(4, 5)},
        transform=lambda row: (row["n"].item(), row["image"].shape),
    )
    assert rows[7] == (7, (3, 4, 5))
    assert len(shard.to_torch_dataset(["n"], last_batch="drop")) == ROWS  # type: ignore[arg-type]


def test_what_divides_rows_among_the_ranks_itself_gets_all_of_them(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 1, 3)
    rows: Any = shard.to_torch_dataset(["n"], whole=True)
    assert [row["n"].item() for row in rows.__getitems__(range(ROWS))] == list(range(ROWS))
    with pytest.raises(ValueError, match=r"^last_batch='drop' .*whole=True"):
        shard.to_torch_dataset(["n"], whole=True, last_batch="drop")
    assert shard.rows
    shard._counts = [ROWS]  # as if the hosts shared no folder
    with pytest.raises(DataError, match=r"^train .*whole=True .*shared_dir="):
        shard.to_torch_dataset(["n"], whole=True)


@pytest.mark.parametrize("validation", [0.2, "flag"])
def test_what_divides_rows_itself_gets_only_those_of_its_part(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, validation: Any
) -> None:
    as_rank(monkeypatch, 1, 3)
    seen = []
    for part in shard.split(validation):
        rows_of_rank: Any = part.to_torch_dataset(["n"])
        rows = rows_of_rank.whole()
        assert len(rows) == part.rows
        seen += [row["n"].item() for row in rows.__getitems__(range(part.rows))]
    assert sorted(seen) == list(range(ROWS))


def test_tensorflow_gets_tuples_of_tensors(shard: Shard) -> None:
    import tensorflow as tf

    dataset = shard.to_tf(64, {"x": ["a", "b"], "y": "n", "m": ["a", "c"], "v": "v"}, shuffle=True)
    assert int(dataset.cardinality()) == 16
    seen: list[int] = []
    for x, y, mixed, v in dataset:
        assert (x.dtype, x.shape, y.dtype) == (tf.float32, (64, 2), tf.int64)
        assert x.numpy()[:, 1].tolist() == [2 * n for n in y.numpy()]
        assert mixed.dtype == tf.float32
        assert mixed.numpy()[:, 1].tolist() == [3.0 * n for n in y.numpy()]
        assert v.numpy().tolist() == [[n, n + 1, n + 2] for n in y.numpy()]
        seen += y.numpy().tolist()
    assert set(seen) == set(range(ROWS))


@pytest.mark.parametrize(
    "columns",
    [["n", name] for name in ("flag", "text", "ragged", "image", "words", "boxes")],
    ids="-".join,
)
def test_tensorflow_gets_the_same_batches_as_torch(shard: Shard, columns: list[str]) -> None:
    images = {"image": Image(4, 5, layout="HWC")} if "image" in columns else {}
    options: Any = {"shuffle": True, "seed": 4, "sample_weights": True, "images": images}
    torch_batches = list(shard.to_torch(48, columns, device="cpu", **options))
    tf_batches = list(shard.to_tf(48, columns, **options))
    assert len(torch_batches) == len(tf_batches) == 21
    for by_torch, by_tf in zip(torch_batches, tf_batches, strict=True):
        assert list(by_torch) == list(by_tf) == [*columns, "weight"]
        for name in by_torch:
            assert _plain(by_torch[name]) == _plain(by_tf[name])


def _plain(values: Any) -> Any:
    if isinstance(values, list):
        return [_plain(value) for value in values]
    if isinstance(values, str | int | float | bool):
        return values
    if isinstance(values, bytes):
        return values.decode()
    if hasattr(values, "to_list"):
        return _plain(values.to_list())
    return _plain(values.tolist() if hasattr(values, "tolist") else values.numpy().tolist())


FLOATS = {"c": "c", "x": ["a", "c"], "b": "b", "n": "n", "v": "v", "ragged": "floats"}


def floats() -> Shard:
    ragged = pa.array([[n / 2] * (n % 4) for n in range(ROWS)])
    return shard_of(TABLE.append_column("floats", ragged))


@pytest.mark.usefixtures("shard")
def test_float64_becomes_float32_for_torch() -> None:
    import torch

    shard = floats()
    expected = [torch.float32] * 3 + [torch.int64] * 2
    *parts, ragged = next(iter(shard.to_torch(8, FLOATS, device="cpu")))
    assert [part.dtype for part in parts] == expected
    assert {row.dtype for row in ragged} == {torch.float32}
    *parts, ragged = shard.to_torch_dataset(FLOATS)[5]
    assert [part.dtype for part in parts] == expected
    options: Any = {"dtypes": {"c": "float64", "n": "int8"}, "device": "cpu"}
    c, x, *_, n, _, _ = next(iter(shard.to_torch(8, FLOATS, **options)))
    assert (c.dtype, x.dtype, n.dtype) == (torch.float64, torch.float32, torch.int8)
    assert c.tolist() == [3.0 * row for row in range(8)]


@pytest.mark.usefixtures("shard")
@pytest.mark.parametrize("ragged", [False, True])
def test_float64_becomes_float32_for_tensorflow(ragged: bool) -> None:
    import tensorflow as tf

    shard = floats()
    columns = {name: FLOATS[name] for name in FLOATS if ragged or name != "ragged"}
    types = [part.dtype for part in next(iter(shard.to_tf(8, columns)))]
    expected = [tf.float32] * 3 + [tf.int64] * 2 + [tf.float32] * ragged
    assert types == expected
    c, *_ = next(iter(shard.to_tf(8, columns, dtypes={"c": "float64"})))
    assert c.dtype == tf.float64
    assert c.numpy().tolist() == [3.0 * row for row in range(8)]


# Slow where it is the first: this process imports torch, and TensorFlow afterwards.
@pytest.mark.parametrize("cache", [False, True])
def test_images_have_the_layout_of_the_framework(shard: Shard, cache: bool) -> None:
    import torch

    columns = {"x": "image", "n": "n"}
    images = {"image": Image(4, 5, cache=cache)}
    x, n = next(iter(shard.to_torch(8, columns, images=images, device="cpu")))
    assert (x.shape, x.dtype) == ((8, 3, 4, 5), torch.uint8)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x[:, 1, 2, 3], n.to(torch.uint8))
    x, n = next(iter(shard.to_tf(8, columns, images=images)))
    assert x.shape == (8, 4, 5, 3)
    images = {"image": Image(4, 5, cache=cache, layout="CHW")}
    x, n = next(iter(shard.to_tf(8, columns, images=images)))
    assert x.shape == (8, 3, 4, 5)
    assert x.numpy()[:, 1, 2, 3].tolist() == n.numpy().tolist()


def test_evaluate_takes_batches_of_torch_and_tensorflow(shard: Shard) -> None:
    import tensorflow as tf
    import torch

    columns = {"a": "a", "flag": "flag"}

    def measure(batch: Any) -> dict[str, Any]:
        a, flag = batch
        assert not torch.is_grad_enabled()
        return {"a": 2 * a, "flag": flag}

    exact = pytest.approx({"a": ROWS - 1, "flag": 0.5})
    assert evaluate(shard.to_torch(64, columns, device="cpu"), measure) == exact
    dataset = shard.to_tf(64, columns)
    for _ in range(2):
        assert evaluate(dataset, measure) == exact
    assert evaluate(shard.to_tf(64, columns, start=len(dataset)), measure) == exact
    with pytest.raises(TypeError, match=r"^evaluate .* _MapDataset\. .*measure"):
        evaluate(dataset.map(lambda a, flag: (tf.abs(a), flag)), measure)


def test_datasets_of_tensorflow_that_are_made_anew_go_on_with_the_next_epoch(shard: Shard) -> None:
    def epoch(dataset: Any) -> list[int]:
        return [number for batch in dataset for number in batch["n"].numpy().tolist()]

    once = shard.to_tf(300, ["n"], shuffle=True)
    orders = [epoch(once) for _ in range(3)]
    assert len({str(order) for order in orders}) == 3
    anew = shard_of(TABLE)
    assert [epoch(anew.to_tf(300, ["n"], shuffle=True)) for _ in range(3)] == orders


def test_tensorflow_skips_the_first_batches(shard: Shard) -> None:
    options: Any = {"shuffle": True, "seed": 9}
    dataset = shard.to_tf(100, ["n"], **options)
    epochs = [[batch["n"].numpy().tolist() for batch in dataset] for _ in range(3)]
    resumed = shard.to_tf(100, ["n"], start=13, **options)
    assert [batch["n"].numpy().tolist() for batch in resumed] == epochs[1][3:]
    assert [batch["n"].numpy().tolist() for batch in resumed] == epochs[2]


def test_keras_trains_and_evaluates_exactly(shard: Shard) -> None:
    import keras

    model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", weighted_metrics=["mae"])
    parts: Any = {"x": ["a", "b"], "y": "a"}
    history = model.fit(shard.to_tf(64, parts, shuffle=True), epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    exact = model.evaluate(shard.to_tf(1000, parts), verbose=0, return_dict=True)
    padded = model.evaluate(
        shard.to_tf(64, parts, sample_weights=True), verbose=0, return_dict=True
    )
    assert padded["mae"] == pytest.approx(exact["mae"], rel=1e-5)
