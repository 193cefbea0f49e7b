"""Checkpoints and metrics of real frameworks: states are restored, scalars are converted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_runner.checkpoints import formats
from horovod_runner.checkpoints.snapshot import Copier, map_state
from horovod_runner.common.numbers import check_report
from horovod_runner.wire.marker import SUFFIXES
from tests.savers import by_commit
from tests.stores import mounted

Keep = Callable[[Any, Path], tuple[Any, int]]

# This process imports the frameworks.
pytestmark = pytest.mark.xdist_group("frameworks")


def test_metrics_can_be_numpy_and_torch_scalars() -> None:
    import numpy as np
    import torch

    metrics = {
        "float32": (np.float32(0.5), 0.5),
        "int64": (np.int64(3), 3),
        "bool": (np.bool_(True), 1),
        "array": (np.array(2.5), 2.5),
        "one": (np.array([4.0]), 4.0),
        "tensor": (torch.tensor(1.5), 1.5),
        "parameter": (torch.nn.Parameter(torch.tensor(2.0)), 2.0),
        "bfloat16": (torch.tensor(1.0, dtype=torch.bfloat16), 1.0),
        "true": (True, 1),
    }
    given = {name: value for name, (value, _) in metrics.items()}
    numbers, step, epoch = check_report(given, np.int64(7), torch.tensor(2))
    assert numbers == {name: plain for name, (_, plain) in metrics.items()}
    assert {type(value) for value in numbers.values()} == {int, float}
    assert (step, epoch) == (7, 2)


def round_trip(state: Any, folder: Path, copier: Copier | None = None) -> Any:
    """Write a state to a file and read it back; returns it and its kind."""
    snapshot = (copier or Copier()).copy(state)
    path = folder / f"state{SUFFIXES[snapshot.kind]}"
    path.unlink(missing_ok=True)
    snapshot.write(path)
    return formats.read(snapshot.kind, path), snapshot.kind


def by_file(state: Any, folder: Path) -> tuple[Any, int]:
    """Keep a state in a checkpoint; returns what is read, and the bytes that it takes."""
    restored, kind = round_trip(state, folder)
    return restored, (folder / f"state{SUFFIXES[kind]}").stat().st_size


both_ways = pytest.mark.parametrize("keep", [by_file, by_commit])


@both_ways
def test_a_torch_state_is_restored(tmp_path: Path, keep: Keep) -> None:
    import numpy as np
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    weights = torch.arange(12.0).view(3, 4)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "kinds": [
            torch.ones(2, dtype=torch.bfloat16),
            torch.tensor([True, False]),
            torch.tensor(3, dtype=torch.int8),
            torch.ones(3, dtype=torch.float8_e4m3fn),
            torch.tensor([1 + 2j]),
            torch.tensor([1 + 2j]).conj(),
            torch.empty(0, 3),
            weights[:, 1],
            weights.t(),
            torch.nn.Parameter(weights),
            weights.to_sparse(),
            weights.to_sparse_csr(),
            torch.quantize_per_tensor(weights, 0.1, 10, torch.quint8),
        ],
        "order": np.arange(5),
        "best": np.float32(0.5),
        "types": [torch.float16, torch.device("cpu")],
        "epoch": 3,
        "names": ["a", ("b", None)],
    }

    def plain(tensor: Any) -> Any:
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        return dense.detach().to(torch.complex64)

    restored, _ = keep(state, tmp_path)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(restored["model"])  # with its metadata: BatchNorm reads a version
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    torch.optim.AdamW(other.parameters()).load_state_dict(restored["optimizer"])
    assert isinstance(restored["model"], OrderedDict)
    assert restored["model"]._metadata == model.state_dict()._metadata
    for ours, theirs in zip(restored["kinds"], state["kinds"], strict=True):
        assert (ours.dtype, ours.layout, ours.shape) == (theirs.dtype, theirs.layout, theirs.shape)
        assert torch.equal(plain(ours), plain(theirs))
    assert restored["order"].tolist() == [0, 1, 2, 3, 4]
    assert type(restored["best"]) is np.float32
    for name in ("best", "types", "epoch", "names"):
        assert restored[name] == state[name]


@both_ways
def test_tied_weights_are_stored_once_and_stay_tied_and_views_are_not(
    tmp_path: Path, keep: Keep
) -> None:
    import torch

    weights = torch.full((10_000,), 1 + 2j)
    state = {
        "in": weights,
        "out": weights,
        "row": weights[:10],
        "conjugate": weights[:10].conj(),
        "imaginary": weights[:10].conj().imag,
    }
    restored, size = keep(state, tmp_path)
    assert restored["in"].data_ptr() == restored["out"].data_ptr()
    assert size < 90_000
    assert restored["row"].tolist() == [1 + 2j] * 10
    assert (restored["conjugate"][0], restored["imaginary"][0]) == (1 - 2j, -2)
    restored["row"][0] = 0  # the state shares nothing with what was kept
    assert restored["in"][0] == 1 + 2j


def test_torch_can_load_a_torch_checkpoint_by_itself(tmp_path: Path) -> None:
    import torch

    round_trip({"w": torch.arange(3)}, tmp_path)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["w"].tolist() == [0, 1, 2]


def test_the_copy_is_independent_of_the_model_and_reuses_its_memory(
    tmp_path: Path,
) -> None:
    import torch

    weights, copier = torch.zeros(1000), Copier()
    snapshot = copier.copy({"w": weights})
    weights += 1
    snapshot.write(tmp_path / "state.pt")
    assert formats.read("torch", tmp_path / "state.pt")["w"].sum() == 0
    (buffer,) = copier._buffers.values()
    restored, _ = round_trip({"w": weights}, tmp_path, copier)
    assert restored["w"].sum() == 1000
    assert next(iter(copier._buffers.values())) is buffer


def test_only_the_visible_part_of_a_view_is_stored(tmp_path: Path) -> None:
    import torch

    restored, _ = round_trip({"column": torch.arange(1_000_000).view(1000, 1000)[:, 3]}, tmp_path)
    assert restored["column"].tolist() == list(range(3, 1_000_000, 1000))
    assert (tmp_path / "state.pt").stat().st_size < 100_000


@both_ways
def test_arrays_and_plain_values_are_restored(tmp_path: Path, keep: Keep) -> None:
    import ml_dtypes
    import numpy as np

    state = {
        "w": np.random.default_rng(0).normal(size=(3, 4)),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3))[:, ::2],
        "brain": np.ones(3, ml_dtypes.bfloat16),
        "texts": np.array(["ä", "bc"]),
        "when": np.array(["2026-11-25"], "M8[D]"),
        "empty": np.empty((0, 3), np.float16),
        "scalar": np.float16(0.5),
        "text": "ä",
        "bytes": b"\x00\xff",
        "large": 2**100,
        1: [True, None, (1.5, {"deep": -1})],
        "inf": float("inf"),
    }
    assert Copier().copy(state).kind == "arrays"  # read without torch
    restored, _ = keep(state, tmp_path)
    for name in ("w", "f", "brain", "texts", "when", "empty"):
        assert restored[name].dtype == state[name].dtype
        assert restored[name].tobytes() == state[name].tobytes()
        assert restored[name].flags.writeable
    assert type(restored["scalar"]) is np.float16
    names = ["scalar", "text", "bytes", "large", 1, "inf"]
    assert [restored[name] for name in names] == [state[name] for name in names]


@both_ways
@pytest.mark.parametrize("beside_torch", [False, True])
def test_arrays_of_rare_types_are_restored(tmp_path: Path, keep: Keep, beside_torch: bool) -> None:
    import ml_dtypes
    import numpy as np
    import torch

    table = np.array([(1, 2.5), (3, 4.5)], [("id", "i4"), ("x", "f8")])
    state: dict[str, Any] = {
        "table": table,
        "row": table[1],
        "records": table.view(np.recarray),
        "raw": np.full(2, b"abc", "V3"),
        "brain": ml_dtypes.bfloat16(1.5),
        "float8": np.ones(3, ml_dtypes.float8_e5m2),
        "int4": np.ones(3, ml_dtypes.int4),
    }
    restored, _ = keep(state | ({"w": torch.ones(1)} if beside_torch else {}), tmp_path)
    for name, value in state.items():
        assert restored[name].dtype == value.dtype
        assert (restored[name] == value).all()


def test_a_part_of_a_sharded_state_is_an_array_of_no_other_class(tmp_path: Path) -> None:
    import numpy as np

    rows = np.memmap(tmp_path / "rows", "f4", "w+", shape=3)
    mapped, _ = map_state({"rows": rows}, lambda it, _: it, lambda it, _: it, sharded=True)
    assert type(mapped["rows"]) is np.ndarray


@both_ways
def test_a_folder_has_the_files_that_its_links_lead_to(tmp_path: Path, keep: Keep) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1f").write_text("weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to("../blobs/1f")
    restored, _ = keep(tmp_path / "snapshot", tmp_path)
    assert (restored / "model").read_text() == "weights"


@both_ways
def test_tensorflow_tensors_and_keras_models_are_restored(tmp_path: Path, keep: Keep) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    values = [tf.Variable([1.0, 2.0]), tf.constant([1, 2], tf.bfloat16), tf.constant("text")]
    restored = keep({"values": values}, tmp_path)[0]["values"]
    assert [value.tolist() for value in restored[:2]] == [[1, 2], [1, 2]]
    assert restored[1].dtype.name == "bfloat16"
    assert restored[2] == b"text"
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(np.ones((8, 3)), np.ones(8), verbose=0)
    copy, _ = keep(model, tmp_path)
    assert all(map(np.array_equal, copy.get_weights(), model.get_weights()))
    assert int(copy.optimizer.iterations.numpy()) == 1


def test_a_compiled_keras_model_is_restored_with_its_optimizer(tmp_path: Path) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    copier = Copier()
    for _ in range(2):  # the first step creates the optimizer's variables
        model.fit(np.ones((8, 3)), np.ones(8), verbose=0)
        snapshot = copier.copy(model)
        weights = [weight.copy() for weight in model.get_weights()]
        model.set_weights([weight * 0 for weight in weights])  # the copy is independent
        path = tmp_path / "state.keras"
        snapshot.write(path)
        model.set_weights(weights)
    assert copier._keras._clone is not None
    restored = formats.read("keras", path)
    assert all(map(np.array_equal, restored.get_weights(), weights))
    assert (
        int(restored.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy()) == 2
    )
    both = zip(restored.optimizer.variables, model.optimizer.variables, strict=True)
    assert all(np.array_equal(ours.numpy(), theirs.numpy()) for ours, theirs in both)
    restored.fit(np.ones((8, 3)), np.ones(8), verbose=0)


def test_a_keras_model_that_is_compiled_again_or_frozen_is_copied_as_it_is(tmp_path: Path) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    copier = Copier()

    def copied() -> Any:
        model.fit(np.ones((8, 3)), np.ones(8), verbose=0)
        return round_trip(model, tmp_path, copier)[0]

    model.compile(keras.optimizers.Adam(beta_1=0.5), "mse")
    assert copied().optimizer.beta_1 == 0.5
    clone = copier._keras._clone
    copied()
    assert copier._keras._clone is clone  # to make one takes longer than to copy
    model.compile(keras.optimizers.Adam(beta_1=0.7), "mae")
    restored = copied()
    assert (restored.optimizer.beta_1, restored.loss) == (0.7, "mae")
    model.layers[0].trainable = False
    assert [layer.trainable for layer in copied().layers] == [False, True]


def test_keras_models_reach_a_store_that_is_only_written_in_sequence(tmp_path: Path) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    words = keras.layers.StringLookup(vocabulary=["a", "b"])  # it cannot be cloned
    with mounted(tmp_path / "backing", tmp_path / "volume") as volume:
        restored, _ = round_trip(model, volume)
        assert all(map(np.array_equal, restored.get_weights(), model.get_weights()))
        text = keras.Input((1,), dtype="string")
        restored, _ = round_trip(keras.Model(text, words(text)), volume)
        assert restored.count_params() == 0


def test_a_keras_model_keeps_what_its_layers_have_learned_of_the_data(tmp_path: Path) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    words = keras.layers.StringLookup()
    words.adapt(tf.constant([["a"], ["b"], ["b"]]))
    scale = keras.layers.Normalization()
    scale.adapt(np.array([[1.0], [5.0]]))
    text, number = keras.Input((1,), dtype="string"), keras.Input((1,))
    model = keras.Model([text, number], [words(text), scale(number)])
    restored, _ = round_trip(model, tmp_path)
    known, scaled = restored.predict([tf.constant([["b"], ["a"], ["?"]]), np.ones((3, 1))])
    assert known.tolist() == [[1], [2], [0]]
    assert scaled.tolist() == [[-1]] * 3


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": [1, object()]}}, r"state\['a'\]\['b'\]\[1\] .*\bobject,"),
        ({"a": {1, 2}}, r"state\['a'\] .*\bset,"),
        ({(1, 2): 3}, r"^state .*tuple \(\(1, 2\)\)"),
        ([1, 2], r"dict, .* list\. .*state_dict\(\)"),
        ("/no/such/folder", "^'/no/such/folder' "),
        ({"f": print}, r"state\['f'\] .*builtin_function_or_method"),
    ],
)
def test_the_error_for_a_value_that_cannot_be_stored_names_its_place(
    state: Any, where: str
) -> None:
    with pytest.raises(TypeError, match=where):
        Copier().copy(state)


def test_the_error_for_a_module_or_an_array_says_what_to_do() -> None:
    import numpy as np
    import torch

    with pytest.raises(TypeError, match=r"state\['model'\] .*torch\.nn.*Linear.* state_dict\(\)"):
        Copier().copy({"model": torch.nn.Linear(1, 1)})
    with pytest.raises(TypeError, match=r"state\['a'\] .*dtype object"):
        Copier().copy({"a": np.array([{}])})
    with pytest.raises(TypeError, match=r"state\['a'\] .*MaskedArray.* its data and its mask"):
        Copier().copy({"a": np.ma.masked_equal([1, 2], 2)})


def test_reading_a_malicious_file_or_commit_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    import numpy as np
    import torch

    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    save = torch.save
    save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(pickle.UnpicklingError):
        formats.read("torch", tmp_path / "evil.pt")
    np.savez(tmp_path / "evil.npz", a0=np.array([Evil()], dtype=object))
    with pytest.raises(KeyError):
        formats.read("arrays", tmp_path / "evil.npz")
    monkeypatch.setattr(torch, "save", lambda _, file: save(Evil(), file))
    with pytest.raises(pickle.UnpicklingError):
        by_commit({"x": torch.ones(2).to_sparse()}, tmp_path)
    assert not (tmp_path / "ran").exists()
