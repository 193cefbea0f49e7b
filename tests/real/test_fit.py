"""fit: what it trains does not depend on the number of ranks, and it does what people forget."""

from __future__ import annotations

import functools
import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from horovod_runner import current_attempt, fit
from tests.conftest import Ranks
from tests.learned import assert_close
from tests.preload import ALIKE
from tests.stand_ins import LaunchedError, refuse_launches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("nothing_left")]

ROWS = 203
WARM = {"preload_frameworks": ["horovod.torch"], "env": ALIKE, "gpus_per_rank": 0}


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    return pd.DataFrame(
        {
            "x": x.tolist(),
            "y": (x[:, 0] + 0.3 * rng.normal(size=ROWS) > 0) * 1 + (x[:, 1] > 1) * 1,
            "z": (x[:, 2] > 0) * 1 + (x[:, 3] > 1) * 1,
            "w": rng.uniform(0.5, 2, ROWS),
            "held_out": np.arange(ROWS) % 5 == 0,
        }
    )


def plain() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def normalized() -> Any:
    import torch

    layers = [torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))


def adam(parameters: Any) -> Any:
    import torch

    return torch.optim.Adam(parameters, lr=0.01)


def trained(model: Any, data: Any = None, **options: Any) -> Any:
    import torch

    given: dict[str, Any] = {
        "x": "x",
        "y": "y",
        "loss": torch.nn.CrossEntropyLoss(),
        "optimizer": adam,
        "global_batch": 24,
        "epochs": 2,
        "ranks": 2,
        "progress": False,
        **WARM,
        **options,
    }
    return fit(model, table() if data is None else data, **given)


def weights(result: Any) -> Any:
    state = result.model.state_dict()
    return np.concatenate([np.ravel(value.double().numpy()) for value in state.values()])


def own_step(model: Any, x: Any, y: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(x), y) + 0.01 * model[0].weight.square().sum()


def two_heads() -> Any:
    import torch

    class TwoHeads(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleList([plain(), plain()])

        def forward(self, x: Any) -> Any:
            return [head(x) for head in self.heads]

    return TwoHeads()


def autoencoder() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(6, 2), torch.nn.Linear(2, 6))


def reconstruct(model: Any, x: Any, labels: Any) -> Any:
    return (model(x) - x).square().mean()


def ways() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Networks with the arguments of fit."""
    import torch

    by_class = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 5.0]))
    added = torch.nn.CrossEntropyLoss(reduction="sum")
    some = functools.partial(torch.nn.functional.cross_entropy, ignore_index=0)
    return {
        "made already": (plain(), {}),
        "weights of rows": (plain, {"weight": "w", "schedule": "cosine", "warmup": 3}),
        "weights of classes": (plain, {"loss": by_class, "accumulate": 4, "clip_norm": 0.5}),
        "classes that do not count": (plain, {"loss": some, "accumulate": 2}),
        "weights of classes and of rows": (plain, {"loss": by_class, "weight": "w"}),
        "a sum": (plain, {"loss": added, "accumulate": 4, "clip_norm": 1.0}),
        "two labels": (two_heads, {"loss": [by_class, added], "y": ["y", "z"], "clip_norm": 1.0}),
        "no labels": (autoencoder, {"loss": None, "y": [], "step": reconstruct}),
        "batch normalization": (normalized, {"validation": 0.2, "metrics": ["accuracy"]}),
        "accumulation": (plain, {"accumulate": 4, "validation": "held_out"}),
        "a step of one's own": (plain, {"loss": None, "step": own_step, "validation": table()}),
    }


WAYS = (
    "made already",
    "weights of rows",
    "weights of classes",
    "classes that do not count",
    "weights of classes and of rows",
    "a sum",
    "two labels",
    "no labels",
    "batch normalization",
    "accumulation",
    "a step of one's own",
)


@pytest.mark.parametrize("way", WAYS)
def test_the_result_does_not_depend_on_the_number_of_ranks(way: str) -> None:
    model, options = ways()[way]
    alone, together = (trained(model, ranks=ranks, **options) for ranks in (1, 3))
    np.testing.assert_allclose(weights(together), weights(alone), atol=2e-5)
    assert together.metrics == pytest.approx(alone.metrics, abs=1e-4)
    expected = {"loss", "val_loss"} if "validation" in options else {"loss"}
    assert set(together.metrics) >= expected


class SwitchedOffError(Exception):
    """As a machine that is switched off."""


class Interrupts:
    """A callback that fails after some steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int, loss: Any) -> None:
        if step == self.step:
            raise SwitchedOffError

    def on_epoch_end(self, epoch: int, metrics: Any) -> None:
        pass


def test_it_continues_in_the_middle_of_an_epoch_with_other_ranks(tmp_path: Path) -> None:
    options = {"epochs": 3, "metrics": ["accuracy"], "schedule": "linear", "validation": 0.2}
    whole = trained(normalized, ranks=1, **options)
    kept = {**options, "checkpoint_dir": tmp_path, "save_every": 2, "resume": True}
    with pytest.raises(SwitchedOffError):  # 7 steps are an epoch
        trained(normalized, ranks=3, callbacks=[Interrupts(12)], **kept)
    resumed = trained(normalized, ranks=2, **kept)
    assert resumed.run.attempts[0].resumed_from == 10
    np.testing.assert_allclose(weights(resumed), weights(whole), atol=2e-5)
    for name, values in whole.history.items():
        assert resumed.history[name] == pytest.approx(values, abs=1e-4), name


def test_the_progress_line_says_how_many_steps_there_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    trained(plain, ranks=1, epochs=3, progress=True)
    assert "epoch 3, step 27/27" in capfd.readouterr().err


def test_all_ranks_stop_when_the_metric_improves_no_more(tmp_path: Path) -> None:
    import torch

    def too_fast(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=300.0)

    result = trained(
        plain,
        optimizer=too_fast,
        epochs=50,
        patience=2,
        validation=0.3,
        metrics=["accuracy"],
        monitor="val_accuracy",
        checkpoint_dir=tmp_path,
    )
    values = result.history["val_accuracy"]
    best = values.index(max(values))
    assert len(values) == best + 3 < 50
    assert result.best_checkpoint.metrics["val_accuracy"] == pytest.approx(max(values))


class Killed:
    """A callback that ends rank 1 of the first attempt as a lost machine would."""

    def on_step_end(self, step: int, loss: Any) -> None:
        if step == 4 and os.environ["HOROVOD_RANK"] == "1" and current_attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, metrics: Any) -> None:
        pass


def test_elastic_ranks_continue_when_one_is_lost(tmp_path: Path) -> None:
    kept = {"checkpoint_dir": tmp_path, "save_every": 2, "max_restarts": 2}
    result = trained(plain, ranks=(1, 2), callbacks=[Killed()], **kept)
    first, *_, last = result.run.attempts
    assert first.size == 2
    assert first.error is not None
    assert last.resumed_from in (2, 4)
    np.testing.assert_allclose(weights(result), weights(trained(plain, ranks=1)), atol=2e-5)


@pytest.mark.places("cluster", "slurm")
def test_it_trains_the_same_on_a_cluster_and_in_an_allocation(ranks: Ranks) -> None:
    where = "slurm" if ranks.spark is None else "spark"
    # Slurm ends a process that would wait for the next run.
    options = {"spark": ranks.spark} if ranks.spark is not None else {"preload_frameworks": False}
    there = trained(plain, ranks=2, where=where, validation="held_out", **options)
    here = trained(plain, ranks=1, where="local", validation="held_out")
    np.testing.assert_allclose(weights(there), weights(here), atol=2e-5)
    assert there.metrics == pytest.approx(here.metrics, abs=1e-4)
    assert len(there.run.ranks) == 2


@pytest.mark.usefixtures("folder_of_models")
def test_a_spark_dataframe_trains_and_is_scored(spark: SparkSession) -> None:
    df = spark.createDataFrame(table().to_dict("records"))
    dtypes = {"x": "float32", "y": "int32"}
    options = {"validation": "held_out", "metrics": ["accuracy"], "dtypes": dtypes}
    result = trained(plain, df, ranks=2, **options)
    scored = result.predict(df.filter("held_out")).select("y", "prediction", "probability")
    rows = scored.collect()
    right = np.mean([row.y == row.prediction for row in rows])
    assert right == pytest.approx(result.metrics["val_accuracy"])
    here = result.predict(table()[table()["held_out"]])
    assert sorted(here["prediction"]) == sorted(row.prediction for row in rows)
    assert np.allclose([sum(p) for p in here["probability"]], 1)
    assert len(result.plot().axes) >= 2


def test_a_half_precision_network_learns() -> None:
    result = trained(plain, precision="bfloat16", epochs=4, metrics=["accuracy"])
    assert result.metrics["accuracy"] > 0.6
    assert {str(value.dtype) for value in result.model.state_dict().values()} == {"torch.float32"}


def keras_network() -> Any:
    import keras

    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    network = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(0.01), loss)
    return network


def on_keras(backend: str) -> dict[str, Any]:
    """Arguments of fit for a network that is compiled."""
    return {
        "loss": None,
        "optimizer": None,
        "validation": 0.2,
        "metrics": ["accuracy"],
        "schedule": "cosine",
        "env": {**ALIKE, "KERAS_BACKEND": backend},
        "preload_frameworks": ["keras", f"horovod.{backend}"],
    }


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_keras_network_does_not_depend_on_the_number_of_ranks(backend: str) -> None:
    options = {**on_keras(backend), "clip_norm": 1.0}
    alone, together = (trained(keras_network, ranks=n, **options) for n in (1, 2))
    assert_same_weights(together, alone)
    validated = {name: value for name, value in alone.metrics.items() if name.startswith("val_")}
    assert len(validated) >= 2
    for name, value in validated.items():
        assert together.metrics[name] == pytest.approx(value, abs=1e-4)
    assert set(together.predict(table())["prediction"]) <= {0, 1, 2}


@pytest.mark.parametrize("passes", [1, 2])
def test_a_sum_over_rows_in_keras_does_not_depend_on_the_number_of_ranks(passes: int) -> None:
    import keras

    options = {
        **on_keras(keras.backend.backend()),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
        "optimizer": keras.optimizers.SGD(0.001),
        "accumulate": passes,
        "validation": None,
    }
    alone, together = (trained(keras_network, ranks=n, **options) for n in (1, 2))
    assert_same_weights(together, alone)


def assert_same_weights(result: Any, expected: Any) -> None:
    assert_close(result.model.get_weights(), expected.model.get_weights(), atol=2e-5)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_keras_network_continues_with_the_order_of_its_epoch(
    backend: str, tmp_path: Path
) -> None:
    whole = trained(keras_network, ranks=1, epochs=3, **on_keras(backend))
    kept = {**on_keras(backend), "checkpoint_dir": tmp_path, "resume": True}
    # Its schedule ends as that of three epochs does.
    kept["schedule"] = lambda step, steps: (1 + math.cos(math.pi * step / 21)) / 2
    trained(keras_network, ranks=2, epochs=1, **kept)
    resumed, again = (trained(keras_network, ranks=1, epochs=3, **kept) for _ in range(2))
    assert_same_weights(resumed, whole)
    assert list(resumed.history["val_loss"]) == pytest.approx(whole.history["val_loss"], abs=1e-4)
    assert again.metrics == pytest.approx(resumed.metrics)


@pytest.mark.parametrize(
    ("lacks", "error", "said"),
    [("loss", ValueError, "there is no loss"), ("optimizer", TypeError, "optimizer must be")],
)
def test_a_keras_network_that_is_not_compiled_needs_optimizer_and_loss(
    lacks: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras

    def network() -> Any:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])

    refuse_launches(monkeypatch)
    with pytest.raises(error, match=said):
        trained(network, **{"loss": "mse", "optimizer": "sgd", lacks: None})


def test_a_train_step_of_keras_uses_the_weights_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keras

    class Own(keras.Sequential):  # type: ignore[misc]
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            mean = keras.ops.mean(y_pred)
            return {"mean": mean, "time": mean, "of_classes": keras.ops.mean(y_pred, axis=0)}

    class Takes(Own):
        def train_step(self, data: Any) -> Any:
            x, y, weight = data
            return super().train_step((x, y, weight))

    class Ignores(Own):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data[:2])

    class Refuses(Own):
        def train_step(self, data: Any) -> Any:
            x, y = data
            return super().train_step((x, y))

    def network(kind: Any) -> Any:
        return kind([keras.Input((6,)), keras.layers.Dense(3)])

    options: dict[str, Any] = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "optimizer": "sgd",
        "epochs": 1,
        "preload_frameworks": ["keras", f"horovod.{keras.backend.backend()}"],
    }
    alone, together = (trained(lambda: network(Takes), ranks=n, **options) for n in (1, 2))
    assert_same_weights(together, alone)
    assert {*together.metrics} == {"mean", "time"}  # and not "of_classes", an array

    refuse_launches(monkeypatch)
    with pytest.raises(ValueError, match="Refuses takes no weights"):
        trained(network(Refuses), **options)
    with pytest.raises(LaunchedError), pytest.warns(match="Ignores does not use"):
        trained(network(Ignores), **options)


def test_a_lightning_module_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    import lightning
    import torch
    import torchmetrics

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = normalized()
            self.right = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
            self.all = torchmetrics.classification.MulticlassAUROC(3)  # keeps rows, not sums

        def forward(self, x: Any) -> Any:
            return self.layers(x["x"] if isinstance(x, dict) else x)

        def loss(self, batch: Any) -> Any:
            x, y = batch
            label = y[0] if isinstance(y, list) else y
            return torch.nn.functional.cross_entropy(self(x), label.long())

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log_dict({"val_loss": self.loss(batch)})
            for name, metric in {"val_accuracy": self.right, "val_auc": self.all}.items():
                metric.update(self(x), y[0] if isinstance(y, list) else y)
                self.log(name, metric)

        def on_train_epoch_end(self) -> None:
            odd = self.trainer.global_rank - (self.trainer.world_size - 1) / 2
            self.log("late", self.current_epoch + odd)  # on average over the ranks the epoch

        def configure_optimizers(self) -> Any:
            return adam(self.parameters())

    class Logs(lightning.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log("own", 2.0)

    options: dict[str, Any] = {
        "global_batch": 20,  # the last batch to validate with has a row, for one of the ranks
        "epochs": 2,
        "validation": "held_out",
        "patience": 5,
        "progress": False,
        "checkpoint_dir": tmp_path,
        "trainer_options": {"callbacks": Logs()},
        **WARM,
    }
    # Several inputs come by their names, several labels as a list.
    alone = fit(Module, table(), ranks=1, x={"x": "x", "w": "w"}, y="y", **options)
    together = fit(Module, table(), ranks=2, x="x", y=["y", "w"], **options)
    np.testing.assert_allclose(weights(together), weights(alone), atol=2e-5)
    names = {"train_loss", "val_loss", "val_accuracy", "val_auc", "late", "own"}
    assert set(together.metrics) == names
    assert together.metrics == pytest.approx(alone.metrics, abs=1e-6)
    assert together.history["late"] == [0, 1]
    assert [saved.metrics["late"] for saved in together.run.checkpoints] == [0, 1]
    assert [row["late"] for row in together.run.metrics.to_pylist()] == [0, 1]
