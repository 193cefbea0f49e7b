"""Runs that are slow on purpose: the diagnosis names the cause and the rank."""

from __future__ import annotations

import time
from typing import Any

import pytest

from horovod_runner.results.run import Run
from horovod_runner.results.slowness.lines import user_lines
from tests.conftest import Ranks

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("nothing_left")]


def compute_slowly(seconds: float) -> None:
    time.sleep(seconds)


def train(steps: int, slow_rank: int, seconds: float) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        if hvd.rank() == slow_rank:
            compute_slowly(seconds)
        else:
            time.sleep(0.01)
        optimizer.step()


def finished(ranks: Ranks, main: Any, **arguments: Any) -> Run:
    runner = ranks.runner(2)
    runner.run(main, **arguments)
    assert runner.last_run is not None
    return runner.last_run


def test_the_rank_that_holds_the_others_up_is_named_with_its_line(ranks: Ranks) -> None:
    run = finished(ranks, train, steps=60, slow_rank=1, seconds=0.05)
    found = run.diagnose()
    assert found.ranks == 2
    assert 20 <= found.steps < 60  # without those of the first second
    (finding,) = [finding for finding in found.findings if finding.cause == "slow rank"]
    assert (finding.rank, finding.reason) == (1, "compute")
    assert "compute_slowly" in finding.text
    table = run.profile.to_pandas()
    assert set(table["rank"]) == {0, 1}
    assert table["steps"].groupby(table["rank"]).sum().tolist() == [60, 60]


@pytest.mark.places("local")
def test_an_even_run_accuses_nobody(ranks: Ranks) -> None:
    """Other tests may take a core from a rank, which is then named for that."""
    found = finished(ranks, train, steps=60, slow_rank=-1, seconds=0.0).diagnose()
    assert [each for each in found.findings if each.reason not in ("cpu", "others")] == []


@pytest.mark.places("local")
def test_the_profile_can_be_switched_off(ranks: Ranks) -> None:
    runner = ranks.runner(2, profile=False)
    runner.run(train, steps=2, slow_rank=-1, seconds=0.0)
    assert runner.last_run is not None
    assert runner.last_run.profile.totals == {}


class Rows:
    """A dataset whose rows take long."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, number: int) -> Any:
        import torch

        compute_slowly(0.003)
        return torch.ones(8)


def train_with_loader(steps: int, processes: int, backend: str | None = "gloo") -> None:
    import torch
    import torch.distributed

    torch.distributed.init_process_group(backend)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=processes)  # type: ignore[arg-type]
    rank = torch.distributed.get_rank()
    for step, batch in enumerate(loader):
        if step == steps:
            break
        loss = model(batch).sum()
        if rank == 1 and not processes:
            compute_slowly(0.05)
        loss.backward()
        optimizer.step()
    torch.distributed.destroy_process_group()


@pytest.mark.places("local")
@pytest.mark.parametrize("backend", ["gloo", None])  # None is ours where there is MPI
def test_trainings_without_horovod_are_measured_too(ranks: Ranks, backend: str | None) -> None:
    run = finished(ranks, train_with_loader, steps=60, processes=0, backend=backend)
    found = run.diagnose()
    (finding,) = [finding for finding in found.findings if finding.cause == "slow rank"]
    assert (finding.rank, finding.reason) == (1, "compute")
    assert found.step is not None
    assert found.step.data > 0.02
    assert found.step.waiting > 0.01


@pytest.mark.places("local")
def test_the_lines_of_the_processes_of_a_dataloader_are_seen(ranks: Ranks) -> None:
    run = finished(ranks, train_with_loader, steps=40, processes=1)
    lines = user_lines(run.profile, 0, "loader")
    assert "compute_slowly" in next(iter(lines))
    assert "compute_slowly" in run.profile.flame(0, thread="loader")
