"""The settings of a reduction of gradients, with a stand-in for Horovod."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner.integrations.keras.reduction import (
    Reduction,
    SentAsBFloat16,
    by_type,
    groups_of,
)

HVD = SimpleNamespace(Average="average", Sum="sum", Adasum="adasum", Min="min", size=lambda: 4)
PLAIN = SimpleNamespace(compress=None, decompress=None)
TORCHS = SimpleNamespace(compress=None, decompress=None, reduce=None)  # of horovod.torch alone
KEYS = ["a", "b", "c", "d", "e"]


def process_set(number: int | None = 1, included: bool = True) -> Any:
    return SimpleNamespace(process_set_id=number, size=lambda: 2, included=lambda: included)


def variable(name: str) -> Any:
    return SimpleNamespace(name=name, path=name)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(None, None, id="each alone"),
        pytest.param(2, ((0, 1, 2), (3, 4)), id="a number"),
        pytest.param(
            [[variable("e"), variable("b")], [variable("x")]],
            ((0,), (1, 4), (2,), (3,)),
            id="lists",
        ),
    ],
)
def test_gradients_are_split_into_groups(groups: Any, expected: Any) -> None:
    reduction = Reduction("average", PLAIN, groups=groups_of(groups, lambda v: v.name))
    assert reduction.partition(KEYS) == expected


def test_groups_are_split_by_type() -> None:
    types = {0: "float32", 1: "float16", 3: "float32", 4: "float16"}
    assert by_type([[0, 1, 2, 3], [4]], types) == [[0, 3], [1], [4]]


@pytest.mark.parametrize("groups", [True, "two", 2.0, [variable("a")]])
def test_groups_are_a_number_or_lists(groups: Any) -> None:
    with pytest.raises(TypeError, match=r"^groups .*list of lists"):
        groups_of(groups, id)


def test_a_variable_is_in_one_group_only() -> None:
    twice = variable("dense/kernel")
    with pytest.raises(ValueError, match=r"dense/kernel .*groups"):
        groups_of([[twice, variable("dense/bias")], [twice]], id)


def test_a_process_set_is_where_and_over_how_many_ranks_is_reduced() -> None:
    ranks = process_set()
    reduction = Reduction("average", PLAIN, predivide=4.0, process_set=ranks)
    assert reduction.size(HVD) == 2
    options = reduction.options(HVD)
    assert options.pop("process_set") is ranks
    assert options == {"op": "sum", "prescale_factor": 0.25, "postscale_factor": 2.0}


def test_a_rank_outside_of_the_process_set_reduces_with_nobody() -> None:
    assert Reduction("average", PLAIN, process_set=process_set(included=False)).size(HVD) == 1
    assert Reduction("average", PLAIN).size(HVD) == 4


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"op": "adasum"}, ValueError, r"^op .*Adasum: .*op=hvd\.Average"),
        ({"op": "min"}, ValueError, "^op .*Average or Sum:"),
        ({"predivide": 0.0}, ValueError, r"gradient_predivide_factor .* 0, .*0\.0$"),
        ({"op": "sum", "predivide": 2.0}, ValueError, "gradient_predivide_factor .*op=Average"),
        ({"groups": -1}, ValueError, "^groups .* 0 .* -1$"),
        ({"compression": "fp16"}, TypeError, "^compression .*'fp16'$"),
        ({"compression": TORCHS}, TypeError, r"^compression .*Compression\.none, fp16 or bf16"),
        (
            {"compression": SentAsBFloat16, "groups": 2},
            ValueError,
            r"Compression\.bf16 .*gradient_predivide_factor or groups",
        ),
        ({"process_set": [0, 1]}, TypeError, r"^process_set .*hvd\.ProcessSet, .*\[0, 1\]"),
        ({"process_set": process_set(None)}, ValueError, "hvd.init.process_sets="),
    ],
)
def test_settings_that_are_not_supported_name_the_way_out(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Reduction(**{"op": "average", "compression": PLAIN, **settings}).check(HVD)


def test_supported_settings_pass() -> None:
    Reduction("sum", PLAIN, groups=3, process_set=process_set()).check(HVD)
    Reduction("average", SentAsBFloat16).check(HVD)
