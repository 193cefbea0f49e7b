"""Real Horovod under both launchers: what it computes must be right to the last bit or so."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner import RankFailedError
from tests.conftest import Ranks

pytestmark = [
    pytest.mark.spark,
    pytest.mark.horovod,
    pytest.mark.usefixtures("nothing_left"),
]

STEPS = 12
GLOBAL_BATCH = 32
FEATURES = 6


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(STEPS * GLOBAL_BATCH, FEATURES)).astype("float32")
    y = (x @ rng.normal(size=(FEATURES, 1)) + 0.1 * rng.normal(size=(len(x), 1))).astype("float32")
    return x, y


def train_torch(seed_offset: int) -> list[list[list[float]]]:
    """Every rank's weights after training; each rank starts from another seed."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(1 + seed_offset * hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x, y = data()
    share = GLOBAL_BATCH // hvd.size()
    for step in range(STEPS):
        start = step * GLOBAL_BATCH + hvd.rank() * share
        optimizer.zero_grad()
        prediction = model(torch.from_numpy(x[start : start + share]))
        labels = torch.from_numpy(y[start : start + share])
        torch.nn.functional.mse_loss(prediction, labels).backward()
        optimizer.step()
    weights = [parameter.detach().numpy().tolist() for parameter in model.parameters()]
    gathered: list[list[list[float]]] = hvd.allgather_object(weights)
    return gathered


def train_tensorflow(seed_offset: int) -> list[list[Any]]:
    """The same in TensorFlow, with a loop of its own and plain variables."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rng = np.random.default_rng(1 + seed_offset * hvd.rank())
    shapes = [(FEATURES, 16), (16,), (16, 1), (1,)]
    weights = [tf.Variable(rng.normal(size=s).astype("float32") * 0.3) for s in shapes]
    hvd.broadcast_variables(weights, root_rank=0)
    x, y = data()
    share = GLOBAL_BATCH // hvd.size()

    @tf.function
    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(features @ weights[0] + weights[1])
            loss = tf.reduce_mean((hidden @ weights[2] + weights[3] - labels) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * gradient)

    for number in range(STEPS):
        start = number * GLOBAL_BATCH + hvd.rank() * share
        step(x[start : start + share], y[start : start + share])
    gathered: list[list[Any]] = hvd.allgather_object([w.numpy().tolist() for w in weights])
    return gathered


# The import of TensorFlow takes longer than all else in its tests.
TENSORFLOW = {"preload_frameworks": ["horovod.torch", "horovod.tensorflow"]}


@cache
def weights_of_one_process(train: Any) -> Any:
    return Ranks("local").run(1, train, seed_offset=0)[0]


def check_weights(ranks: Ranks, train: Any, options: dict[str, Any] | None = None) -> None:
    alone = weights_of_one_process(train)
    first, second = ranks.run(2, train, options, seed_offset=100)
    assert first == second
    for ours, theirs in zip(first, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_ranks_from_different_seeds_end_with_the_weights_of_one_process(ranks: Ranks) -> None:
    check_weights(ranks, train_torch)


@pytest.mark.xdist_group("tensorflow")
@pytest.mark.places("local")  # on Spark: examples/digits_tensorflow.py
def test_tensorflow_from_different_seeds_ends_with_the_weights_of_one_process(
    ranks: Ranks,
) -> None:
    check_weights(ranks, train_tensorflow, TENSORFLOW)


@pytest.mark.xdist_group("tensorflow")
@pytest.mark.places("local")
def test_gradients_are_averaged_where_both_frameworks_are_imported(ranks: Ranks) -> None:
    def main() -> list[list[float]]:
        import horovod.torch as hvd
        import torch

        import horovod.tensorflow  # isort: skip - the last one is the one that Horovod asks

        hvd.init()
        # As an import of it after hvd.init() does.
        horovod.common.process_sets._setup(horovod.tensorflow.mpi_ops._basics)
        net = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1.0))
        net(torch.eye(2)[hvd.rank()]).backward()
        optimizer.step()
        return net.weight.tolist()

    assert ranks.run(2, main, TENSORFLOW) == [[-0.5, -0.5]]


def join_before_the_last_rank() -> int:
    import horovod.torch as hvd
    import torch

    hvd.init()
    if hvd.rank() == hvd.size() - 1:
        for number in range(100):
            hvd.allreduce(torch.ones(7), name=f"step {number}")
    return int(hvd.join())


@pytest.mark.places("local")
def test_a_rank_goes_on_alone_after_seven_others_have_joined(ranks: Ranks) -> None:
    # Horovod 0.28.1 without a patch writes behind the end of a vector, and aborts.
    assert ranks.run(8, join_before_the_last_rank) == 7


@pytest.mark.places("local")
def test_gradients_of_every_kind_are_averaged(ranks: Ranks) -> None:
    def main() -> list[float]:
        import copy

        import horovod.torch as hvd
        import torch
        from torch import nn

        hvd.init()
        torch.manual_seed(1)
        parts = {
            "words": nn.Embedding(50, 1100, sparse=True),
            "large": nn.Linear(1100, 1100),  # more than what is sent at once
            "small": nn.Linear(1100, 3),
            "first rank's": nn.Linear(1100, 3),
        }
        model = nn.ModuleDict(parts)
        peer = copy.deepcopy(model)
        rank, names = hvd.rank(), dict(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.001), names.items(), backward_passes_per_step=2
        )
        plain = torch.optim.SGD(peer.parameters(), 0.001)

        def backward(net: Any, step: int, part: int) -> None:
            hidden = net["large"](net["words"](torch.tensor([[step, 7 * rank + part]])))
            found = net["small"](hidden) + (net["first rank's"](hidden) if rank == 0 else 0)
            (found**2).mean().backward()

        distances = []
        for step in range(3):
            for net, used in ((model, optimizer), (peer, plain)):
                used.zero_grad()
                backward(net, step, 0)
                backward(net, step, 1)
            for name, parameter in peer.named_parameters():
                own = torch.zeros(1) if parameter.grad is None else parameter.grad
                own = (own.to_dense() + torch.zeros_like(parameter)).contiguous()
                parameter.grad = hvd.allreduce(own, name=f"peer.{name}", op=hvd.Average)
            optimizer.step()
            plain.step()
            for parameter, other in zip(model.parameters(), peer.parameters(), strict=True):
                distances.append((parameter - other).abs().max().item())
        return distances

    assert max(ranks.run(2, main)) < 1e-6


@pytest.mark.places("local")
def test_a_rank_whose_mpi_found_nobody_does_not_train_alone(ranks: Ranks) -> None:
    ranks.needs_mpi()

    def main() -> None:
        import os

        import horovod.torch as hvd

        del os.environ["PMI_FD"]  # without it MPI takes this process for the only one
        hvd.init()

    runner = ranks.runner(2)
    with pytest.raises(RankFailedError, match=r"MPI .* 1 rank\(s\) .* 2: MPI_Init"):
        runner.run(main)
    # An MPI that found no job names its shared memory after its process.
    for rank in runner.last_run.ranks:
        Path(f"/dev/shm/mpich_shm_{rank.pid:x}_0").unlink(missing_ok=True)


@pytest.mark.places("local")
def test_gradients_computed_too_often_are_told(ranks: Ranks) -> None:
    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        net = torch.nn.Linear(2000, 1000)  # so large that averaging begins in backward
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))
        net(torch.ones(2000)).sum().backward()
        net(torch.ones(2000)).sum().backward()
        hooks, handles = len(optimizer._grad_accs), len(optimizer._handles)
        raise RuntimeError(f"no error: {hvd.size()} ranks, {hooks} hooks, {handles} handles")

    with pytest.raises(ValueError, match="backward_passes_per_step"):
        ranks.run(2, main)


@pytest.mark.places("local", "spark", "cluster")
def test_horovod_sees_the_topology(ranks: Ranks) -> None:
    def main() -> Any:
        import horovod.torch as hvd

        hvd.init()
        place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
        return hvd.allgather_object((*place, hvd.cross_rank(), hvd.cross_size()))

    assert ranks.run(3, main) == [(rank, 3, rank, 3, 0, 1) for rank in range(3)]


# One rank alone needs no meeting point.
@pytest.mark.places("local")
@pytest.mark.parametrize("size", [1, 2])
def test_horovod_can_be_shut_down_and_started_again(ranks: Ranks, size: int) -> None:
    def main() -> list[float]:
        import horovod.torch as hvd
        import torch

        totals = []
        for _ in range(3):
            hvd.init()
            totals.append(float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
            hvd.shutdown()
        return totals

    assert ranks.run(size, main) == [float(size)] * 3


@pytest.mark.places("local")
def test_threads_given_to_openmp_are_torchs(ranks: Ranks) -> None:
    def main() -> int:
        import torch

        return torch.get_num_threads()

    assert ranks.run(2, main, {"env": {"OMP_NUM_THREADS": "2"}}) == 2


def test_ddp_code_runs_as_it_is(ranks: Ranks) -> None:
    def main() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return float(total)

    assert ranks.run(2, main) == 3.0


@pytest.mark.places("local", "spark", "cluster")
def test_the_rank_that_raised_is_named_and_not_its_survivors(ranks: Ranks) -> None:
    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        for step in range(10_000):
            if step == 20 and hvd.rank() == 1:
                raise KeyError("the true cause")
            hvd.allreduce(torch.ones(1000), name=f"step{step}")

    with pytest.raises(KeyError, match="the true cause") as caught:
        ranks.run(2, main)
    assert "rank 1 of 2" in str(caught.value.__cause__)


@pytest.mark.places("local")
def test_an_abort_inside_horovods_gloo_is_told_as_what_it_is(ranks: Ranks) -> None:
    def main() -> None:
        import horovod.torch as hvd

        # A port where nobody listens: Horovod's C++ throws where Python cannot catch it.
        if os.environ["HOROVOD_RANK"] == "1":
            os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1:1/nobody"
        hvd.init()

    with pytest.raises(RankFailedError, match=r"rank 1 of 2.*SIGABRT.*hvd\.init\(\)") as caught:
        ranks.run(2, main, {"cpu_collectives": "gloo"})
    assert caught.value.exit_code == -signal.SIGABRT


@pytest.mark.places("local")
def test_an_abort_inside_mpi_is_told_with_mpis_own_words(ranks: Ranks) -> None:
    ranks.needs_mpi()

    def main() -> None:
        import horovod.torch as hvd

        os.environ["PMI_FD"] = "999"  # nobody answers there
        hvd.init()

    with pytest.raises(RankFailedError, match="Fatal error in internal_Init") as caught:
        ranks.run(2, main)
    # MPICH calls exit(15) in Horovod's thread. Then Horovod waits for that thread, which aborts;
    # not if init() has not stored the thread yet.
    assert caught.value.exit_code in (-signal.SIGABRT, 15)


def test_the_timeline_is_written_where_the_driver_says(
    ranks: Ranks, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(timeline))

    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(1), name="traced")

    ranks.run(2, main)
    assert "traced" in timeline.read_text()
