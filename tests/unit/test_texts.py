"""Sizes, counts and types in messages for people."""

from __future__ import annotations

import pytest

from horovod_runner import load_checkpoint
from horovod_runner.checkpoints.snapshot import Copier
from horovod_runner.common.numbers import check_saved
from horovod_runner.common.text import count_text, sizes_text
from horovod_runner.worker.weights import hash_weights


def test_sizes_that_differ_look_different() -> None:
    assert sizes_text(2.0e9, 3.5e9) == ["2.0 GB", "3.5 GB"]
    assert sizes_text(7, 7) == ["7 bytes", "7 bytes"]
    assert sizes_text(2_147_483_649, 2_147_483_648, 0) == [
        "2,147,483,649 bytes",
        "2,147,483,648 bytes",
        "0 bytes",
    ]


def test_one_is_singular() -> None:
    counted = [count_text(count, "rank") for count in (0, 1, 2, 1024)]
    assert counted == ["0 ranks", "1 rank", "2 ranks", "1,024 ranks"]


def test_types_are_named_without_an_article() -> None:
    with pytest.raises(TypeError, match=r"must be a number, .* got object"):
        check_saved(1, {"loss": object()})
    with pytest.raises(TypeError, match=r"state\['x'\] has the type object"):
        Copier().copy({"x": object()})
    with pytest.raises(TypeError, match=r"must be a torch module, .* got int"):
        hash_weights(3, 0, None)
    with pytest.raises(TypeError, match="into must be a dict, got int"):
        load_checkpoint(into=3)  # type: ignore[arg-type]
