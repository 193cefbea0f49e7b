"""What the callbacks hand to Horovod; a few lines stand for Keras and for Horovod."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from horovod_runner.keras import collectives
from tests.unit.modules import load_anew


class Callback:
    """Keras's."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}

    def set_model(self, model: Any) -> None:
        self.model = model


class TwoRanks:
    """Collectives that remember what was broadcast, and from where."""

    hvd = SimpleNamespace(size=lambda: 2)

    def __init__(self) -> None:
        self.handed: list[tuple[list[str], int]] = []

    def gather(self, numbers: list[int], name: str) -> list[list[int]]:
        return [numbers, numbers]

    def broadcast_variables(self, variables: Iterable[Any], root_rank: int) -> None:
        self.handed.append(([variable.name for variable in variables], root_rank))


def variables(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name, value=object()) for name in names]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    found = TwoRanks()
    monkeypatch.setattr(collectives, "collectives", lambda: found)
    return found


@pytest.fixture
def callbacks(ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module; other tests may want it with Keras."""
    keras: Any = ModuleType("keras")
    keras.callbacks = SimpleNamespace(Callback=Callback)
    keras.backend = SimpleNamespace(backend=lambda: "torch")
    reporting: Any = ModuleType("reporting")
    reporting.LogCallback = reporting.ReportCallback = reporting.check_epoch = None
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.setitem(sys.modules, "horovod_runner.keras.reporting", reporting)
    return load_anew("horovod_runner.keras.callbacks")


@pytest.mark.parametrize("root", [0, 1])
def test_weights_and_the_optimizers_state_are_those_of_the_root(
    callbacks: ModuleType, ranks: TwoRanks, root: int
) -> None:
    weights, state = variables("kernel", "bias"), variables("iterations", "momentum")
    layer = SimpleNamespace(built=True)
    model = SimpleNamespace(
        weights=weights,
        variables=[*weights, *variables("seed")],
        optimizer=SimpleNamespace(built=True, variables=state),
        built=True,
        _flatten_layers=lambda: [layer],
    )
    callback = callbacks.BroadcastGlobalVariablesCallback(root, local_variables=weights[1:])
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_train_begin()  # of another fit
    assert ranks.handed == [(["kernel", "iterations", "momentum"], root)]
