"""What the Keras callbacks broadcast, with stand-ins for Keras and Horovod."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from horovod_runner.integrations.keras import collectives
from tests.unit.modules import load_anew


class Callback:
    """Stands for keras.callbacks.Callback."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}

    def set_model(self, model: Any) -> None:
        self.model = model


class TwoRanks:
    """Stands for the collectives; records the broadcast variables and their root."""

    hvd = SimpleNamespace(size=lambda: 2)

    def __init__(self) -> None:
        self.broadcasts: list[tuple[list[str], int]] = []

    def gather(self, numbers: list[int], name: str) -> list[list[int]]:
        return [numbers, numbers]

    def broadcast_variables(self, variables: Iterable[Any], root_rank: int) -> None:
        self.broadcasts.append(([variable.name for variable in variables], root_rank))


def variables(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name, value=object()) for name in names]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    two_ranks = TwoRanks()
    monkeypatch.setattr(collectives, "collectives", lambda: two_ranks)
    return two_ranks


@pytest.fixture
def callbacks(ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with the stand-ins; other tests may import it with Keras."""
    keras: Any = ModuleType("keras")
    keras.callbacks = SimpleNamespace(
        Callback=Callback, EarlyStopping=Callback, ReduceLROnPlateau=Callback
    )
    keras.backend = SimpleNamespace(backend=lambda: "torch")
    reporting: Any = ModuleType("reporting")
    reporting.check_epoch = None
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.setitem(sys.modules, "horovod_runner.keras.reporting", reporting)
    base = load_anew("horovod_runner.integrations.keras.batch_counts")
    monkeypatch.setitem(sys.modules, "horovod_runner.integrations.keras.batch_counts", base)
    return load_anew("horovod_runner.integrations.keras.collective_callbacks")


@pytest.mark.parametrize("root", [0, 1])
def test_weights_and_optimizer_state_are_broadcast_from_the_root(
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
    callback.on_train_begin()  # a second fit broadcasts nothing
    assert ranks.broadcasts == [(["kernel", "iterations", "momentum"], root)]
