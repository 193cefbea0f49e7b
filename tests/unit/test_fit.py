"""fit: where it runs, its schedules and metrics, and mistakes that are told before a launch."""

from __future__ import annotations

import sys
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from horovod_runner import DataError, fit
from horovod_runner.data import Image
from horovod_runner.integrations.training.classes import Classes, is_class_loss, loss_name
from horovod_runner.integrations.training.network import made
from horovod_runner.integrations.training.schedules import schedule_of
from horovod_runner.integrations.training.training import options_of_inputs
from horovod_runner.integrations.training.where import choose
from tests.stand_ins import LaunchedError, refuse_launches

torch = pytest.importorskip("torch")
pillow = pytest.importorskip("PIL.Image")

PIXELS = BytesIO()
pillow.new("L", (2, 1)).save(PIXELS, "png")
TABLE = pd.DataFrame(
    {
        "x": np.eye(8).tolist(),
        "y": np.arange(8) % 2,
        "name": list("abcdefgh"),
        "w": np.ones(8),
        "image": [PIXELS.getvalue()] * 8,
    }
)


def net() -> Any:
    return torch.nn.Linear(8, 2)


NET = net()
GOOD: dict[str, Any] = {
    "model": net,
    "data": TABLE,
    "x": "x",
    "y": "y",
    "loss": torch.nn.CrossEntropyLoss(),
    "where": "local",  # another test of this process may have left a session on a cluster
    "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def of_groups(model: Any) -> Any:
    """An optimizer of a network's own weights."""
    weight, bias = model.parameters()
    return torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.2}])


def of_pixels(output: Any, label: Any) -> Any:
    return (output - label / 255).square().mean()


def outputs_first(model: Any, x: Any, y: Any) -> Any:
    """Returns what a step returns, in the wrong order."""
    outputs = model(x)
    return outputs, torch.nn.functional.cross_entropy(outputs, y)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"model": "net"}, TypeError, "model must be"),
        ({"model": None}, TypeError, "model must be"),
        ({"model": 3}, TypeError, "model must be"),
        ({"data": [1, 2]}, TypeError, "data must be"),
        ({"data": None}, TypeError, "data must be"),
        ({"x": None}, ValueError, "x='image'"),
        ({"y": None}, ValueError, "y='label'"),
        ({"loss": None}, ValueError, "loss="),
        ({"loss": "mse"}, TypeError, "loss must be a function.*'mse'"),
        ({"loss": torch.nn.MSELoss}, TypeError, "loss must be a function.*MSELoss"),
        ({"optimizer": None}, ValueError, "optimizer="),
        ({"x": "no_such"}, DataError, "no_such"),
        ({"y": "no_such"}, DataError, "no_such"),
        ({"y": "name"}, ValueError, "name"),
        ({"x": 3}, TypeError, "x "),
        ({"x": [3]}, TypeError, "x must name columns"),
        ({"x": []}, TypeError, "x must name columns"),
        ({"y": [3]}, TypeError, "y must name"),
        ({"x": "w"}, ValueError, "model does not fit .* Change x"),
        ({"y": ["y", "w"]}, ValueError, "1 outputs for 2 labels: y must"),
        ({"y": ["y", "y"]}, ValueError, "y has the column 'y' 2 times: give each output"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be"),
        ({"loss": None, "step": lambda *_: 1 / 0}, ValueError, r"step fails .*ZeroD.*x \(\d+, 8\)"),
        ({"loss": None, "step": lambda *_: 0.5}, TypeError, "step must return .*not float"),
        ({"loss": None, "step": outputs_first}, TypeError, "step must return .*not tuple"),
        ({"global_batch": 0}, ValueError, "global_batch"),
        ({"global_batch": 32.0}, TypeError, "global_batch"),
        ({"global_batch": 32, "accumulate": 5}, ValueError, "accumulate=5"),
        ({"epochs": 0}, ValueError, "epochs"),
        ({"epochs": "5"}, TypeError, "epochs"),
        ({"validation": 1.5}, ValueError, "validation"),
        ({"validation": True}, TypeError, "validation"),
        ({"validation": "no_such"}, DataError, "no_such"),
        ({"metrics": ["accurcy"]}, ValueError, "accurcy.*accuracy"),
        ({"metrics": [3]}, TypeError, "metric"),
        ({"metrics": "accuracy"}, TypeError, "metrics"),
        ({"metrics": [lambda x, y: 0, lambda x, y: 1]}, ValueError, "one name.*by a dict"),
        ({"weight": "no_such"}, DataError, "no_such"),
        (
            {"weight": "w", "loss": lambda output, label: 0},
            ValueError,
            "TypeError: weight requires",
        ),
        ({"dtypes": {"no_such": "int32"}}, DataError, "no_such"),
        ({"ranks": 0}, ValueError, "ranks"),
        ({"ranks": "2"}, TypeError, "ranks"),
        ({"where": "moon"}, ValueError, "where"),
        ({"where": "spark"}, ValueError, "ranks=4"),
        ({"resume": True}, ValueError, "checkpoint_dir"),
        ({"schedule": "exponential"}, ValueError, "schedule"),
        ({"warmup": -1}, ValueError, "warmup"),
        ({"clip_norm": 0}, ValueError, "clip_norm"),
        ({"clip_norm": "1"}, TypeError, "clip_norm"),
        ({"precision": "int8"}, ValueError, "precision"),
        ({"patience": 0}, ValueError, "patience"),
        ({"monitor": "val_loss"}, ValueError, "metrics are loss"),
        ({"trainer_options": {"a": 1}}, ValueError, "Lightning"),
        ({"batch_size": 32}, TypeError, "Did you mean global_batch"),
        ({"criterion": 3}, TypeError, "Did you mean loss"),
        ({"hang_timout": 3}, TypeError, "Did you mean hang_timeout"),
        ({"np": 2}, TypeError, "ranks="),
        ({"max_restarts": -1}, ValueError, "max_restarts"),
    ],
)
def test_a_mistake_is_told_before_anything_is_launched(
    wrong: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_launches(monkeypatch)
    with pytest.raises(error, match=said):
        fit(**{**GOOD, **wrong})


@pytest.mark.parametrize(
    "given",
    [
        {"loss": partial(torch.nn.functional.cross_entropy, label_smoothing=0.1)},
        {"loss": lambda output, label: torch.nn.functional.cross_entropy(output / 2, label)},
        {"dtypes": {"y": "int32", "x": "float64"}, "model": net().double()},
        {"y": "image", "images": {"image": Image(1, 2, "GRAY")}, "loss": of_pixels},
        {"model": NET, "optimizer": of_groups(NET)},
    ],
    ids=["partial", "lambda", "type of a label", "label of pixels", "groups of weights"],
)
def test_what_fits_is_launched(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_launches(monkeypatch)
    with pytest.raises(LaunchedError):
        fit(**{**GOOD, **given})


def test_a_class_in_the_place_of_a_model_is_named() -> None:
    from horovod_runner.integrations.training.torch import TorchTraining

    given: dict[str, Any] = {"features": {"x": "x"}, "labels": ["y"]}
    with pytest.raises(TypeError, match="not the class Linear"):
        TorchTraining(model=torch.nn.Linear, **given).check({})


def test_a_schedule_rises_and_falls() -> None:
    for curve, half, end in (("linear", 0.5, 0), ("cosine", 0.5, 0), ("constant", 1, 1)):
        factor = schedule_of(curve, 10)  # type: ignore[arg-type]
        assert factor is not None
        assert [factor(step, 110) for step in (0, 4, 9, 10, 60)] == pytest.approx(
            [0.1, 0.5, 1, 1, half]
        )
        assert factor(110, 110) == pytest.approx(end)
    own = schedule_of(lambda step, steps: step / steps, 0)
    assert own is not None
    assert own(3, 12) == 0.25
    assert schedule_of(None, 0) is None


@pytest.mark.parametrize(
    ("given", "is_split", "rows", "rows_to_validate"),
    [
        ({"batch_size": 8}, False, {"batch_size": 8}, {"batch_size": 8}),
        ({"batch_size": 8, "val_batch_size": 5}, True, {"batch_size": 8}, {"batch_size": 5}),
        ({"global_batch": 24}, False, {"global_batch": 12}, {"global_batch": 12}),
        ({"global_batch": 24}, True, {"batch_size": 4}, {"batch_size": 4}),
        ({"global_batch": 4}, True, {"batch_size": 1}, {"batch_size": 1}),
    ],
)
def test_rows_of_a_batch_on_three_ranks_in_two_passes(
    given: dict[str, Any],
    is_split: bool,
    rows: dict[str, int],
    rows_to_validate: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from horovod_runner.integrations.training.torch import TorchTraining

    monkeypatch.setenv("HOROVOD_SIZE", "3")
    training = TorchTraining(
        model=None, features={"x": "x"}, labels=["y"], backward_passes_per_step=2, **given
    )
    shard: Any = SimpleNamespace(is_split_among_ranks=is_split)
    for is_training, expected in ((True, rows), (False, rows_to_validate)):
        options = training.feed(shard, is_training=is_training)
        assert options.pop("shuffle") is is_training
        assert options == {**expected, "columns": {"x": "x", "label y": "y"}, "seed": 0}


@pytest.mark.parametrize(
    ("output", "label", "right", "loss"),
    [
        ([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]], [1, 0, 0], 2 / 3, torch.nn.CrossEntropyLoss()),
        ([[2.0], [-1.0]], [1.0, 1.0], 0.5, torch.nn.BCEWithLogitsLoss()),
        ([2.0, -1.0], [1.0, 0.0], 1, None),
        ([[0.9], [0.2]], [1, 0], 1, torch.nn.BCELoss()),
        ([[0.9], [0.2]], [1, 0], 1, partial(torch.nn.functional.binary_cross_entropy, weight=None)),
        ([[0.1, 0.9], [0.8, 0.2]], [[0.0, 1.0], [0.0, 1.0]], 0.5, torch.nn.BCELoss()),
    ],
)
def test_accuracy_takes_scores_of_classes_and_of_one_class(
    output: Any, label: Any, right: float, loss: Any
) -> None:
    from horovod_runner.integrations.training.metrics import metrics_of

    accuracy = metrics_of("torch", ["accuracy"], loss)["accuracy"].function
    assert float(accuracy(torch.tensor(output), torch.tensor(label))) == pytest.approx(right)


@pytest.mark.parametrize(
    ("loss", "of_classes"),
    [
        ("NLLLoss", True),
        ("nll_loss", True),
        ("BCEWithLogitsLoss", True),
        ("SparseCategoricalCrossentropy with logits", True),
        ("PoissonNLLLoss", False),
        ("gaussian_nll_loss", False),
        ("MSELoss", False),
    ],
)
def test_a_loss_says_whether_a_model_predicts_classes(loss: str, of_classes: bool) -> None:
    assert is_class_loss(loss) == of_classes


class OwnCrossEntropy(torch.nn.CrossEntropyLoss):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (OwnCrossEntropy(), "CrossEntropyLoss"),
        (torch.nn.PoissonNLLLoss(), "PoissonNLLLoss"),
        (partial(torch.nn.functional.nll_loss, reduction="sum"), "nll_loss"),
        (["binary_crossentropy", "mse"], "binary_crossentropy"),
    ],
)
def test_a_loss_that_is_made_of_one_of_classes_has_its_name(loss: Any, name: str) -> None:
    assert loss_name(loss) == name


@pytest.mark.parametrize("loss", ["BCEWithLogitsLoss", "BinaryCrossentropy with logits"])
def test_each_output_of_a_binary_loss_has_a_probability_of_its_own(loss: str) -> None:
    _, probabilities = Classes(loss)(np.array([[5.0, 5.0, -5.0]]))
    np.testing.assert_allclose(probabilities, 1 / (1 + np.exp([[-5.0, -5.0, 5.0]])))


def of_column(output: Any, label: Any) -> Any:
    return (output[:, 0] - label).square().mean()


def of_chosen(output: Any, label: Any) -> Any:
    return ((output.squeeze(1) > 0) == label).double().mean()


def of_matrix(output: Any, label: Any) -> Any:
    return (output - label).square().mean().sqrt()


class OfProbabilities(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, output: Any, label: Any) -> Any:
        return torch.nn.functional.binary_cross_entropy(output.flatten(), label)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (of_column, (4,)),
        (of_chosen, (4,)),
        (OfProbabilities(), (4,)),
        (of_matrix, (4, 1)),
        (torch.nn.MSELoss(), (4, 1)),
        (torch.nn.functional.l1_loss, (4, 1)),
        (lambda output, label: 0.0, (4, 1)),
    ],
)
def test_a_function_gets_labels_of_the_shape_that_it_compares_with(
    function: Any, shape: Any
) -> None:
    from horovod_runner.integrations.training.losses import fitted_label

    output, label = torch.zeros(4, 1), torch.arange(4)
    assert fitted_label(function, output, label).shape == shape
    assert fitted_label(torch.nn.MSELoss(), output, label, function).shape == shape


@pytest.mark.parametrize(
    "loss", [OwnCrossEntropy(), torch.nn.functional.cross_entropy, lambda output, label: 0.0]
)
def test_classes_stay_whole_numbers(loss: Any) -> None:
    from horovod_runner.integrations.training.losses import fitted_label

    for shape in ((), (5,)):
        label = torch.ones(4, *shape, dtype=torch.int32)
        assert fitted_label(loss, torch.zeros(4, 3, *shape), label).dtype == torch.int64
    probabilities = torch.ones(4, 3, dtype=torch.int32)
    assert fitted_label(loss, torch.zeros(4, 3), probabilities).dtype == torch.float32


def test_a_network_whose_function_imports_torch_has_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "keras", raising=False)

    def make() -> list[int]:
        if "torch" not in sys.modules:
            monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(manual_seed=seeds.append))
        return list(seeds)

    assert made(make, 7) == [7]


def test_rows_are_scored_without_the_options_of_labels() -> None:
    given = {"dtypes": {"y": "int32", "x": "float32"}, "images": {"y": Image(1, 1)}, "transform": 3}
    left = {"dtypes": {"x": "float32"}, "images": {}, "transform": 3}
    assert options_of_inputs(given, {"x": "image"}, ["y"]) == left
    both = {"dtypes": "float32", "images": {"y": Image(1, 1)}, "pad_ragged": {"label y": 0}}
    assert options_of_inputs(both, {"x": ["y", "z"]}, ["y"]) == {**both, "pad_ragged": {}}


def test_ranks_run_where_there_is_something_to_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # No argument: fit looks for the session by itself.
    monkeypatch.setattr("horovod_runner.integrations.training.where._session", session_of)
    here = SimpleNamespace(sparkContext=SimpleNamespace(master="local[2]"))
    cluster = SimpleNamespace(sparkContext=SimpleNamespace(master="spark://host:7077"))
    assert choose(3, None, None).np == -3
    assert choose((2, 4), None, None).np == (-2, -4)
    assert choose(None, None, None).np == -1
    assert choose(2, None, SimpleNamespace(sparkSession=here)).np == -2
    chosen = choose(2, None, SimpleNamespace(sparkSession=cluster))
    assert (chosen.np, chosen.options) == (2, {"spark": cluster})
    assert choose(2, "local", SimpleNamespace(sparkSession=cluster)).np == -2
    with pytest.raises(ValueError, match="ranks=4"):
        choose(None, None, SimpleNamespace(sparkSession=cluster))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert choose(None, None, None).np == -3
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    chosen = choose(None, None, None)
    assert (chosen.np, chosen.options) == (4, {"launcher": "slurm"})
    assert "job 12 has 4 tasks" in chosen.why
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert choose(2, None, None).np == -2


def session_of(data: Any) -> Any:
    return getattr(data, "sparkSession", None)
