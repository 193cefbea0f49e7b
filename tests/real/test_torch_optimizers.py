"""Horovod's functions for torch's optimizers train what one process trains."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.common.options import grouped
from tests.errors import error_of

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("torch optimizers"),
]
NAMES = ["Muon", "AdamW", "SGD", "Adam"]


@cache
def results() -> list[dict[str, Any]]:
    """The results of every rank, of one run."""
    options = grouped({"preload_frameworks": ["horovod.torch"], "cpu_collectives": "gloo"})
    runner = HorovodRunner(np=-2, **options)
    return list(runner.run(all_optimizers))


def all_optimizers() -> list[dict[str, Any]]:
    import horovod.torch as hvd

    hvd.init()
    loaded = {name: state_of_one_rank(name) for name in NAMES}
    cases = {name: [case(hvd), case(None)] for name, case in TRAININGS.items()}
    found = {"loaded": loaded, "adasum": adasum(), "groups": other_groups(), **cases}
    found["unnamed"] = unnamed_weights()
    return list(hvd.allgather_object(found))


def new(name: str, parameters: Any) -> Any:
    import torch

    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(parameters, lr=0.1, weight_decay=0.1, **options)


def state_of_one_rank(name: str) -> dict[str, Any]:
    """Broadcast the state of rank 0's optimizer to a rank whose optimizer is new."""
    import horovod.torch as hvd
    import torch

    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = new(name, model.parameters())
    if hvd.rank() == 0:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.weight.detach().clone()
    gradient = model.weight.grad
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    (state,) = optimizer.state_dict()["state"].values()
    return {
        "unchanged": bool((model.weight == before).all()),
        "weights": model.weight.tolist(),
        "state": {key: torch.as_tensor(value).tolist() for key, value in state.items()},
        "same gradient": gradient is model.weight.grad,
    }


def unnamed_weights() -> list[Any]:
    """The weights of rank 1's model, broadcast without names."""
    import horovod.torch as hvd
    import torch

    model = torch.nn.Linear(1, 2)  # each weight can be unpacked like a name and a weight
    for weight in model.parameters():
        torch.nn.init.constant_(weight, hvd.rank())
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    return [weight.tolist() for weight in model.parameters()]


def adasum() -> str:
    """The error of a reduction that needs MPI."""
    import horovod.torch as hvd
    import torch

    return error_of(ValueError, hvd.allreduce, torch.ones(3), op=hvd.Adasum)


class Training:
    """A small training: of a rank on its rows, or in one process on all of them.

    Args:
        hvd: ``horovod.torch``; None in one process.
        model: the network; rank 0's weights are used.
    """

    def __init__(self, hvd: Any, model: Any) -> None:
        self.hvd = hvd
        self.model = model
        if hvd is not None:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def rows(self, *shape: int) -> Any:
        """The rank's half of some rows, or all of them."""
        import torch

        rows = torch.randn(8, *shape, generator=torch.Generator().manual_seed(5))
        return rows if self.hvd is None else rows.chunk(self.hvd.size())[self.hvd.rank()]

    def distributed(self, optimizer: Any, **options: Any) -> Any:
        if self.hvd is None:
            return optimizer
        named = self.model.named_parameters()
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)

    def weights(self) -> list[Any]:
        return [weight.detach().tolist() for weight in self.model.parameters()]


def network() -> Any:
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    return torch.nn.Sequential(*layers)


def loss_of(training: Training) -> Any:
    return (training.model(training.rows(3)) - 1).square().mean()


def steps(training: Training, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        loss_of(training).backward()
        optimizer.step()


def a_new_state_is_broadcast(hvd: Any) -> list[Any]:
    import torch

    training = Training(hvd, network())
    optimizer = training.distributed(torch.optim.Adam(training.model.parameters(), lr=0.1))
    if hvd is not None:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    steps(training, optimizer, 2)
    return training.weights()


def a_state_is_loaded_before_the_optimizer_is_distributed(hvd: Any) -> list[Any]:
    import torch

    training = Training(hvd, network())
    first = training.distributed(torch.optim.Adam(training.model.parameters(), lr=0.1))
    steps(training, first, 2)
    plain = torch.optim.Adam(training.model.parameters(), lr=0.1)
    plain.load_state_dict(first.state_dict())
    optimizer = training.distributed(plain)
    steps(training, optimizer, 2)
    assert plain.state is optimizer.state  # also what is saved by the first name is of this step
    wide = Training(hvd, torch.nn.Linear(3, 1 << 19))  # so large that backward sends its gradients
    for _ in range(2):
        again = wide.distributed(torch.optim.SGD(wide.model.parameters(), lr=0.1))
        for _ in range(2):
            again.zero_grad()
            wide.model(wide.rows(3)).square().mean().backward()
            again.step()
    return [training.weights(), float(wide.model.weight.mean())]


def matrices_are_trained_by_muon(hvd: Any) -> list[Any]:
    training = Training(hvd, network())
    named = list(training.model.named_parameters())
    optimizers = []
    for kind, dimensions in (("Muon", 2), ("AdamW", 1)):
        part = [(name, weight) for name, weight in named if weight.ndim == dimensions]
        plain = new(kind, [weight for _, weight in part])
        optimizers.append(plain if hvd is None else hvd.DistributedOptimizer(plain, part))
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(training).backward()
        for optimizer in optimizers:
            optimizer.step()
    return training.weights()


def weights_are_frozen_or_not_used(hvd: Any) -> list[Any]:
    import torch

    training = Training(hvd, torch.nn.ModuleDict({"body": network(), "head": network()}))
    plain = torch.optim.AdamW(training.model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = training.distributed(plain)
    body, head = training.model["body"], training.model["head"]
    for step in range(6):
        if step == 3:
            body[0].requires_grad_(False)
        optimizer.zero_grad()
        x = training.rows(3)
        loss = body(x).square().mean()
        if step in (2, 3):  # rank 0 alone uses it, and has half of the rows
            alone = head(x[:4]).square().mean()
            if hvd is None:
                loss = loss + alone / 2
            elif hvd.rank() == 0:
                loss = loss + alone
        loss.backward()
        optimizer.step()
    return training.weights()


def hooks_are_called(hvd: Any) -> list[Any]:
    import torch

    training = Training(hvd, network())
    calls = []

    def before(optimizer: Any, _args: Any, _options: Any) -> None:
        gradient = optimizer.param_groups[0]["params"][0].grad
        calls.append(["before", gradient.tolist()])
        gradient.clamp_(max=0.001)

    plain = torch.optim.SGD(training.model.parameters(), lr=0.1)
    plain.register_step_pre_hook(before)
    optimizer = training.distributed(plain)
    optimizer.register_step_post_hook(lambda *_: calls.append(["after"]))
    steps(training, optimizer, 2)
    return [*calls, training.weights()]


def a_closure_computes_gradients(hvd: Any) -> list[Any]:
    import torch

    training = Training(hvd, network())
    optimizer: Any
    found = []
    for kind, options in (
        (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}),
        (torch.optim.SGD, {"lr": 0.1}),
    ):
        optimizer = training.distributed(kind(training.model.parameters(), **options))

        def closure(optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = loss_of(training)
            loss.backward()
            if isinstance(optimizer, torch.optim.LBFGS):  # a clip averages, too
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
            return loss

        found += [float(optimizer.step(closure)) for _ in range(3)]
        if hvd is not None:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return [found, training.weights()]


def weights_have_another_layout(hvd: Any) -> list[Any]:
    import torch

    torch.manual_seed(0 if hvd is None else hvd.rank())
    layers = torch.nn.Conv2d(3, 5, 2), torch.nn.Tanh(), torch.nn.Conv2d(5, 2, 2)
    model: Any = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training = Training(hvd, model)
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = training.distributed(torch.optim.SGD(model.parameters(), **options), groups=2)
    for _ in range(3):
        optimizer.zero_grad()
        x = training.rows(3, 4, 4).contiguous(memory_format=torch.channels_last)
        model(x).square().mean().backward()
        optimizer.step()
    if hvd is not None:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return training.weights()


def gradients_are_sparse(hvd: Any) -> list[Any]:
    import torch

    found = []
    options: list[dict[str, Any]] = [{"groups": 1, "sparse_as_dense": True}]
    options += [{"compression": hvd.Compression.fp16}] if hvd is not None else [{}]
    for each in options:
        torch.manual_seed(0)
        training = Training(hvd, torch.nn.Embedding(8, 2, sparse=True))
        plain = torch.optim.SGD(training.model.parameters(), lr=0.5, momentum=0.9)
        optimizer = training.distributed(plain, **(each if hvd is not None else {}))
        for _ in range(3):
            if hvd is not None:
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            optimizer.zero_grad()
            rows = (training.rows(1)[:, 0] * 3).long() % 8
            training.model(rows).square().mean().backward()
            optimizer.step()
        found.append(training.weights())
    return found


def a_schedule_belongs_to_the_plain_optimizer(hvd: Any) -> list[Any]:
    import warnings

    import torch

    training = Training(hvd, network())
    plain = torch.optim.SGD(training.model.parameters(), lr=0.4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = training.distributed(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            steps(training, optimizer, 1)
            schedule.step()
            optimizer.load_state_dict(optimizer.state_dict())
    return [optimizer.param_groups[0]["lr"], training.weights()]


def weights_are_added_or_unfrozen_later(hvd: Any) -> list[Any]:
    import torch

    model = torch.nn.Sequential(*network(), torch.nn.Linear(1, 1))
    training = Training(hvd, model)
    model[0].requires_grad_(False)
    plain = torch.optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9)
    optimizer = plain
    if hvd is not None:
        optimizer = hvd.DistributedOptimizer(plain, model[:3].named_parameters(), groups=1)
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.2})
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(training).backward()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
    return training.weights()


def passes_are_left_over(hvd: Any) -> list[Any]:
    import torch

    found = []
    for options in ({}, {"groups": 1}):
        training = Training(hvd, network())
        plain = torch.optim.SGD(training.model.parameters(), lr=0.05)
        optimizer = training.distributed(plain, backward_passes_per_step=2, **options)
        for _ in range(2):  # epochs of five batches; the second one begins with what is left over
            for number in range(1, 6):
                loss_of(training).backward()
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.step()
        found.append(training.weights())
    return found


def two_networks_are_trained(hvd: Any) -> list[Any]:
    """As in a GAN, the loss of one also gives gradients to the other; they have equal names."""
    import torch

    found = []
    for frees in ("optimizer", "network"):
        one, other = (Training(hvd, network()) for _ in range(2))
        torch.nn.init.ones_(other.model[2].weight)
        first = one.distributed(torch.optim.Adam(one.model.parameters(), lr=0.02))
        second = other.distributed(torch.optim.Adam(other.model.parameters(), lr=0.02))
        for _ in range(3):
            (second if frees == "optimizer" else other.model).zero_grad()
            rows = one.rows(3)
            fake = one.model(rows).repeat(1, 3)
            (other.model(rows) - other.model(fake.detach())).mean().backward()
            second.step()
            first.zero_grad()
            other.model(fake).mean().backward()
            first.step()
        found += [one.weights(), other.weights()]
    return found


def several_networks_are_clipped_together(hvd: Any) -> list[Any]:
    import torch

    networks = [Training(hvd, network()) for _ in range(8)]
    optimizers = [
        each.distributed(torch.optim.SGD(each.model.parameters(), lr=0.1)) for each in networks
    ]
    features = torch.nn.Linear(3, 3)  # without an optimizer
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        rows = networks[0].rows(3)
        sum(each.model(features(rows)).square().mean() for each in networks).backward()
        models = [*(each.model for each in networks), features]
        torch.nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 0.5)
        for optimizer in reversed(optimizers):
            optimizer.step()
    return [each.weights() for each in networks]


def weights_in_any_iterable_are_clipped(hvd: Any) -> list[Any]:
    import torch

    training = Training(hvd, network())
    optimizer = training.distributed(torch.optim.SGD(training.model.parameters(), lr=0.1))
    named = dict(training.model.named_parameters())
    kinds: list[Any] = [named.values(), torch.nn.ParameterList(named.values()), {*named.values()}]
    found = []
    for clipped in kinds:
        optimizer.zero_grad()
        loss_of(training).backward()
        found.append(float(torch.nn.utils.clip_grad_norm_(clipped, 0.05)))
        optimizer.step()
    optimizer.zero_grad()
    loss_of(training).backward()
    gradients = {weight: weight.grad for weight in named.values()}
    if hasattr(torch.nn.utils, "get_total_norm"):  # torch 2.6 and later
        found.append(float(torch.nn.utils.get_total_norm(gradients.values())))
    optimizer.step()
    return [found, training.weights()]


def an_optimizer_has_a_zero_grad_of_its_own(hvd: Any) -> list[Any]:
    import torch

    def zero_grad(self: Any) -> None:  # without an argument
        torch.optim.SGD.zero_grad(self, set_to_none=False)

    kind: Any = type("Kept", (torch.optim.SGD,), {"zero_grad": zero_grad})
    training = Training(hvd, network())
    optimizer = training.distributed(kind(training.model.parameters(), lr=0.1))
    steps(training, optimizer, 2)
    optimizer.zero_grad()
    return [float(training.model[0].weight.grad.sum()), training.weights()]


TRAININGS = {
    function.__name__: function
    for function in (
        a_new_state_is_broadcast,
        a_state_is_loaded_before_the_optimizer_is_distributed,
        matrices_are_trained_by_muon,
        weights_are_frozen_or_not_used,
        hooks_are_called,
        a_closure_computes_gradients,
        weights_have_another_layout,
        gradients_are_sparse,
        a_schedule_belongs_to_the_plain_optimizer,
        weights_are_added_or_unfrozen_later,
        passes_are_left_over,
        two_networks_are_trained,
        several_networks_are_clipped_together,
        weights_in_any_iterable_are_clipped,
        an_optimizer_has_a_zero_grad_of_its_own,
    )
}


def other_groups() -> str:
    """The error where an optimizer has other groups of weights than rank 0's."""
    import horovod.torch as hvd
    import torch

    model = network()
    groups: list[Any] = [{"params": list(model[0].parameters())}]
    groups += [{"params": list(model[2].parameters())}] if hvd.rank() == 0 else []
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return error_of(ValueError, hvd.broadcast_optimizer_state, optimizer, root_rank=0)


@pytest.mark.parametrize("name", TRAININGS)
def test_two_ranks_train_what_one_process_trains(name: str) -> None:
    (first, one), (second, _) = (rank[name] for rank in results())
    assert first == second
    # Muon computes in bfloat16.
    assert flat(first) == pytest.approx(flat(one), abs=2e-2 if "muon" in name else 1e-4)


def flat(value: Any) -> list[Any]:
    """The numbers and words of nested lists."""
    if not isinstance(value, list):
        return [len(value) if isinstance(value, str) else value]
    return [number for each in value for number in flat(each)]


def test_a_state_for_other_groups_of_weights_is_refused() -> None:
    first, second = (rank["groups"] for rank in results())
    assert first == ""
    assert "[2, 2]" in second
    assert "[2]" in second


@pytest.mark.parametrize("name", NAMES)
def test_broadcast_optimizer_state_leaves_the_weights_as_they_are(name: str) -> None:
    first, second = (rank["loaded"][name] for rank in results())
    assert first["unchanged"]
    assert second["unchanged"]
    assert first["weights"] == second["weights"]
    assert first["state"] == second["state"]
    assert first["same gradient"]
    assert second["same gradient"]


def test_weights_are_broadcast_without_names() -> None:
    for rank in results():
        assert rank["unnamed"] == [[[1.0], [1.0]], [1.0, 1.0]]


def test_adasum_without_mpi_names_the_setting() -> None:
    for rank in results():
        assert 'set ClusterConfig(cpu_collectives="mpi")' in rank["adasum"]
