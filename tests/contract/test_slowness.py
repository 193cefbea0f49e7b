"""Runs that are slow on purpose: the diagnosis names the cause and the rank."""

from __future__ import annotations

import time
from typing import Any

import pytest

from horovod_runner.results.run import Run
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
    assert found.findings, str(found)
    assert (found.findings[0].cause, found.findings[0].rank) == ("slow rank", 1)
    assert "compute_slowly" in found.findings[0].text
    table = run.profile.to_pandas()
    assert set(table["rank"]) == {0, 1}
    assert table["steps"].groupby(table["rank"]).sum().tolist() == [60, 60]


def test_an_even_run_accuses_nobody(ranks: Ranks) -> None:
    found = finished(ranks, train, steps=60, slow_rank=-1, seconds=0.0).diagnose()
    assert [finding for finding in found.findings if finding.rank is not None] == []


def test_the_profile_can_be_switched_off(ranks: Ranks) -> None:
    runner = ranks.runner(2, profile=False)
    runner.run(train, steps=2, slow_rank=-1, seconds=0.0)
    assert runner.last_run is not None
    assert runner.last_run.profile.totals == {}
