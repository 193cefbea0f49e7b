"""Gradient scalers and clipping with Horovod's optimizer train what DDP trains."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.conftest import Ranks
from tests.preload import TORCH
from tests.real import mixed_precision_training as training

# One run trains all, and pytest-xdist's processes do not share runs.
pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("mixed precision")]


@cache
def results() -> Any:
    return Ranks("local", warm=TORCH).run(2, training.main)


@pytest.mark.parametrize("name", training.CASES)
def test_scaled_and_clipped_gradients_train_what_ddp_trains(name: str) -> None:
    for rank, (found, *_) in enumerate(results()):
        case, result = training.CASES[name], found[name]
        assert result["difference"] < 1e-6
        assert result["scales"] == result["their scales"]
        skips = case.scaled and (not case.alone or rank == 1)
        assert result["scales"][-1] == (512.0 if skips else 1024.0 if case.scaled else 1.0)
        moved = [True] * training.STEPS
        moved[training.INFINITE] = not skips
        assert result["moved"] == moved


def test_a_scaler_with_adasum_is_refused() -> None:
    for _, errors, *_ in results():
        assert len(errors) == 2
        assert all("op=Adasum" in error for error in errors)


def test_a_rank_without_gradients_takes_part() -> None:
    (_, _, first, _), (_, _, second, _) = results()
    assert first == second
    assert first[0] != first[1] != first[2]


@pytest.mark.parametrize("name", training.LEFT_OUT)
def test_a_rank_that_leaves_backward_out_clips_as_the_others(name: str) -> None:
    (*_, first), (*_, second) = results()
    for ours, theirs in zip(first[name], second[name], strict=True):
        assert all(one.equal(other) for one, other in zip(ours, theirs, strict=True))
