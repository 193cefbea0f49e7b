"""Models in files: what is read computes what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner.common.files import unpack
from horovod_runner.run.pickling import pickle_for_ranks

torch = pytest.importorskip("torch")


def test_a_module_with_parametrizations_travels(tmp_path: Path) -> None:
    import cloudpickle
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    from horovod_runner.data.scoring.models.torch import TorchKind

    net = torch.nn.Sequential(
        weight_norm(torch.nn.Linear(3, 4)), spectral_norm(torch.nn.Linear(4, 2))
    )
    net.eval()
    x = np.ones((5, 3), "float32")
    expected = net(torch.from_numpy(x)).detach().numpy()
    on_a_rank = cloudpickle.loads(pickle_for_ranks(net))
    np.testing.assert_array_equal(on_a_rank(torch.from_numpy(x)).detach(), expected)
    assert on_a_rank.state_dict().keys() == net.state_dict().keys()
    TorchKind("module").write(net, tmp_path / "net", ())
    np.testing.assert_array_equal(
        TorchKind("module").load(tmp_path / "net", "cpu")({"x": x}), expected
    )


def test_a_logged_folder_travels_with_the_files_that_its_links_lead_to(tmp_path: Path) -> None:
    from horovod_runner.data.scoring.models.mlflow import PyfuncKind

    (tmp_path / "blob").write_text("weights")
    for name in ("logged", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "logged" / "model.bin").symlink_to("../blob")
    PyfuncKind().write(tmp_path / "logged", tmp_path / "file", ())
    unpack(tmp_path / "file", tmp_path / "there")
    assert (tmp_path / "there" / "model" / "model.bin").read_text() == "weights"


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (lambda row: torch.tensor([row["a"]]), [1.0, 2.0]),
        (lambda row: [row["a"], [[row["b"], 0]]], ([1.0, 2.0], [[3.0, 0.0], [4.0, 0.0]])),
    ],
)
def test_a_function_of_one_row_has_an_output_or_several(outputs: Any, expected: Any) -> None:
    from horovod_runner.integrations.horovod_spark.kinds import RowByRow

    called = RowByRow(None, lambda _, row: outputs(row), {"x": "a", "y": "b"})
    found = called({"x": np.array([1.0, 2.0]), "y": np.array([3.0, 4.0])})
    assert isinstance(found, tuple) is isinstance(expected, tuple)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_function_of_one_row_is_told_which_columns_there_are() -> None:
    from horovod_runner.integrations.horovod_spark.kinds import RowByRow

    with pytest.raises(KeyError, match="feature columns a, not 'b': add it to feature_cols"):
        RowByRow(None, lambda _, row: row["b"], {"x": "a"})({"x": np.zeros(1)})


def test_own_functions_of_a_keras_model_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras = pytest.importorskip("keras")
    from horovod_runner.data.scoring.models.keras import KerasKind

    def doubled(x: Any) -> Any:
        return x * 2

    @keras.saving.register_keras_serializable(package="test")  # type: ignore[untyped-decorator]
    def tripled(x: Any) -> Any:
        return x * 3

    class Sevens(keras.initializers.Initializer):  # type: ignore[misc, name-defined]
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return keras.ops.full(shape, 7.0, dtype)

    layers = [
        keras.layers.Dense(1, activation=doubled, kernel_initializer=Sevens()),
        keras.layers.Activation(tripled),
    ]
    model = keras.Sequential([keras.Input((1,)), *layers])
    kind = KerasKind.of()
    kind.write(model, tmp_path / "model", ())
    # Other processes do not know what this one has registered.
    monkeypatch.delitem(keras.saving.get_custom_objects(), "test>tripled")
    found = kind.load(tmp_path / "model", "cpu")({"x": np.ones((2, 1), "float32")})
    np.testing.assert_allclose(found, [[42.0], [42.0]])
