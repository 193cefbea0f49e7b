"""weight_check: the weights of all ranks are compared, by both launchers."""

from __future__ import annotations

import pytest

from horovod_runner import SyncError
from tests.conftest import Ranks

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]


def compare(differs_after: int, epochs: int = 3, ranks: int = 2) -> str:
    """Weights that are equal on all ranks, up to an epoch."""
    import os

    import numpy

    from horovod_runner import check_weights

    rank = int(os.environ["RANK"])
    if rank >= ranks:
        return "left out"
    weights = {"first": numpy.zeros(3, "float32"), "second": numpy.ones((2, 2))}
    for epoch in range(1, epochs + 1):
        weights["first"] += epoch
        if epoch > differs_after and rank > 0:
            weights["second"][1, 1] += 1e-9 * rank
        check_weights(weights, epoch)
    return "done"


def test_equal_weights_pass(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks.run(2, compare, {"weight_check": "epoch"}, differs_after=3) == "done"
    assert "weight_check" not in capsys.readouterr().err


@pytest.mark.places("local", "spark", "cluster")
def test_the_first_rank_and_variable_that_differ_are_named(ranks: Ranks) -> None:
    told = r"epoch 2: rank 1 .*rank 0, .*second \(1 of 2 "
    with pytest.raises(SyncError, match=told):
        ranks.run(3, compare, {"weight_check": "epoch"}, differs_after=1, ranks=3)


def test_without_the_option_nothing_is_compared(ranks: Ranks) -> None:
    assert ranks.run(2, compare, differs_after=0) == "done"


def test_a_check_that_never_was_is_told(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks.run(2, compare, {"weight_check": "epoch"}, differs_after=3, ranks=1) == "done"
    assert "the ranks' weights were never compared" in capsys.readouterr().err
