"""Lightning with Horovod, with stand-ins for Lightning, torch and Horovod."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from horovod_runner.integrations.lightning_ranks import devices_of_ranks
from tests.stand_ins import as_rank
from tests.unit.modules import load_anew


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module horovod_runner.integrations.lightning."""
    hvd: Any = ModuleType("horovod.torch")
    hvd.Average, hvd.Sum, hvd.Max, hvd.Min = range(4)
    hvd.size = lambda: 2
    hvd.global_process_set = None
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
    # Other tests may import it with Lightning.
    return load_anew("horovod_runner.integrations.lightning")


@pytest.mark.parametrize(
    ("true_ranks", "expected_all", "expected_any"),
    [(0, False, False), (1, False, True), (2, True, True)],
)
def test_a_boolean_is_reduced_over_all_ranks_or_any_rank(
    lightning: Any, true_ranks: int, expected_all: bool, expected_any: bool
) -> None:
    hvd = lightning.hvd
    hvd.allreduce = lambda number, name, op: {hvd.Sum: true_ranks}[op]
    strategy = lightning.HorovodStrategy.__new__(lightning.HorovodStrategy)
    strategy._calls = 0
    assert strategy.reduce_boolean_decision(True) is expected_all
    assert strategy.reduce_boolean_decision(True, all=False) is expected_any


class Weight:
    requires_grad, grad = True, 1.0


class Lookahead:
    """An optimizer with another one inside, as torch_optimizer's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_an_optimizer_that_holds_another_is_averaged(
    lightning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaged: list[Any] = []
    monkeypatch.setattr(lightning, "average_gradients", lambda own, *_: averaged.extend(own))
    weight = Weight()
    inner = SimpleNamespace(param_groups=[{"params": [weight]}])
    strategy = lightning.HorovodStrategy.__new__(lightning.HorovodStrategy)
    strategy._trained, strategy._dense = set(), set()
    strategy.lightning_module = SimpleNamespace(automatic_optimization=False)
    strategy.optimizers = [Lookahead(inner)]
    strategy.average_before_clip([weight])
    assert averaged == [weight]


class Trainer:
    """Trains as Lightning's does with ``accumulate_grad_batches=2``."""

    callback_metrics: ClassVar = {"loss": 0.5}
    is_last_batch = False
    current_epoch = 0

    def __init__(self, global_step: int = 0) -> None:
        self.global_step = global_step

    def save_checkpoint(self, path: Path) -> None:
        path.touch()

    def train(self, callback: Any, steps: int, module: Any = None) -> None:
        module = module or Module()
        callback.on_train_start(self, module)
        for index in range(2 * steps):
            self.global_step += index % 2
            callback.on_train_batch_end(self, None, None, None, index)
        module.on_train_epoch_end()
        callback.on_train_end(self, module)


class Module:
    """Logs a metric at the end of an epoch."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def on_train_epoch_end(self) -> None:
        self.logged["late"] = 2.0


def test_a_step_of_several_batches_is_saved_once(lightning: Any) -> None:
    def callback() -> Any:
        return lightning.ReportCallback(every=0, save_every=0, save_steps=2)

    def saved() -> list[int]:
        return [step for _, step, _ in rank.checkpoints_saved]

    with as_rank(0, 2) as rank:
        Trainer().train(first := callback(), 5)
        assert saved() == [2, 4]
        Trainer(4).train(callback(), 5)  # resumed
        assert saved() == [2, 4, 6, 8]
        Trainer().train(first, 5)  # another training
        assert saved() == [2, 4, 6, 8, 2, 4]


def test_what_the_module_logs_at_the_end_of_an_epoch_is_of_that_epoch(
    lightning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "callback_metrics", (module := Module()).logged)
    with as_rank(0, 2) as rank:
        Trainer().train(lightning.ReportCallback(every=0), 1, module)
        assert rank.reported == [({"late": 2.0}, 1, 0, None)]
        assert [numbers for *_, numbers in rank.checkpoints_saved] == [{"late": 2.0, "epoch": 0}]
        module.on_train_epoch_end()  # of a training without the callback
        assert len(rank.reported) == 1


@pytest.mark.parametrize(
    ("accumulated", "automatic", "total"), [(1, True, 27), (2, True, 15), (1, False, None)]
)
def test_the_steps_of_a_training_are_counted_as_lightning_counts_them(
    lightning: Any, accumulated: int, automatic: bool, total: int | None
) -> None:
    trainer = SimpleNamespace(
        max_steps=-1,
        max_epochs=3,
        num_training_batches=9,
        accumulate_grad_batches=accumulated,
        lightning_module=SimpleNamespace(automatic_optimization=automatic),
        global_step=1,
        current_epoch=0,
        callback_metrics={},
    )
    with as_rank(0, 2) as rank:
        lightning.ReportCallback(every=1).on_train_batch_end(trainer, None, None, None, 0)
    assert rank.reported == [({}, 1, 0, total)]


OF_FSDP = SimpleNamespace(strategy_name="fsdp", parallel_devices=None)


@pytest.mark.parametrize(
    ("strategy", "found"),
    [
        ("ddp", {"devices": 2, "num_nodes": 2}),
        (OF_FSDP, {"devices": 2, "num_nodes": 2}),
        ("auto", {}),
        ("ddp_spawn", {}),
        (SimpleNamespace(strategy_name="horovod", parallel_devices=None), {}),
        (SimpleNamespace(strategy_name="single_device"), {}),
    ],
)
def test_a_trainer_takes_the_ranks_that_there_are(
    strategy: Any, found: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert devices_of_ranks(strategy) == {}  # outside a run
    with as_rank(0, 4):
        assert devices_of_ranks(strategy) == found
    with as_rank(0, 3):  # hosts with 2 ranks and with 1
        assert devices_of_ranks(strategy) == {}
