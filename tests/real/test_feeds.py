"""Feeds to the frameworks themselves, and to disks that are too small."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data import Image, Shard
from horovod_runner.errors import DataError
from tests.shards import shard_of

pytestmark = pytest.mark.horovod  # needs the frameworks

ROWS = 1000


def png(number: int) -> bytes:
    from PIL import Image as Pillow

    stream = io.BytesIO()
    Pillow.fromarray(np.full((4, 5, 3), number % 256, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


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
        "image": [png(n) for n in range(ROWS)],
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


def test_torch_gets_dicts_where_columns_are_only_named(shard: Shard) -> None:
    feed = shard.to_torch(10, ["flag", "text", "ragged", "v"], device="cpu", weights=True)
    batch = next(iter(feed))
    assert batch["flag"].tolist() == [True, False] * 5
    assert batch["text"][3] == "row 3"
    assert [row.tolist() for row in batch["ragged"]] == [[n] * (n % 4) for n in range(10)]
    assert batch["v"].shape == (10, 3)
    assert batch["weight"].tolist() == [1.0] * 10


def test_a_transform_gets_arrays_and_torch_what_it_returns(shard: Shard) -> None:
    import torch

    def halve(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"] / 2, "y": batch["y"]}

    x, y = next(iter(shard.to_torch(8, COLUMNS, transform=halve, device="cpu")))
    assert isinstance(x, torch.Tensor)
    assert x[:, 1].tolist() == y.tolist()


def test_batches_may_be_written_to(shard: Shard) -> None:
    first = [x.add_(1).sum().item() for x, _ in shard.to_torch(100, COLUMNS, device="cpu")]
    second = [x.add_(1).sum().item() for x, _ in shard.to_torch(100, COLUMNS, device="cpu")]
    assert first == second


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_dataloader_of_the_users_own_takes_rows(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, workers: int, start: str
) -> None:
    from torch.utils.data import DataLoader

    seen, steps = [], set()
    for rank in range(3):
        monkeypatch.setenv("HOROVOD_RANK", str(rank))
        monkeypatch.setenv("HOROVOD_SIZE", "3")
        rows = shard.to_torch_dataset({"x": ["a", "b"], "y": "n", "text": "text"})
        loader: Any = DataLoader(
            rows,
            batch_size=50,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context=start if workers else None,
        )
        for x, y, text in loader:
            assert x[:, 1].tolist() == [2 * n for n in y.tolist()]
            assert list(text) == [f"row {n}" for n in y.tolist()]
            seen += y.tolist()
        steps.add(len(loader))
    assert steps == {7}
    assert len(seen) == 1002  # padded to three times 334
    assert set(seen) == set(range(ROWS))


def test_rows_for_a_dataloader_may_be_named_and_transformed(shard: Shard) -> None:
    rows = shard.to_torch_dataset(
        ["n", "image"],
        images={"image": Image(4, 5)},
        transform=lambda row: (row["n"].item(), row["image"].shape),
    )
    assert rows[7] == (7, (4, 5, 3))
    assert len(shard.to_torch_dataset(["n"], last="drop")) == ROWS  # type: ignore[arg-type]


def test_tensorflow_gets_tuples_of_tensors(shard: Shard) -> None:
    import tensorflow as tf

    dataset = shard.to_tf(64, {"x": ["a", "b"], "y": "n", "m": ["a", "c"], "v": "v"}, shuffle=True)
    assert int(dataset.cardinality()) == 16
    orders = []
    for _ in range(2):
        seen: list[int] = []
        for x, y, mixed, v in dataset:
            assert (x.dtype, x.shape, y.dtype) == (tf.float32, (64, 2), tf.int64)
            assert x.numpy()[:, 1].tolist() == [2 * n for n in y.numpy()]
            assert (mixed.dtype, mixed.numpy()[:, 1].tolist()) == (
                tf.float64,
                [3.0 * n for n in y.numpy()],
            )
            assert v.numpy().tolist() == [[n, n + 1, n + 2] for n in y.numpy()]
            seen += y.numpy().tolist()
        assert set(seen) == set(range(ROWS))
        orders.append(seen)
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    "columns", [["n", "flag"], ["n", "text"], ["n", "ragged"], ["n", "image"]], ids="-".join
)
def test_tensorflow_gets_what_torch_gets(shard: Shard, columns: list[str]) -> None:
    images = {"image": Image(4, 5)} if "image" in columns else {}
    options: Any = {"shuffle": True, "seed": 4, "weights": True, "images": images}
    torch_batches = list(shard.to_torch(48, columns, device="cpu", **options))
    tf_batches = list(shard.to_tf(48, columns, **options))
    assert len(torch_batches) == len(tf_batches) == 21
    for one, other in zip(torch_batches, tf_batches, strict=True):
        assert list(one) == list(other) == [*columns, "weight"]
        for name in one:
            assert _plain(one[name]) == _plain(other[name])


def _plain(values: Any) -> Any:
    if isinstance(values, list):
        return [v if isinstance(v, str) else v.tolist() for v in values]
    found = values.to_list() if hasattr(values, "to_list") else values.numpy().tolist()
    return [v.decode() if isinstance(v, bytes) else v for v in found]


def test_tensorflow_begins_behind_the_batches_that_were_taken(shard: Shard) -> None:
    options: Any = {"shuffle": True, "seed": 9}
    dataset = shard.to_tf(100, ["n"], **options)
    epochs = [[batch["n"].numpy().tolist() for batch in dataset] for _ in range(3)]
    resumed = shard.to_tf(100, ["n"], start=13, **options)
    assert [batch["n"].numpy().tolist() for batch in resumed] == epochs[1][3:]
    assert [batch["n"].numpy().tolist() for batch in resumed] == epochs[2]


def test_keras_trains_from_it_and_evaluates_exactly(shard: Shard) -> None:
    import keras

    model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", weighted_metrics=["mae"])
    parts: Any = {"x": ["a", "b"], "y": "a"}
    history = model.fit(shard.to_tf(64, parts, shuffle=True), epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    exact = model.evaluate(shard.to_tf(1000, parts), verbose=0, return_dict=True)
    padded = model.evaluate(shard.to_tf(64, parts, weights=True), verbose=0, return_dict=True)
    assert padded["mae"] == pytest.approx(exact["mae"], rel=1e-5)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("column", ["v", "text"])
def test_a_disk_that_is_full_is_told_and_nothing_stays(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(small_disk))
    large = pa.table({"v": np.zeros(3_000_000), "text": ["some words " * 2] * 3_000_000})
    with pytest.raises(DataError, match=r"MB are free there: free space, or set TMPDIR"):
        shard_of(large).batches(10, [column])
    (small_disk / "other").write_bytes(bytes(1_000_000))
    (small_disk / "other").unlink()
    found = shard_of(TABLE).batches(10, ["n"])
    assert len(list(found)) == 100
