"""Decisions of all ranks in Lightning, with stand-ins for Lightning, torch and Horovod."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.modules import load_anew


@pytest.mark.parametrize(
    ("true_ranks", "expected_all", "expected_any"),
    [(0, False, False), (1, False, True), (2, True, True)],
)
def test_a_boolean_is_reduced_over_all_ranks_or_any_rank(
    monkeypatch: pytest.MonkeyPatch, true_ranks: int, expected_all: bool, expected_any: bool
) -> None:
    hvd: Any = ModuleType("horovod.torch")
    hvd.Average, hvd.Sum, hvd.Max, hvd.Min = range(4)
    hvd.size = lambda: 2
    hvd.allreduce = lambda number, name, op: {hvd.Sum: true_ranks}[op]
    torch: Any = ModuleType("torch")
    torch.Tensor = torch.tensor = int
    strategies = SimpleNamespace(ParallelStrategy=object)
    pytorch = SimpleNamespace(Callback=object, strategies=strategies)
    replacements = {
        "horovod": SimpleNamespace(torch=hvd),
        "horovod.torch": hvd,
        "torch": torch,
        "lightning": SimpleNamespace(pytorch=pytorch),
        "lightning.pytorch": pytorch,
        "lightning.pytorch.strategies": strategies,
    }
    for name, module in replacements.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = load_anew("horovod_runner.lightning")  # other tests may import it with Lightning
    strategy = module.HorovodStrategy.__new__(module.HorovodStrategy)
    strategy._calls = 0
    assert strategy.reduce_boolean_decision(True) is expected_all
    assert strategy.reduce_boolean_decision(True, all=False) is expected_any
