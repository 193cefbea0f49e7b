"""global_batch: weights that do not depend on the number of ranks, nor on changes of it."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.common.options import grouped
from tests.learned import assert_close
from tests.preload import ALIKE
from tests.real.global_batch_training import (
    COLUMNS,
    ROWS,
    STEPS,
    TRAININGS,
    both,
    keras_training,
    normalized,
    one_ahead,
    some_steps,
    table,
    train_all,
)
from tests.shards import as_rank, shard_of

# One run trains all, and pytest-xdist's processes do not share runs.
pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("global batch")]
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def run(size: int, main: Any, env: dict[str, str] | None = None, **arguments: Any) -> Any:
    backend = (env or {}).get("KERAS_BACKEND")
    frameworks = ["keras", f"horovod.{backend}"] if backend else ["horovod.torch"]
    options = grouped(
        {"preload_frameworks": frameworks, "cpu_collectives": "gloo"}
    )  # more ranks than cores
    return HorovodRunner(np=-size, env={**ALIKE, **(env or {})}, **options).run(main, **arguments)


@pytest.fixture
def feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The feed of the second of two ranks, whose part of 31 rows has 15."""
    monkeypatch.setenv("HOROVOD_RUNNER_DATA", str(tmp_path))
    as_rank(monkeypatch, 1, 2)
    return shard_of(table()).to_torch(global_batch=31, columns=COLUMNS, device="cpu")


def gradient(loss: Any) -> float:
    """The gradient of the only weight of a loss, as backward leaves it."""
    import torch

    weight = torch.ones(1, requires_grad=True)
    loss(weight)
    assert weight.grad is not None
    return float(weight.grad)


def test_backward_is_weighted_in_the_loop_over_the_feed_alone(feed: Any) -> None:
    import torch

    def nested(weight: Any) -> None:
        from torch.utils.checkpoint import checkpoint

        checkpoint(torch.square, weight, use_reentrant=True).sum().backward()

    def both(weight: Any) -> None:
        torch.autograd.backward([weight.sum(), 2 * weight], [None, torch.ones(1)])

    def twice(weight: Any) -> None:
        weight.sum().backward()
        weight.sum().backward()

    losses: list[tuple[Any, float]] = [
        (lambda weight: weight.sum().backward(), 1.0),
        (lambda weight: (weight * 3).backward(torch.full((1,), 2.0)), 6.0),
        (nested, 2.0),
        (both, 3.0),
        (twice, 2.0),
    ]
    share = 15 * 2 / 31
    for step, _ in enumerate(feed):
        for loss, plain in losses:
            assert gradient(loss) == pytest.approx(plain * share)
        weight = torch.ones(1, requires_grad=True)
        assert torch.autograd.grad(weight.sum(), weight)[0] == 1.0
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            torch.ones(2, requires_grad=True).square().backward()
        if step == 1:
            break
    assert gradient(losses[0][0]) == 1.0  # the loop was left
    for step, _ in enumerate(feed):
        expected = share if step < 6 else 12 * 2 / 25  # the last step has 25 rows
        assert gradient(losses[0][0]) == pytest.approx(expected)
    assert gradient(losses[0][0]) == 1.0


def blocks(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches that are drawn four at a time, and not kept."""
    drawn: deque[Any] = deque()
    for batch in batches:
        drawn.append(batch)
        while len(drawn) == 4:
            while drawn:
                yield drawn.popleft()
    while drawn:
        yield drawn.popleft()


def by_a_thread(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches that a thread draws ahead."""
    drawn: queue.Queue[Any] = queue.Queue(2)

    def draw() -> None:
        for batch in batches:
            drawn.put(batch)
        drawn.put(None)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    while (batch := drawn.get()) is not None:
        yield batch
    thread.join()


@pytest.mark.parametrize("ahead", [one_ahead, blocks, by_a_thread])
def test_a_batch_that_is_drawn_ahead_keeps_its_weight(feed: Any, ahead: Any) -> None:
    import torch

    weights = {15: 15 * 2 / 31, 12: 12 * 2 / 25}  # by rows; the last step has 25 rows

    def check(x: Any) -> None:
        for _ in range(2):
            factor = gradient(lambda weight: (weight * len(x)).sum().backward()) / len(x)
            assert factor == pytest.approx(weights[len(x)])

    rows = []
    for x, *_ in ahead(feed):
        rows.append(len(x))
        check(x)
    assert rows == [15] * 6 + [12]
    with torch.no_grad():
        for x, _, _ in ahead(feed):
            rows.append(len(x))
    for x, _, _ in feed:  # an evaluation, whose author forgot no_grad
        rows.append(len(x))
    for step, batch in enumerate(ahead(both(feed, 3))):
        if step not in (0, 3, 6):  # skipped, as where a loss is not a number
            check(batch[0])
    del batch
    assert gradient(lambda weight: weight.sum().backward()) == 1.0


@pytest.mark.parametrize(
    ("kind", "equal"),
    [
        ("BatchNorm1d", True),
        ("BatchNorm1d for evaluation", False),
        ("InstanceNorm1d", False),
        ("GroupNorm", False),
    ],
)
def test_a_loss_with_batch_normalization_makes_parts_equal(
    feed: Any, kind: str, equal: bool
) -> None:
    import torch

    layers = {
        "InstanceNorm1d": torch.nn.InstanceNorm1d(3, affine=True),
        "GroupNorm": torch.nn.GroupNorm(3, 3),
    }
    layer = layers.get(kind) or torch.nn.BatchNorm1d(3)
    layer.train("evaluation" not in kind)
    for x, _, _ in feed:
        shaped = x[:, :, None].expand(-1, -1, 4).clone().requires_grad_()
        layer(shaped).sum().backward()
        assert feed.batch_rows(0) == (16 if equal else 15)


@cache
def trained(size: int) -> dict[str, list[Any]]:
    return dict(run(size, train_all, train=table(), valid=table(40)))


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_learns_what_one_process_learns(size: int, name: str) -> None:
    assert_close(trained(size)[name], trained(1)[name], **TOLERANCE)


def test_a_training_goes_on_with_other_numbers_of_ranks_as_if_nothing_had_happened() -> None:
    saved: dict[str, Any] | None = None
    rows: dict[int, Counter[int]] = {}
    for size, until in [(4, STEPS - 3), (2, 2 * STEPS - 4), (3, 3 * STEPS)]:
        saved = run(size, some_steps, train=table(), until=until, saved=saved)
        assert saved is not None
        for epoch, numbers in saved["rows"].items():
            rows.setdefault(epoch, Counter()).update(numbers)
    assert saved is not None
    assert_close(saved["weights"], trained(1)["undisturbed"], **TOLERANCE)
    assert rows == {epoch: Counter(range(ROWS)) for epoch in range(3)}


@pytest.mark.parametrize("hidden", [False, True])
def test_batch_normalization_is_said_once_and_gets_equal_parts(
    hidden: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    taken = run(
        3, normalized, train=table(67), hidden=hidden
    )  # 32 + 32 + 3 rows: 11, 11, 10 and 1, 1, 1
    text = capfd.readouterr().out
    assert text.count("the model has batch normalization") == 1
    assert text.count("equal parts, 11 rows on each of 3 ranks") == 1
    for rank, real in enumerate([11, 11, 10]):
        first = [real, real] if rank == 2 else [11, real]  # before the first loss was seen
        assert taken[rank] == [first, [11, real], [11, 1], [11, real], [11, real], [11, 1]]


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_learns_what_one_process_learns(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    one = run(1, keras_training, env, train=table())
    assert "batch normalization" not in capfd.readouterr().out
    several = run(3, keras_training, env, train=table())
    for name, weights in one.items():
        assert_close(several[name], weights, **TOLERANCE)
    assert capfd.readouterr().out.count("the model has batch normalization") == 1
