"""prepare, epochs and checkpointed: a loop of one's own in ranks, without a line of Horovod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from horovod_runner import ClusterConfig, HorovodRunner
from tests.errors import error_of
from tests.learned import assert_close
from tests.preload import ALIKE, keras_on

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("nothing_left")]

ROWS = 101


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    return pd.DataFrame({"x": x.tolist(), "y": x @ [1.0, -2.0, 0.5, 0.0]})


def run(main: Any, np_: int, frameworks: Any = ("horovod.torch",), **options: Any) -> Any:
    arguments = options.pop("arguments", {})
    runner = HorovodRunner(
        np=-np_,
        progress=False,
        gpus_per_rank=0,
        env=ALIKE,
        cluster_config=ClusterConfig(preload_frameworks=list(frameworks)),
        **options,
    )
    return runner.run(main, data=table(), **arguments)


def loop(data: Any, stop: int | None = None) -> Any:
    import torch

    from horovod_runner import epochs, prepare

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    batches = data.to_torch(global_batch=16, columns={"x": "x", "y": "y"}, shuffle=True)
    model, optimizer, schedule, batches = prepare(model, optimizer, schedule, batches)
    seen = []
    for epoch in epochs(4, resume=True):
        if epoch == stop:
            raise RuntimeError("the machine is switched off")
        seen.append(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x)[:, 0], y).backward()
            optimizer.step()
        schedule.step()
    weights = [value.numpy().copy() for value in model.state_dict().values()]
    return weights, seen, optimizer.param_groups[0]["lr"]


def test_a_prepared_loop_learns_what_one_process_learns_and_continues(tmp_path: Path) -> None:
    alone, epochs, rate = run(loop, 1)
    assert (epochs, rate) == ([0, 1, 2, 3], pytest.approx(0.0025))
    kept = {"checkpoint_dir": tmp_path, "resume": True}
    with pytest.raises(RuntimeError, match="switched off"):
        run(loop, 3, arguments={"stop": 2}, **kept)
    weights, epochs, rate = run(loop, 2, **kept)
    assert (epochs, rate) == ([2, 3], pytest.approx(0.0025))
    assert_close(weights, alone, atol=2e-5)


def networks(data: Any) -> Any:
    import torch

    from horovod_runner import checkpointed, epochs, prepare

    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    of_maker = torch.optim.SGD(maker.parameters(), 0.01)
    of_judge = torch.optim.SGD(judge.parameters(), 0.01)
    batches = data.to_torch(global_batch=16, columns={"x": "x"})
    maker, judge, of_maker, of_judge, batches = prepare(maker, judge, of_maker, of_judge, batches)
    kept = checkpointed(maker=maker, judge=judge, batches=batches, best=-1.0)
    for _ in epochs(2):
        for (x,) in batches:
            of_maker.zero_grad()
            judge(maker(x)).mean().backward()  # fills the judge's gradients, too
            of_maker.step()
            of_judge.zero_grad()
            (judge(maker(x).detach()) - judge(x)).square().mean().backward()
            of_judge.step()
        kept.best = kept.best + 1
        kept.save(best=kept.best)
    weights = [*maker.state_dict().values(), *judge.state_dict().values()]
    return [value.numpy().copy() for value in weights], kept.best, kept.step, kept.epoch


def test_two_networks_with_two_optimizers_and_a_value_are_kept(tmp_path: Path) -> None:
    alone, *_ = run(networks, 1)
    weights, *position = run(networks, 2, checkpoint_dir=tmp_path)
    assert position == [1.0, 14, 2]
    assert_close(weights, alone, atol=2e-5)
    again, *position = run(networks, 2, checkpoint_dir=tmp_path, resume=True)
    assert position == [1.0, 14, 2]  # nothing was left to do
    assert_close(again, weights, rtol=0)


def shared(data: Any) -> Any:
    """Two models with a layer in common, and one optimizer of both."""
    import torch

    from horovod_runner import prepare

    torch.manual_seed(0)
    trunk = torch.nn.Linear(4, 3)
    models = [torch.nn.Sequential(trunk, torch.nn.Linear(3, 1)) for _ in range(2)]
    own = {id(weight): weight for model in models for weight in model.parameters()}
    optimizer = torch.optim.SGD(own.values(), 0.1)
    batches = data.to_torch(global_batch=16, columns={"x": "x", "y": "y"})
    actor, critic, optimizer, batches = prepare(*models, optimizer, batches)
    for x, y in batches:
        optimizer.zero_grad()
        (actor(x)[:, 0] + critic(x)[:, 0].square() - y).square().mean().backward()
        optimizer.step()
    return [weight.detach().numpy() for weight in own.values()]


def test_models_that_share_a_layer_have_one_optimizer() -> None:
    assert_close(run(shared, 2), run(shared, 1), atol=2e-5)


def scaled(data: Any, stop: int | None = None) -> Any:
    """Two models with an optimizer and a schedule each, and one scaler."""
    import torch

    from horovod_runner import epochs, prepare

    torch.manual_seed(0)
    models = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in models]
    schedules = [
        torch.optim.lr_scheduler.StepLR(each, 1, factor)
        for each, factor in zip(optimizers, (0.5, 0.1), strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    batches = data.to_torch(global_batch=16, columns={"x": "x", "y": "y"}, shuffle=True)
    first, second, *rest = prepare(*models, *optimizers, *schedules, scaler, batches)
    optimizers, schedules, (scaler, batches) = rest[:2], rest[2:4], rest[4:]
    for epoch in epochs(3, resume=True):
        if epoch == stop:
            raise RuntimeError("the machine is switched off")
        for x, y in batches:
            for each in optimizers:
                each.zero_grad()
            loss = (first(x).sum(1) + second(x)[:, 0] - y).square().mean()
            scaler.scale(loss).backward()
            for model, each in zip((first, second), optimizers, strict=True):
                scaler.unscale_(each)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(each)
            scaler.update()
        for schedule in schedules:
            schedule.step()
    weights = [*first.state_dict().values(), *second.state_dict().values()]
    rates = [each.param_groups[0]["lr"] for each in optimizers]
    return [value.numpy().copy() for value in weights], rates, scaler.get_scale()


def test_each_optimizer_has_its_schedule_and_a_scaler_continues(tmp_path: Path) -> None:
    alone, rates, scale = run(scaled, 1)
    assert rates == pytest.approx([0.00125, 0.00001])
    assert scale == 4.0 * 2**4  # it grows after 5 steps, of which there are 21
    kept = {"checkpoint_dir": tmp_path, "resume": True}
    with pytest.raises(RuntimeError, match="switched off"):
        run(scaled, 2, arguments={"stop": 1}, **kept)
    weights, *others = run(scaled, 2, **kept)
    assert others == [rates, scale]
    assert_close(weights, alone, atol=2e-5)


def loaders(data: Any) -> Any:
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

    from horovod_runner import prepare

    numbers = TensorDataset(torch.arange(20))
    shuffled = prepare(DataLoader(numbers, 4, shuffle=True))
    in_order = prepare(DataLoader(numbers, 4))
    of_shard = prepare(DataLoader(data.to_torch_dataset({"y": "y"}), 4))
    seen = [
        [int(number) for batch in loader for number in batch[0]]
        for loader in (shuffled, shuffled, in_order)
    ]
    refused = []
    for sampler in (
        WeightedRandomSampler([1.0] * 20, 20),
        RandomSampler(numbers, replacement=True),
        RandomSampler(numbers, num_samples=8),
    ):
        loader = DataLoader(numbers, 4, sampler=sampler)
        refused.append(error_of(ValueError, prepare, loader))
    return hvd.allgather_object((seen, len(of_shard))), refused


def test_a_dataloader_gives_each_rank_its_part() -> None:
    found, refused = run(loaders, 2)
    first, second, in_order = ([seen[at] for seen, _ in found] for at in range(3))
    for parts in (first, second, in_order):
        assert sorted(number for part in parts for number in part) == list(range(20))
        assert [len(part) for part in parts] == [10, 10]
    assert first != second
    assert in_order[0] == sorted(in_order[0])
    assert [count for _, count in found] == [13, 13]
    for said, part in zip(refused, ("WeightedR", "replacement=True", "num_samples=8"), strict=True):
        assert part in said


def tape(data: Any) -> Any:
    import keras
    import tensorflow as tf

    from horovod_runner import epochs, prepare

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    model, optimizer = prepare(model, optimizer)
    batches = data.to_tf(global_batch=16, columns={"x": "x", "y": "y"})
    for _ in epochs(2, resume=True):
        for x, y, weight in batches:
            with tf.GradientTape() as recorded:
                loss = tf.reduce_mean((model(x)[:, 0] - y) ** 2 * weight)
            gradients = recorded.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
    return model.get_weights()


def test_a_loop_of_keras_learns_what_one_process_learns(tmp_path: Path) -> None:
    frameworks = keras_on("tensorflow")
    alone = run(tape, 1, frameworks)
    together = run(tape, 2, frameworks, checkpoint_dir=tmp_path)
    again = run(tape, 2, frameworks, checkpoint_dir=tmp_path, resume=True)
    assert_close(together, alone, atol=2e-5)
    assert_close(again, together, rtol=0)


def mistakes(data: Any) -> list[str]:
    import torch

    from horovod_runner import checkpointed, epochs, prepare

    model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    calls: list[Any] = [
        prepare,
        lambda: prepare(model, data),
        lambda: prepare(model, torch.optim.SGD(other.parameters(), 0.1)),
        lambda: epochs(3, resume=True),
        lambda: epochs(-1),
        lambda: checkpointed(save=3),
    ]
    return [error_of((TypeError, ValueError, RuntimeError), call) for call in calls]


def test_mistakes_are_told() -> None:
    said = run(mistakes, 1)
    wanted = ["prepare takes", "Shard", "2 of them are of no model", "prepare", "0 or more", "save"]
    assert len(said) == len(wanted)
    for text, part in zip(said, wanted, strict=True):
        assert part in text
