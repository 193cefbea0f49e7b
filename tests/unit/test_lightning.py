"""What the ranks decide together; a few lines stand for Lightning, torch and Horovod."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.modules import load_anew


@pytest.mark.parametrize(
    ("decided", "all_of_them", "any_of_them"),
    [(0, False, False), (1, False, True), (2, True, True)],
)
def test_a_decision_is_that_of_all_ranks_or_of_any(
    monkeypatch: pytest.MonkeyPatch, decided: int, all_of_them: bool, any_of_them: bool
) -> None:
    hvd: Any = ModuleType("horovod.torch")
    hvd.Average, hvd.Sum, hvd.Max, hvd.Min = range(4)
    hvd.size = lambda: 2
    hvd.allreduce = lambda number, name, op: {hvd.Sum: decided}[op]
    torch: Any = ModuleType("torch")
    torch.Tensor = torch.tensor = int
    strategies = SimpleNamespace(ParallelStrategy=object)
    pytorch = SimpleNamespace(Callback=object, strategies=strategies)
    stands = {
        "horovod": SimpleNamespace(torch=hvd),
        "horovod.torch": hvd,
        "torch": torch,
        "lightning": SimpleNamespace(pytorch=pytorch),
        "lightning.pytorch": pytorch,
        "lightning.pytorch.strategies": strategies,
    }
    for name, module in stands.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = load_anew("horovod_runner.lightning")  # other tests may want it with Lightning
    strategy = module.HorovodStrategy.__new__(module.HorovodStrategy)
    strategy._handed = 0
    assert strategy.reduce_boolean_decision(True) is all_of_them
    assert strategy.reduce_boolean_decision(True, all=False) is any_of_them
