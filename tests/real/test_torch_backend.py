"""The backend hvd of torch.distributed with real ranks: what it computes, and how calls fail."""

from __future__ import annotations

import os
import signal
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner import HangError, RankFailedError
from horovod_runner.integrations import torch_backend
from tests.conftest import Ranks
from tests.errors import error_of

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.places("local"),
    pytest.mark.usefixtures("nothing_left"),
]


@pytest.fixture(autouse=True)
def mpi(ranks: Ranks) -> None:
    ranks.needs_mpi()


class PartialState:
    """Chooses a backend as accelerate.state.PartialState does on CPUs."""

    def _prepare_backend(self, cpu: bool, sagemaker: bool = False, backend: Any = None) -> Any:
        return "gloo", "MULTI_CPU"


# MPICH takes each rank for a host with the first variable. With the second one it sees two hosts:
# the ranks with even numbers, and those with odd ones.
@pytest.mark.parametrize(
    ("size", "hosts"),
    [(3, ""), (5, "MPIR_CVAR_NOLOCAL"), (4, "MPIR_CVAR_ODD_EVEN_CLIQUES")],
    ids=["one-host", "five-hosts", "two-hosts"],
)
def test_every_call_gives_what_gloo_gives(ranks: Ranks, size: int, hosts: str) -> None:
    def main() -> Any:
        import horovod.torch as hvd
        import torch
        import torch.distributed as dist

        from tests.real.distributed_calls import different_results, missing_beyond_gloo

        if hosts:
            os.environ[hosts] = "1"
        # Hosts with different numbers of ranks: a rank counts those that have its local rank.
        one_host = os.environ["HOROVOD_CROSS_SIZE"]
        os.environ["HOROVOD_CROSS_SIZE"] = str(2 - int(os.environ["RANK"]) % 2)
        dist.init_process_group()
        os.environ["HOROVOD_CROSS_SIZE"] = one_host
        rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        wrong = different_results(dist.new_group(backend="gloo")) + missing_beyond_gloo()
        pair = dist.new_group([0, 2])
        if rank in (0, 2):
            tensor = torch.ones(1) * rank
            dist.all_reduce(tensor, group=pair)
            dist.monitored_barrier(pair)
            wrong += [] if tensor.item() == 2 else [f"a group of two has {tensor}"]
        three = dist.new_group([0, 1, 2])  # also a host with two of them, and one with the third
        for count in (1, 50_000, 1_000_001) if rank < 3 else ():
            tensor = torch.arange(count) * (rank + 1)
            dist.all_reduce(tensor, group=three)
            expected = torch.arange(count) * 6
            wrong += [] if tensor.equal(expected) else [f"a group of three: {count} numbers"]
        state = SimpleNamespace(PartialState=PartialState)
        torch_backend.patch_accelerate(state)
        choices = [
            state.PartialState()._prepare_backend(True, backend=b)[0] for b in (None, "gloo")
        ]
        wrong += [] if choices == ["hvd", "gloo"] else [f"Accelerate takes {choices}"]
        hvd.init()  # beside it
        waiting = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist()
        waiting.wait()
        wrong += [] if total == [size] * 3 else [f"Horovod has {total}"]
        destroyed = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        if destroyed() is None:
            wrong.append("a destroyed group is freed while its threads may be in Python")
        dist.init_process_group("hvd")  # again
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, (backend, wrong))
        if hosts:  # nobody else knows their names
            for line in Path("/proc/self/maps").read_text().splitlines():
                if "/mpich_shm_" in line:
                    Path(line.split()[5]).unlink(missing_ok=True)
        return everything

    assert ranks.run(size, main) == [("hvd", [])] * size


def test_ddp_fsdp_and_hsdp_learn_what_one_process_learns(ranks: Ranks) -> None:
    def main() -> Any:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        own = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)

        def learn(wrap: Any, rows: slice = own) -> list[float]:
            torch.manual_seed(1)
            layers = torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
            x = torch.randn(16, 6)[rows]
            net = wrap(torch.nn.Sequential(*layers))
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            losses = []
            for _ in range(4):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(net(x), x.sum(dim=1, keepdim=True))
                loss.backward()
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                losses.append(mean.item())
            return losses

        def sharded(mesh: Any) -> Any:
            def wrap(net: Any) -> Any:
                for layer in (net[0], net[2], net):
                    fully_shard(layer, mesh=mesh)
                return net

            return wrap

        ddp = torch.nn.parallel.DistributedDataParallel
        return {
            "one process": learn(lambda net: net, slice(None)),
            "DDP": learn(ddp),
            "DDP, unused": learn(lambda net: ddp(net, find_unused_parameters=True)),
            "FSDP2": learn(sharded(init_device_mesh("cpu", (4,)))),
            "HSDP": learn(sharded(mesh)),
            "backends": [dist.get_backend(), dist.get_backend(mesh.get_group("shard"))],
        }

    found = ranks.run(4, main)
    assert found.pop("backends") == ["hvd", "hvd"]
    alone = found.pop("one process")
    for way, losses in found.items():
        assert losses == pytest.approx(alone, rel=1e-4), way


def test_a_hook_of_ddp_may_wait_for_a_further_collective(ranks: Ranks) -> None:
    def main() -> Any:
        import torch
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        dist.init_process_group()

        def learn(group: Any, megabytes: float = 25) -> list[float]:
            torch.manual_seed(1)
            net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
            ddp = torch.nn.parallel.DistributedDataParallel(
                net, process_group=group, bucket_cap_mb=megabytes
            )
            state = hooks.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
            ddp.register_comm_hook(state, hooks.powerSGD_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
            losses = []
            for _ in range(6):
                optimizer.zero_grad()
                loss = ddp(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            weights = torch.cat([weight.detach().flatten() for weight in net.parameters()])
            first = weights.clone()
            dist.broadcast(first, 0)
            assert weights.equal(first)
            return losses

        # With several buckets gloo's two threads may wait for each other.
        several = learn(dist.group.WORLD, 0.02)
        return several, learn(dist.group.WORLD), learn(dist.new_group(backend="gloo"))

    several, ours, theirs = ranks.run(3, main)
    assert several == pytest.approx(theirs, rel=1e-2)  # each bucket draws its own numbers
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_calls_that_differ_or_wait_too_long_are_errors_with_names(ranks: Ranks) -> None:
    def main() -> Any:
        import torch
        import torch.distributed as dist

        error = partial(error_of, RuntimeError)
        dist.init_process_group()
        rank = dist.get_rank()
        different = error(dist.all_reduce, torch.ones(3 + rank))
        dist.all_reduce(total := torch.ones(1))  # the group still works
        group = dist.new_group(timeout=timedelta(milliseconds=300))
        dist.monitored_barrier()  # the next one waits again
        late = alone = ""
        if rank == 0:
            late = error(dist.all_reduce, torch.ones(2), group=group)
            alone = error(dist.monitored_barrier, timeout=timedelta(milliseconds=300))
        refused = error(dist.all_reduce, torch.ones(2), op=dist.ReduceOp.BXOR)
        dist.barrier()
        return different, total.item(), late, alone, refused

    different, total, late, alone, refused = ranks.run(2, main)
    assert "rank 0 called all_reduce of 3 Float (sum); rank 1 called all_reduce of 4" in different
    assert total == 2
    assert "Timed out waiting 300 ms for other ranks in all_reduce of 2 Float (sum)" in late
    assert "Rank 1 failed to pass monitoredBarrier in 300 ms." in alone
    assert "cannot reduce tensors of Float by bxor" in refused


def reduce_for_ever() -> None:
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.ones(3))


def test_a_rank_that_hangs_is_named(ranks: Ranks) -> None:
    def main() -> None:
        import threading

        import torch.distributed as dist

        dist.init_process_group()
        if dist.get_rank() == 1:
            threading.Event().wait()
        reduce_for_ever()

    waits = r"rank 0 .*all_reduce of 3 Float \(sum\) .*rank 1\."
    with pytest.raises(HangError, match=waits) as caught:
        ranks.run(2, main, {"hang_timeout": 4.0})
    assert "in reduce_for_ever" in str(caught.value)


def test_a_rank_that_is_killed_is_named(ranks: Ranks) -> None:
    def main() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group()
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reduce_for_ever()

    with pytest.raises(RankFailedError) as caught:
        ranks.run(2, main)
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)


def test_the_exception_of_a_rank_that_leaves_its_group_is_raised(ranks: Ranks) -> None:
    def main() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group()
        try:
            dist.all_reduce(torch.ones(3))
            if dist.get_rank() == 1:
                raise KeyError("the true cause")
            reduce_for_ever()
        finally:
            dist.destroy_process_group()

    with pytest.raises(KeyError, match="the true cause") as caught:
        ranks.run(2, main)
    assert "rank 1 of 2" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "options",
    [{"env": {"HOROVOD_RUNNER_TORCH_BACKEND": "gloo"}}, {"cpu_collectives": "gloo"}],
    ids=["by its variable", "without MPI"],
)
def test_it_can_be_switched_off(
    ranks: Ranks, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> Any:
        import torch
        import torch.distributed as dist

        dist.init_process_group()
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group(backend="hvd"))
        return dist.get_backend(), total.item()

    assert ranks.run(2, main, options) == ("undefined", 2.0)  # torch chooses
    told = 'torch.distributed\'s backend "hvd" is gloo in this run' in capsys.readouterr().out
    assert told == ("cpu_collectives" in options)


def test_a_backend_that_did_not_compile_says_so_and_the_default_is_gloo(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> Any:
        from importlib import import_module

        import torch
        import torch.distributed as dist

        library: Any = import_module("horovod.torch.process_group")
        library.missing = "Work.hpp:1: error: no such file"  # as of a build for another torch
        with pytest.raises(RuntimeError) as caught:
            dist.init_process_group("hvd")
        dist.init_process_group()
        dist.all_reduce(total := torch.ones(1))
        return dist.get_backend(), total.item(), str(caught.value)

    backend, total, error = ranks.run(2, main)
    assert (backend, total) == ("undefined", 2.0)  # torch chooses
    assert 'backend "hvd" is missing in this Horovod: it did not compile (Work.hpp' in error
    assert "horovod-runner install --rebuild" in error
    out = capsys.readouterr().out
    assert out.count("is gloo in this run, because this Horovod lacks it: it did not compile") == 1
