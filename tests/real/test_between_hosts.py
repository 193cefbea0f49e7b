"""The allreduce over MPI between hosts: its sums, with ranks that MPICH takes for several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.common.options import grouped

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(300)]
HOSTS, RANKS = 3, 6
# Below and above the size from which it is used, and pieces and parts that are not all the same.
COUNTS = (1, 100_000, 1_000_003, 7_500_001)


Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a function on a number of ranks that MPICH takes for those of HOSTS hosts."""
    names = tmp_path / "names"

    def on_hosts(ranks: int, main: Callable[..., Any], **kwargs: Any) -> Any:
        def main_on_host() -> Any:
            value = main(**kwargs)
            mapped = Path("/proc/self/maps").read_text().split()
            with names.open("a") as file:
                print(*(name for name in mapped if name.startswith("/dev/shm/mpich")), file=file)
            return value

        options = {"cpu_collectives": "mpi", "preload_frameworks": ["horovod.torch"]}
        env = {"MPIR_CVAR_NUM_CLIQUES": str(HOSTS)}
        return HorovodRunner(np=-ranks, env=env, **grouped(options)).run(main_on_host)

    yield on_hosts
    # What MPICH leaves of the first host is removed by the package, as of any one host's.
    for name in set(names.read_text().split()):
        Path(name).unlink(missing_ok=True)


def wrong_sums() -> list[list[Any]]:
    """The cases of every rank whose sums are wrong."""
    import horovod.torch as hvd
    import torch

    one_of_each_host, unequal = hvd.ProcessSet([0, 2, 4]), hvd.ProcessSet([0, 1, 2])
    hvd.init(process_sets=[one_of_each_host, unequal])
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (RANKS, RANKS // HOSTS, HOSTS)
    wrong: list[Any] = []

    def check(case: Any, total: Any, expected: Any) -> None:
        if not torch.equal(total, expected.to(total.dtype)):
            wrong.append(case)

    for count in COUNTS:
        base = torch.arange(count) % 101
        for dtype in (torch.float32, torch.float16, torch.int64):
            own = (base + hvd.rank()).to(dtype)
            total = hvd.allreduce(own, op=hvd.Sum)
            check((count, dtype), total, RANKS * base + sum(range(RANKS)))
            assert torch.equal(own, (base + hvd.rank()).to(dtype))
    check("max", hvd.allreduce(base + hvd.rank(), op=hvd.Max), base + RANKS - 1)
    fused = [torch.full((count,), float(hvd.rank())) for count in (500_000, 500_001)]
    for total in hvd.grouped_allreduce(fused, op=hvd.Sum):
        check("fused", total, torch.full_like(total, sum(range(RANKS))))
    for process_set in (one_of_each_host, unequal):
        if process_set.included():
            name = f"of ranks {process_set.ranks}"
            total = hvd.allreduce(base + hvd.rank(), name=name, op=hvd.Sum, process_set=process_set)
            check(process_set.ranks, total, 3 * base + sum(process_set.ranks))
    return list(hvd.allgather_object(wrong))


def test_sums_over_ranks_of_several_hosts_are_right(run: Run) -> None:
    assert run(RANKS, wrong_sums) == [[]] * RANKS


def ranks_with_a_wrong_sum(count: int) -> list[int]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    base = torch.arange(count) % 101
    total = hvd.allreduce(base + hvd.rank(), op=hvd.Sum)
    expected = hvd.size() * base + sum(range(hvd.size()))
    wrong = hvd.allgather_object([hvd.rank()] if not torch.equal(total, expected) else [])
    return [rank for ranks in wrong for rank in ranks]


@pytest.mark.parametrize("count", [100, 7_500_001])
def test_hosts_have_different_numbers_of_ranks(run: Run, count: int) -> None:
    assert run(5, ranks_with_a_wrong_sum, count=count) == []
