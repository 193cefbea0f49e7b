"""Compression.bf16 and Compression.powersgd of horovod.torch, against a reference in NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from horovod_runner import HorovodRunner
from horovod_runner.common.options import grouped
from tests.errors import error_of

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("torch optimizers"),
]
STEPS, RESUMED_AT = 6, 3
RANKS = range(2)
ROWS, COLUMNS = 12, 20


@cache
def results() -> list[dict[str, Any]]:
    """The results of every rank, of one run."""
    runner = HorovodRunner(np=-2, **grouped({"preload_frameworks": ["horovod.torch"]}))
    return list(runner.run(all_cases))


def all_cases() -> list[dict[str, Any]]:
    import horovod.torch as hvd

    hvd.init()
    found = {
        "powersgd": powersgd(),
        "sum": sent(hvd.Compression.powersgd(matrix_rank=2), op=hvd.Sum),
        "bf16": sent(hvd.Compression.bf16),
        "full": sent(hvd.Compression.powersgd(matrix_rank=1, full_steps=1)),
        "overflow": overflow(),
        "scaled": {early: scaled(early) for early in (False, True)},
        "refused": {name: error_of(ValueError, call) for name, call in refused().items()},
        "embedding": embedding(),
        "large": large(),
    }
    return list(hvd.allgather_object(found))


def gradients(step: int, rank: int) -> dict[str, Any]:
    """The gradients of a rank: of a matrix, a kernel and a vector."""
    random = np.random.default_rng([step, rank])
    shapes = {"bias": (7,), "kernel": (ROWS, 5, 2, 2), "matrix": (ROWS, COLUMNS)}
    return {name: random.normal(size=shape).astype("f") for name, shape in shapes.items()}


def new_model(compression: Any, **options: Any) -> tuple[Any, Callable[[dict[str, Any]], Any]]:
    """A model, and a function that makes a step with gradients and returns the reduced ones."""
    import horovod.torch as hvd
    import torch

    model = torch.nn.ParameterDict(
        {name: torch.zeros(each.shape) for name, each in gradients(0, 0).items()}
    )
    # In another order than that of the names, and not all on both ranks.
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=reversed(list(model.named_parameters())),
        compression=compression,
        **options,
    )

    def step(wanted: dict[str, Any]) -> dict[str, Any]:
        before = {name: weight.detach().clone() for name, weight in model.items()}
        optimizer.zero_grad()
        # The gradient of what is added last is there first: the vector's, where a rank has one.
        ordered = sorted(wanted.items(), reverse=True)
        sum((model[name] * torch.from_numpy(each)).sum() for name, each in ordered).backward()
        optimizer.step()
        return {name: (before[name] - weight.detach()).numpy() for name, weight in model.items()}

    return model, step


def powersgd() -> dict[str, Any]:
    """Steps; then again from a state in their middle, in a new optimizer."""
    import horovod.torch as hvd

    compression = hvd.Compression.powersgd(matrix_rank=2)
    _, step = new_model(compression)
    reduced, states = [], []
    for number in range(STEPS):
        reduced.append(step(gradients(number, hvd.rank())))
        states.append(compression.state_dict())
    resumed = hvd.Compression.powersgd(matrix_rank=2)
    _, again = new_model(resumed)
    resumed.load_state_dict(states[RESUMED_AT - 1])
    after = [again(gradients(number, hvd.rank())) for number in range(RESUMED_AT, STEPS)]
    plain = [
        {name: {key: each.numpy() for key, each in state[name].items()} for name in ("q", "errors")}
        for state in states
    ]
    return {"reduced": reduced, "states": plain, "resumed": after, "steps": states[-1]["steps"]}


def sent(compression: Any, **options: Any) -> dict[str, Any]:
    """One step, in which rank 1 has no gradient of the vector."""
    import horovod.torch as hvd

    _, step = new_model(compression, **options)
    wanted = gradients(0, hvd.rank())
    if hvd.rank() == 1:
        del wanted["bias"]
    return step(wanted)


def overflow() -> dict[str, Any]:
    """A step in which rank 1's gradient is infinite, between two good ones."""
    import horovod.torch as hvd

    compression = hvd.Compression.powersgd(matrix_rank=2)
    model, step = new_model(compression)
    step(gradients(0, hvd.rank()))
    infinite = gradients(1, hvd.rank())
    if hvd.rank() == 1:
        infinite["matrix"][0, 0] = np.inf
    broken = step(infinite)
    for weight in model.values():
        weight.data.zero_()
    return {"broken": broken["matrix"], "next": step(gradients(1, hvd.rank()))["matrix"]}


def scaled(early: bool) -> list[Any]:
    """Steps with a scaler that doubles its scale twice, and halves it where rank 1 overflows.

    In their middle the training goes on from a state, with a scale that is still another one.

    Args:
        early: whether the user averages the gradients before the scaler does.
    """
    import horovod.torch as hvd
    import torch

    weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    reduced: list[Any] = []
    state = None
    for first, scale in ((0, 4.0), (RESUMED_AT, 64.0)):
        compression = hvd.Compression.powersgd(matrix_rank=2)
        if state is not None:
            compression.load_state_dict(state)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, [("w", weight)], compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
        scales = []
        for number in range(first, first + 3):
            for overflows in (True, False) if number % 3 == 2 else (False,):
                scales.append(scaler.get_scale())
                own = torch.from_numpy(gradients(number, hvd.rank())["matrix"])
                if overflows and hvd.rank() == 1:
                    own[0, 0] = np.inf
                optimizer.zero_grad()
                before = weight.detach().clone()
                scaler.scale((weight * own).sum()).backward()
                if early:
                    optimizer.synchronize()
                    scaler.unscale_(optimizer)
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                else:
                    scaler.step(optimizer)
                scaler.update()
                assert overflows == bool((before == weight).all())
            reduced.append((before - weight.detach()).numpy())
        assert scales == [scale, 2 * scale, 4 * scale, 2 * scale]
        state = compression.state_dict()
    return reduced


def embedding() -> list[Any]:
    """A sparse gradient that becomes dense."""
    import horovod.torch as hvd
    import torch

    layer = torch.nn.Embedding(3, 2, sparse=True)
    layer.weight.data.zero_()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0),
        layer.named_parameters(),
        hvd.Compression.bf16,
        sparse_as_dense=True,
    )
    layer(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    return list(layer.weight.tolist())


def large() -> list[float]:
    """Gradients that are sent during the backward pass; rank 1 has none of the second one.

    Returns:
        For each parameter the least and the greatest reduced gradient, divided by its place's.
    """
    import horovod.torch as hvd
    import torch

    sizes = {"odd": (1 << 20) + 3, "of rank 0": 1 << 19, "small": 5}
    net = torch.nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    places = {name: torch.arange(size) % 100 + 1 for name, size in sizes.items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0),
        net.named_parameters(),
        hvd.Compression.bf16,
        op=hvd.Sum,
    )
    for _ in range(2):
        optimizer.zero_grad()
        own = [name for name in sizes if hvd.rank() == 0 or name != "of rank 0"]
        sum((net[name] * places[name] * (hvd.rank() + 1)).sum() for name in own).backward()
        optimizer.step()
    found = []
    for name, weight in net.items():
        factors = -weight.detach() / 2 / places[name]
        found += [factors.min().item(), factors.max().item()]
    return found


def refused() -> dict[str, Callable[[], Any]]:
    import horovod.torch as hvd
    import torch

    def wrap(parameter: Any = None, **options: Any) -> Any:
        own = torch.nn.Parameter(torch.zeros(4, 4) if parameter is None else parameter)
        optimizer = torch.optim.SGD([own], lr=1.0)
        options.setdefault("compression", hvd.Compression.powersgd)
        return own, hvd.DistributedOptimizer(optimizer, [("w", own)], **options)

    def complex_step() -> None:
        own, optimizer = wrap(torch.zeros(4, 4, dtype=torch.complex64))
        (own * own.conj()).real.sum().backward()
        optimizer.step()

    def sparse_step() -> None:
        layer = torch.nn.Embedding(3, 2, sparse=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, layer.named_parameters(), hvd.Compression.powersgd
        )
        layer(torch.tensor([0])).sum().backward()
        optimizer.step()

    def other_shape() -> None:
        compression = hvd.Compression.powersgd(matrix_rank=1)
        for rows in (8, 9):
            own, optimizer = wrap(torch.zeros(rows, 9), compression=compression)
            own.sum().backward()
            optimizer.step()

    state = {"matrix_rank": 3, "steps": 0, "q": {}, "errors": {}}
    return {
        "adasum": lambda: wrap(op=hvd.Adasum),
        "min": lambda: wrap(op=hvd.Min),
        "groups": lambda: wrap(groups=2),
        "predivide": lambda: wrap(gradient_predivide_factor=2.0),
        "tensor": lambda: hvd.allreduce(torch.ones(2), compression=hvd.Compression.bf16),
        "rank": lambda: hvd.Compression.powersgd(matrix_rank=0),
        "full_steps": lambda: hvd.Compression.powersgd(full_steps=0.5),
        "state": lambda: hvd.Compression.powersgd(matrix_rank=2).load_state_dict(state),
        "complex": complex_step,
        "sparse": sparse_step,
        "shape": other_shape,
    }


# Slow where it is the first: one run of all cases of this file.
@pytest.mark.parametrize("name", ["matrix", "kernel"])
def test_powersgd_sends_what_a_reference_in_numpy_sends(name: str) -> None:
    (own, other) = [result["powersgd"] for result in results()]
    errors = [np.zeros((ROWS, COLUMNS))] * 2
    for step in range(STEPS):
        matrices = [gradients(step, rank)[name].reshape(ROWS, COLUMNS) for rank in RANKS]
        matrices = [each + error for each, error in zip(matrices, errors, strict=True)]
        reduced = own["reduced"][step][name].reshape(ROWS, COLUMNS)
        if step:  # in the first step Q is random
            q = own["states"][step - 1]["q"][name]
            p, _ = np.linalg.qr(np.mean([each @ q for each in matrices], axis=0))
            expected = p @ np.mean([each.T @ p for each in matrices], axis=0).T
            np.testing.assert_allclose(reduced, expected, atol=2e-5)
        assert np.linalg.matrix_rank(reduced, tol=1e-4) == 2
        assert (other["reduced"][step][name] == own["reduced"][step][name]).all()
        errors = [each - reduced for each in matrices]
        kept = own["states"][step]["errors"][name]
        np.testing.assert_allclose(kept, np.mean(errors, axis=0), atol=2e-5)
        # The next step begins with what this one has found: reduced is P @ Q.T, with P.T @ P = 1.
        found = own["states"][step]["q"][name]
        np.testing.assert_allclose(found @ found.T, reduced.T @ reduced, atol=1e-4)


def test_powersgd_continues_from_the_state_of_a_checkpoint() -> None:
    for own in (result["powersgd"] for result in results()):
        assert own["steps"] == STEPS
        for resumed, straight in zip(own["resumed"], own["reduced"][RESUMED_AT:], strict=True):
            for name, gradient in straight.items():
                np.testing.assert_allclose(resumed[name], gradient, atol=2e-5)


def test_vectors_and_first_steps_are_sent_as_they_are() -> None:
    own = results()[0]
    half = gradients(0, 0)["bias"] / 2  # the other rank has none
    for case in ("full", "sum"):
        scale = 2 if case == "sum" else 1
        np.testing.assert_allclose(own[case]["bias"], half * scale, rtol=1e-6)
    mean = np.mean([gradients(0, rank)["matrix"] for rank in RANKS], axis=0)
    np.testing.assert_allclose(own["full"]["matrix"], mean, rtol=1e-5, atol=1e-6)
    first = own["powersgd"]["reduced"][0]["matrix"]
    np.testing.assert_allclose(own["sum"]["matrix"], 2 * first, atol=2e-5)


def test_bf16_averages_rounded_gradients_in_float32() -> None:
    import torch

    def rounded(array: Any) -> Any:
        return torch.as_tensor(array).to(torch.bfloat16).float()

    own, other = [result["bf16"] for result in results()]
    for name in ("matrix", "kernel"):
        total = sum(rounded(gradients(0, rank)[name]) for rank in RANKS)
        assert (torch.as_tensor(own[name]) == rounded(total / 2)).all()
        assert (own[name] == other[name]).all()
    assert results()[1]["embedding"] == [[-0.5, -0.5], [-0.5, -0.5], [0.0, 0.0]]


def test_bf16_sums_large_gradients_though_one_rank_has_none() -> None:
    for result in results():
        np.testing.assert_allclose(result["large"], [3, 3, 1, 1, 3, 3], rtol=0.01)


def test_a_gradient_that_overflows_leaves_no_trace() -> None:
    for result in results():
        assert not np.isfinite(result["overflow"]["broken"]).any()
        expected = result["powersgd"]["reduced"][1]["matrix"]
        np.testing.assert_allclose(result["overflow"]["next"], expected, atol=2e-5)


@pytest.mark.parametrize("early", [False, True])
def test_powersgd_follows_the_scale_of_a_scaler(early: bool) -> None:
    for result in results():
        pairs = zip(result["scaled"][early], result["powersgd"]["reduced"], strict=True)
        # A state that goes on where the user averages early has lost its errors' scale once.
        for reduced, expected in list(pairs)[: RESUMED_AT if early else STEPS]:
            np.testing.assert_allclose(reduced, expected["matrix"], atol=1e-4)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("adasum", r"powersgd requires op=hvd.Average or hvd.Sum: .*Adasum"),
        ("min", r"what has to be added up\. Use Compression\.none or fp16"),
        ("groups", "powersgd sends all gradients together: leave groups out"),
        ("predivide", "powersgd adds in float32 and needs no gradient_predivide_factor"),
        ("tensor", "bf16 compresses all gradients of an optimizer together: it works only as"),
        ("rank", "powersgd's matrix_rank must be a whole number of at least 1, not 0"),
        ("full_steps", "powersgd's full_steps must be a whole number of at least 0, not 0.5"),
        (
            "state",
            r"the state is of powersgd\(matrix_rank=3\), and this is powersgd\(matrix_rank=2\)",
        ),
        ("complex", "gradient of w, whose type is torch.complex64"),
        ("sparse", "cannot compress the sparse gradient of weight: set sparse_as_dense=True"),
        ("shape", r"another shape for the parameter w, whose gradient is \[9, 9\]"),
    ],
)
def test_what_cannot_be_compressed_is_refused(case: str, text: str) -> None:
    for result in results():
        assert re.search(text, result["refused"][case]), result["refused"][case]
