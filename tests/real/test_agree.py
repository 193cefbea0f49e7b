"""agree: ranks take decisions together, by whatever library connects them."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest

from horovod_runner import HorovodRunner, agree
from horovod_runner.common.options import grouped
from tests.errors import error_of

pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("tensorflow")]
LIBRARIES = ("horovod.torch", "torch", "horovod.tensorflow")


def decide(library: str) -> list[Any]:
    """What each rank gets for its own values."""
    import os
    from importlib import import_module

    import numpy as np

    rank = int(os.environ["RANK"])
    not_connected = error_of(RuntimeError, agree, rank)
    if library == "torch":
        import torch.distributed as dist

        dist.init_process_group()
    else:
        import_module(library).init()
    found = [
        agree({"rank": rank, "width": [32, 64, 128][rank]}),
        agree(rank == 1, "any"),
        agree(rank == 1, "all"),
        agree(np.float32(rank + 0.5), "mean"),
        agree(rank - 5, "min"),
        agree(rank, "max"),
        agree(math.nan if rank == 2 else 1.0, "max"),
        agree(math.inf if rank == 2 else 1.0, "mean"),
        agree(rank if rank else 0.5, "max"),
        agree(rank or 0.5, "min"),
        agree(2**60 + rank, "max"),
        agree(math.inf if rank else 1, "max"),
    ]
    # All ranks raise it, and can go on. The error names the file, which has both calls.
    wrong = error_of(RuntimeError, lambda: agree(rank, "max") if rank == 0 else agree(rank, "min"))
    everything = [*found, not_connected, wrong, agree(True, "all")]
    if library == "torch":
        gathered: list[Any] = [None] * 3
        dist.all_gather_object(gathered, everything)
        return gathered
    return list(import_module(library).allgather_object(everything))


@cache
def decisions(library: str) -> list[list[Any]]:
    frameworks = ["horovod.torch", "horovod.tensorflow"]
    options = grouped({"preload_frameworks": frameworks, "hang_timeout": 30})
    return list(HorovodRunner(np=-3, **options).run(decide, library=library))


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_ranks_get_the_same_decision(library: str) -> None:
    for found in decisions(library):
        *decided, not_a_number, mean = found[:8]
        assert [(type(each), each) for each in found[8:12]] == [
            (int, 2),
            (float, 0.5),
            (int, 2**60 + 2),
            (float, math.inf),
        ]
        assert decided == [{"rank": 0, "width": 32}, True, False, 1.5, -5, 2]
        assert [type(each) for each in decided[1:]] == [bool, bool, float, int, int]
        assert math.isnan(not_a_number)
        assert mean == math.inf


@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks_at_different_places_are_told_where_each_is(library: str) -> None:
    for found in decisions(library):
        assert "hvd.init()" in found[12]
        told = found[13]
        assert "rank 0 agree(how='max') at test_agree.py:" in told
        assert "rank 1 agree(how='min') at test_agree.py:" in told
        assert "rank 2 agree(how='min') at test_agree.py:" in told
        assert found[14] is True


def test_one_process_decides_alone() -> None:
    assert agree("wide") == "wide"
    assert agree(3, "min") == 3
    assert agree(3, "mean") == 3.0
    assert agree([], "any") is False


def test_other_values_and_ways_are_refused() -> None:
    with pytest.raises(TypeError, match=r"how='mean'.*str"):
        agree("wide", "mean")
    with pytest.raises(ValueError, match=r"rank 0, any, all, mean, min, max.*'median'"):
        agree(1, "median")  # type: ignore[call-overload]
