"""The weight check: hashing on the ranks, comparing on the driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_runner import SyncError
from horovod_runner.driver.sync_check import SyncCheck
from horovod_runner.wire.messages import Weights
from horovod_runner.worker.weights import hash_weights


class Variable:
    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.value = value


def test_only_rank_0_sends_names() -> None:
    weights = {"a": np.zeros(2), "b": np.ones(2)}
    first, second = (hash_weights(weights, rank, 4) for rank in (0, 1))
    assert (first.names, second.names) == (["a", "b"], [])
    assert first.digests == second.digests
    assert len(set(first.digests)) == 2
    assert (first.epoch, second.rank) == (4, 1)


def test_variables_are_named_by_their_path_or_their_index() -> None:
    weights = hash_weights([Variable("dense/kernel", np.zeros(2)), np.zeros(2)], 0, None)
    assert weights.names == ["dense/kernel", "1"]
    assert weights.digests[0] == weights.digests[1]


def test_models_and_lists_may_be_nested() -> None:
    class Model:
        trainable_variables = (Variable("dense/kernel", np.zeros(2)),)

    weights = hash_weights({"g": Model(), "d": [np.ones(1), np.ones(2)], "c": np.zeros(2)}, 0, None)
    assert weights.names == ["g/dense/kernel", "d/0", "d/1", "c"]
    assert weights.digests[0] == weights.digests[3]


@pytest.mark.parametrize("model", [3, {}, {"a": "text"}, [None]])
def test_an_argument_without_weights_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="check_weights"):
        hash_weights(model, 0, None)


@pytest.mark.parametrize("odd", [1, 2])
def test_weights_are_compared_once_all_ranks_have_sent_theirs(odd: int) -> None:
    check = SyncCheck(3)
    for rank, digest in ((0, b"x"), (0, b"y"), (3 - odd, b"x"), (3 - odd, b"y"), (odd, b"x")):
        check.take(Weights(rank, ["a"], [digest], None))
    assert check.compared == 1
    with pytest.raises(SyncError, match=f"rank {odd} is the first that differs from rank 0, in a"):
        check.take(Weights(odd, [], [b"z"], None))


def test_a_rank_that_checks_alone_ends_the_run() -> None:
    check, message = SyncCheck(2), Weights(1, [], [b"x"], None)
    for _ in range(100):
        check.take(message)
    with pytest.raises(SyncError, match="rank 1 checked its weights 101 times more often than"):
        check.take(message)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Weights(1, [], [b"x"], 3), "rank 1 checked its weights after epoch 3 and rank 0"),
        (Weights(1, [], [b"x", b"y"], 2), "rank 1 has 2 weights after epoch 2, and rank 0 has 1"),
        (Weights(1, [], [b"y"], 2), "in one .1 of 1 weights."),  # rank 0 sent no name
    ],
)
def test_other_differences_end_the_run(other: Weights, text: str) -> None:
    check = SyncCheck(2)
    check.take(Weights(0, [], [b"x"], 2))
    with pytest.raises(SyncError, match=text):
        check.take(other)
