"""Mistakes in training code, made on purpose: each is told to the user, or does no harm.

The words that a user sees are in `mistakes`. Several mistakes are made in one run where they can.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner import (
    ClusterConfig,
    HangError,
    HorovodRunner,
    RankFailedError,
    SerializationError,
    SlotError,
    load_checkpoint,
    save_checkpoint,
)
from horovod_runner.data import evaluate
from horovod_runner.integrations.training.keras import set_seed
from tests.conftest import Ranks
from tests.preload import keras_on
from tests.programs import run
from tests.real.mistakes import MISTAKES

pytestmark = [pytest.mark.horovod, pytest.mark.places("local")]

TABLE = pa.table({"a": np.arange(64, dtype=np.float32), "b": np.arange(64)})
Shown = Callable[[], str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """All that the driver has shown, in one line."""

    def read() -> str:
        out, err = capsys.readouterr()
        return " ".join(f"{out} {err}".split())

    return read


def check(text: str, *names: str) -> None:
    """Each mistake is told in this text."""
    for name in names:
        assert MISTAKES[name].text in " ".join(text.split()), name


def works(*names: str) -> None:
    """The list says that these are no mistakes; the caller has tried them."""
    assert {MISTAKES[name].result for name in names} == {"works"}


def warned_of(text: str) -> list[str]:
    warnings = ((name, each) for name, each in MISTAKES.items() if each.result == "warned")
    return [name for name, each in warnings if each.text in text]


def line_of(call: str) -> int:
    """The number of the first line of this file with a call."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if call in line)


def wrong_calls() -> dict[str, str]:
    """Calls that raise an error, by name; the training goes on."""
    import os

    import horovod.torch as hvd
    import torch
    from torch.utils.data.distributed import DistributedSampler

    errors = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            errors[name] = str(error)

    attempt("Horovod is used before `hvd.init()`", hvd.rank)
    hvd.init()
    model, optimizer = right_optimizer()

    def backward() -> None:
        model(torch.ones(4, 2) * (hvd.rank() + 1)).sum().backward()

    def backward_twice() -> None:
        backward()
        backward()

    backward()
    optimizer.zero_grad()  # between backward and step
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert model.weight.grad is None
    backward_twice()
    optimizer.step()
    critic, critic_optimizer = right_optimizer()
    optimizer.zero_grad()
    (model(torch.ones(4, 2)) + critic(torch.ones(4, 2))).sum().backward()
    optimizer.step()
    critic_optimizer.zero_grad()
    own = torch.nn.Linear(2, 1 + hvd.rank())
    attempt(
        "Each rank chooses its own width",
        lambda: hvd.broadcast_parameters(own.state_dict(), root_rank=0),
    )
    layers, optimizer = right_optimizer()
    optimizer.zero_grad()
    (layers if hvd.rank() == 0 else model)(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    assert hvd.allgather(layers.weight.detach()).unique(dim=0).shape == (1, 2)
    added = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(added.state_dict(), root_rank=0)
    optimizer.add_param_group({"params": list(added.parameters())})
    optimizer.zero_grad()
    (layers(torch.ones(4, 2)) * added(torch.full((4, 2), 1.0 + hvd.rank()))).sum().backward()
    optimizer.step()
    assert hvd.allgather(added.weight.detach()).unique(dim=0).shape == (1, 2)
    attempt("The optimizer is wrapped twice", lambda: hvd.DistributedOptimizer(optimizer))
    attempt("A `DistributedSampler` without its arguments", lambda: DistributedSampler(range(4)))
    attempt("`main` asks for input", input)
    if hvd.rank() == 0:
        os.environ["JAVA_HOME"] = "/nowhere"  # a session would take seconds to start
        attempt("`main` starts a Spark session", start_spark)
    # A set of texts has the same order on all ranks, and printing waits for nobody.
    orders = hvd.allgather_object(list({"a", "b", "c", "d", "e"}))
    assert orders[0] == orders[1]
    assert not sys.flags.hash_randomization
    for number in range(20_000):
        print(number)
    return errors


def right_optimizer(lr: float = 0.1) -> tuple[Any, Any]:
    import horovod.torch as hvd
    import torch

    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # steps once, before the broadcast
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer


def start_spark() -> None:
    from pyspark.sql import SparkSession

    SparkSession.builder.getOrCreate()


def test_calls_that_are_wrong_say_what_is_right(ranks: Ranks, shown: Shown) -> None:
    errors = ranks.run(2, wrong_calls)
    check(shown(), "`main` starts a Spark session", "`zero_grad` between `backward` and `step`")
    del errors["`main` starts a Spark session"]
    assert len(errors) == 5
    for name, text in errors.items():
        check(text, name)
    works(
        "All ranks print in every step",
        "Words are numbered in the order of a set",
        "`zero_grad(set_to_none=True)`",
        "A layer that some ranks leave out",
        "Weights are unfrozen or added after `DistributedOptimizer`",
        "Gradients are accumulated without saying so",
        "Two optimizers, and a loss of one goes through the weights of both",
    )


def misuse(train: Any, valid: Any, folder: str) -> None:
    """Uses that train something else than what was meant, without an error."""
    import horovod.torch as hvd
    import torch
    from torch.utils.data.distributed import DistributedSampler

    hvd.init()
    model, optimizer = right_optimizer()
    x = torch.ones(4, 2) * (hvd.rank() + 1)

    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        model(x).sum().backward()
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()

    features, (head, of_head) = torch.nn.Linear(2, 2), right_optimizer()
    head(features(x)).sum().backward()
    torch.nn.utils.get_total_norm([p.grad for m in (features, head) for p in m.parameters()])
    of_head.step()

    sampler: Any = DistributedSampler(range(8), num_replicas=hvd.size(), rank=hvd.rank())
    for _ in range(2):
        list(sampler)
    torch.save(model.state_dict(), f=f"{folder}/model.pt")

    list(train.batches(8, ["a"], shuffle=True, seed=hvd.rank()))
    feed = train.batches(8, ["b"], shuffle=True)
    state = feed.state_dict()
    for _ in range(2):
        feed.load_state_dict(state)
        list(feed)
    if hvd.rank() == 0:
        list(valid.batches(4, ["a", "b"]))

    network = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    evaluate(
        train.to_torch(8, ["a"], device="cpu"),
        lambda batch: {"value": network(batch["a"][:, None])[:, 0]},
    )


def test_what_trains_something_else_is_shown_once(
    ranks: Ranks, shown: Shown, tmp_path: Path
) -> None:
    ranks.run(2, misuse, train=TABLE, valid=TABLE, folder=str(tmp_path))
    text = shown()
    names = (
        "The norm of gradients is measured while they accumulate",
        "The norm of gradients is measured of weights without an optimizer",
        "A `DistributedSampler` without `set_epoch`",
        "All ranks write the same file",
        "The seed differs by rank",
        "A feed's state is loaded in each epoch",
        "Rank 0 alone evaluates its part",
        "`evaluate` in training mode",
    )
    check(text, *names)
    assert sorted(warned_of(text)) == sorted(names)
    for name in names:
        assert text.count(MISTAKES[name].text) == 1, name
    line = line_of("    torch.nn.utils.get_total_norm")
    assert f"at test_mistakes.py:{line}: get_total_norm " in text


def misuse_later(folder: str) -> None:
    """Mistakes that show after the first steps; and logs of every rank."""
    import os

    import horovod.torch as hvd
    import mlflow
    import torch

    sys.modules["tensorflow"] = None  # type: ignore[assignment] - TensorBoard would import it
    from torch.utils.tensorboard import SummaryWriter

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(40):
        optimizer.zero_grad()
        model(torch.ones(4, 2) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        if step % 10 == 9:
            schedule.step(-step * hvd.rank())
    SummaryWriter(Path(folder, "logs")).close()
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri(f"file://{folder}/mlruns")
    if hvd.rank() == 0:
        mlflow.search_experiments()  # makes the store, which two processes must not do at once
    hvd.barrier()
    mlflow.log_metric("loss", 1.0)


# Slow: the ranks import MLflow and TensorBoard.
def test_what_goes_wrong_after_the_first_steps_is_shown_once(
    ranks: Ranks, shown: Shown, tmp_path: Path
) -> None:
    ranks.run(2, misuse_later, folder=str(tmp_path))
    text = shown()
    names = (
        "All ranks log to MLflow",
        "All ranks write logs for TensorBoard",
        "The learning rate differs by rank",
    )
    check(text, *names)
    assert sorted(warned_of(text)) == sorted(names)
    assert "than rank 0 after step 40" in text
    assert f"of one host write to the same folder of logs, {tmp_path}/logs/ at " in text


def misuse_data_parallel(mistake: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    loaded = {name: weight + 1 for name, weight in model.state_dict().items()}
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    if mistake == "loads" and dist.get_rank() == 0:
        model.load_state_dict(loaded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1 and mistake == "unfreezes":
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        # In turn: weights that are averaged later.
        with parallel.no_sync() if mistake == "steps in turn" else nullcontext():
            with parallel.no_sync() if mistake == "accumulates alone" else nullcontext():
                parallel(torch.ones(4, 2) * (dist.get_rank() + 1)).sum().backward()
            optimizer.step()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("loads", "Only rank 0 loads weights into `DistributedDataParallel`"),
        ("unfreezes", "Weights are unfrozen after `DistributedDataParallel`"),
        ("accumulates alone", "Every `backward()` before a step is inside `no_sync()`"),
        ("none", None),
        ("steps in turn", None),
    ],
)
def test_weights_under_data_parallel_are_compared(
    ranks: Ranks, shown: Shown, mistake: str, name: str | None
) -> None:
    ranks.run(2, misuse_data_parallel, mistake=mistake)
    text = shown()
    if name is None:
        assert not warned_of(text)
    else:
        check(text, name)
        assert ("1.weight" if mistake == "accumulates alone" else "0.weight") in text


def right(train: Any, folder: str) -> list[list[int]]:
    """A training without a mistake; feeds are made anew in each epoch.

    In every second epoch, gradients are averaged only because they are clipped or unscaled.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model, optimizer = right_optimizer(lr=1e-6)
    scaler = torch.amp.GradScaler("cpu")
    orders = []
    for epoch in range(10):
        for batch in train.to_torch(8, ["a", "b"], shuffle=True, device="cpu"):
            x = torch.stack([batch["a"], batch["b"].float()], dim=1)
            optimizer.zero_grad()
            scaler.scale(model(x).mean()).backward()
            if epoch % 2:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize() if epoch % 2 else nullcontext():
                scaler.step(optimizer)
            scaler.update()
            orders += [(epoch, number) for number in batch["b"].tolist()]
        model.eval()
        evaluate(
            train.to_torch(8, ["a"], device="cpu"),
            lambda batch: {"value": batch["a"] * model.bias.detach()},
        )
        model.train()
        if hvd.rank() == 0:
            torch.save(model.state_dict(), f"{folder}/model.pt")
    own = [[number for at, number in orders if at == epoch] for epoch in range(10)]
    parts = hvd.allgather_object(own)
    for epoch in range(10):  # each row comes once in an epoch
        assert sorted(parts[0][epoch] + parts[1][epoch]) == list(range(64))
    return own


def test_a_feed_that_is_made_anew_in_each_epoch_and_the_rest_of_a_right_training_work(
    ranks: Ranks, shown: Shown, tmp_path: Path
) -> None:
    works("A feed is made anew in each epoch")
    works(  # their results are compared in test_mixed_precision
        "Gradients are clipped before they are averaged",
        "Gradients are clipped while they accumulate",
        "AMP unscales gradients before they are averaged",
    )
    epochs = ranks.run(2, right, train=TABLE, folder=str(tmp_path))
    assert len({str(order) for order in epochs}) == 10
    assert warned_of(shown()) == []


def train_with(broadcast: bool, wrap: str, load: str = "") -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = plain
    if wrap:
        names = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=names)
    if broadcast:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if load == "weights" and hvd.rank() == 0:
        model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    if load == "state" and hvd.rank() == 0:
        state = {0: {"momentum_buffer": torch.ones(1, 2)}}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    model(torch.ones(4, 2) * (hvd.rank() + 1)).sum().backward()
    (plain if wrap == "unused" else optimizer).step()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("No broadcast of the first weights", (False, "used", "")),
        ("Only rank 0 loads the pretrained weights", (True, "used", "weights")),
        ("Only rank 0 loads the optimizer's state", (True, "used", "state")),
        ("No `DistributedOptimizer`", (True, "", "")),
        ("The optimizer is wrapped, and the plain one steps", (True, "unused", "")),
    ],
)
def test_weights_that_differ_at_the_first_step_are_shown(
    ranks: Ranks, shown: Shown, name: str, options: tuple[bool, str, str]
) -> None:
    broadcast, wrap, load = options
    ranks.run(2, train_with, broadcast=broadcast, wrap=wrap, load=load)
    text = shown()
    check(text, name)
    assert len({MISTAKES[each].text for each in warned_of(text)}) == 1
    assert "at test_mistakes.py:" in text


def train_and_change(step: int, end: str, of: str = "all") -> None:
    """Make 25 steps; after one of them rank 1 changes its weights.

    Args:
        step: after which.
        end: what rank 0 does with its weights after the training.
        of: the ranks that train together: "all", or "set" for a process set of ranks 1 and 2.
    """
    import horovod.torch as hvd
    import torch

    together = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[together] if of == "set" else [])
    if of == "set" and hvd.rank() == 0:
        hvd.barrier()
        return
    torch.manual_seed(hvd.rank())
    weight = torch.nn.Parameter(torch.randn(4, 6)[:, :2])  # between its rows are other numbers
    weight.data.fill_(0.5)
    plain = torch.optim.SGD([weight], lr=0.01)
    options = {"process_set": together} if of == "set" else {}
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=[("weight", weight)], **options)
    for number in range(1, 26):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        if number == step and hvd.rank() == 1:
            weight.data.add_(1)
    if of == "set":
        hvd.barrier()
    if end == "loads" and hvd.rank() == 0:
        with torch.no_grad():
            weight.copy_(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("step", "of", "told"),
    [
        (2, "all", "rank 1 and rank 0 have different weights after step 20"),
        (21, "all", "rank 1 and rank 0 have different weights at the end"),
        (21, "set", "rank 2 and rank 1 have different weights at the end in process set 1"),
    ],
)
def test_weights_that_differ_later_are_shown(
    ranks: Ranks, shown: Shown, step: int, of: str, told: str
) -> None:
    ranks.run(2 if of == "all" else 3, train_and_change, step=step, end="", of=of)
    assert told in shown()


def test_equal_weights_are_no_mistake_also_if_rank_0_loads_others_afterwards(
    ranks: Ranks, shown: Shown
) -> None:
    ranks.run(2, train_and_change, step=0, end="loads")
    assert warned_of(shown()) == []


def test_weights_may_differ_on_purpose(ranks: Ranks, shown: Shown) -> None:
    works("Weights are different on purpose")
    ranks.run(2, train_with, {"weight_check": None}, broadcast=False, wrap="")
    assert warned_of(shown()) == []


def test_what_main_changes_outside_is_shown(ranks: Ranks, shown: Shown) -> None:
    import torch

    losses: list[float] = []
    model = torch.nn.Linear(2, 1)

    def main() -> None:
        import os

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(4, 2) * (1 + int(os.environ["RANK"]))).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    ranks.run(2, main)
    text = shown()
    check(
        text,
        "`main` fills a list from outside",
        "`main` trains a model from outside",
        "No Horovod at all",
    )
    assert "main changed `losses`, `model` and returned nothing" in text


def resume(train: Any) -> int:
    import horovod.torch as hvd

    hvd.init()
    checkpoint = load_checkpoint()
    list(train.batches(8, ["a"], shuffle=True))
    save_checkpoint({"epoch": 1}, 1)
    if checkpoint is None:
        raise ValueError("the first attempt fails")
    return int(checkpoint.state["epoch"])


def test_a_run_that_resumes_without_the_state_of_its_feed_is_shown(
    ranks: Ranks, shown: Shown
) -> None:
    works("`save_checkpoint` on all ranks")
    assert ranks.run(2, resume, {"max_restarts": 1}, train=TABLE) == 1
    text = shown()
    check(text, "A run resumes without its feed's state")
    assert warned_of(text) == ["A run resumes without its feed's state"]


def reduce_unequally(mistake: str, train: Any) -> None:
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader

    hvd.init()
    rank, part = hvd.rank(), range(40 - 16 * hvd.rank())
    batches: dict[str, Any] = {
        "A rank leaves a batch out": [step for step in range(6) if (rank, step) != (1, 3)],
        "The batch size differs by rank": train.batches(4 * (rank + 1), ["a"]),
        "The last batch is dropped on some ranks": DataLoader(part, 16, drop_last=True),  # type: ignore[arg-type]
        "One rank stops early": range(10 - 7 * rank),
    }
    for _ in batches[mistake]:
        hvd.allreduce(torch.ones(1), name="gradient")


@pytest.mark.parametrize(
    "name",
    [
        "A rank leaves a batch out",
        "The batch size differs by rank",
        "The last batch is dropped on some ranks",
        "One rank stops early",
    ],
)
def test_ranks_that_do_different_numbers_of_steps_are_named(
    ranks: Ranks, shown: Shown, name: str
) -> None:
    with pytest.raises(RankFailedError) as caught:
        ranks.run(2, reduce_unequally, mistake=name, train=TABLE)
    check(str(caught.value), name)
    read_differently = "The seed differs by rank" in warned_of(shown())
    assert read_differently == (name == "The batch size differs by rank")


def evaluate_on_rank_0(valid: Any) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    if hvd.rank() == 0:
        evaluate(valid.to_torch(8, ["a"], device="cpu"), lambda batch: {"a": batch["a"]})
    hvd.allreduce(torch.ones(1), name="gradient")


def reduce_different_shapes() -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    if hvd.rank() == 1:
        hvd.allreduce(torch.ones(3), name="hidden")
    else:
        hvd.allreduce(torch.ones(2), name="hidden")


def test_ranks_that_reduce_tensors_of_different_shapes_are_named(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="Mismatched ALLREDUCE tensor shapes") as caught:
        ranks.run(3, reduce_different_shapes)
    assert "ranks 0, 2: ALLREDUCE of float32[2]; rank 1: ALLREDUCE of float32[3]." in str(
        caught.value
    )
    text = str(caught.value.__cause__)
    check(text, "Ranks reduce tensors of different shapes")
    assert f"ranks 0, 2 at {__file__}:{line_of('hvd.allreduce(torch.ones(2)')}" in text
    assert f"rank 1 at {__file__}:{line_of('hvd.allreduce(torch.ones(3)')}" in text


def train_unequally_and_join(broadcast: bool) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    model, optimizer = right_optimizer()
    for _ in range(2 + hvd.rank()):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    last = hvd.join()
    if broadcast:
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)


@pytest.mark.parametrize("broadcast", [False, True])
def test_ranks_that_differ_after_join_are_told_to_broadcast(
    ranks: Ranks, shown: Shown, broadcast: bool
) -> None:
    ranks.run(2, train_unequally_and_join, broadcast=broadcast)
    text = shown()
    if broadcast:
        assert warned_of(text) == []
    else:
        check(text, "The weights after `hvd.join()` are not broadcast")


def test_a_collective_that_only_rank_0_calls_is_named(ranks: Ranks) -> None:
    with pytest.raises(HangError) as caught:
        ranks.run(2, evaluate_on_rank_0, {"hang_timeout": 3.0}, valid=TABLE)
    check(str(caught.value), "A collective that only rank 0 calls")
    assert "rank 0 waits in allreduce.horovod_runner.evaluate for rank 1" in str(caught.value)


def test_values_and_modules_that_other_processes_have_not_are_named(
    ranks: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(TypeError) as wrong:
        ranks.run(2, evaluate_on_rank_0, validation=TABLE)
    check(str(wrong.value), "Arguments of `main` are misspelled")
    with pytest.raises(RankFailedError, match=r"_thread\.lock") as caught:
        ranks.run(2, threading.Lock)
    check(str(caught.value), "The value cannot be sent back")
    with open(tmp_path / "log.txt", "w") as log, pytest.raises(SerializationError) as caught:
        ranks.run(2, lambda: log.write("x"))
    check(str(caught.value), "`main` uses a lock, a file or a connection from outside")

    def main() -> None:
        import not_installed_here  # type: ignore[import-not-found]

        assert not_installed_here

    with pytest.raises(ModuleNotFoundError) as caught:
        ranks.run(2, main)
    check(str(caught.value.__cause__), "A module is not installed on the executors")


def read_early(path: str) -> None:
    import horovod.torch as hvd

    hvd.init()
    try:
        if hvd.rank() == 1:
            Path(path).read_text()
    finally:  # rank 0 writes after rank 1 has looked
        hvd.barrier()
        if hvd.rank() == 0:
            Path(path).write_text("words")
        hvd.barrier()


def test_a_file_that_is_read_before_it_is_written_is_named(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        ranks.run(2, read_early, path=str(tmp_path / "words"))
    check(str(caught.value.__cause__), "Ranks read what rank 0 has not written yet")


@pytest.mark.places("spark")
def test_a_file_that_executors_do_not_see_is_named(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.csv").touch()
    monkeypatch.chdir(tmp_path)

    def main() -> str:
        import os

        os.chdir("/")  # as an executor of another host, which has a folder of its own
        return Path("train.csv").read_text()

    with pytest.raises(FileNotFoundError) as caught:
        ranks.run(1, main)
    check(str(caught.value.__cause__), "`main` reads a file of the driver's machine")


@pytest.mark.places("spark")
def test_what_belongs_to_the_driver_is_refused_before_the_launch(ranks: Ranks) -> None:
    spark = ranks.spark
    assert spark is not None
    df = spark.range(10)
    with pytest.raises(SerializationError) as caught:
        ranks.run(2, lambda: spark.range(10).count())
    check(str(caught.value), "`main` uses `spark`")
    with pytest.raises(SerializationError) as caught:
        ranks.run(2, lambda: df.count() + 1)
    check(str(caught.value), "`main` uses a DataFrame from outside", "A Spark UDF inside `main`")
    with pytest.raises(SlotError) as caught:
        ranks.run(64, lambda: None)
    check(str(caught.value), "`np` is larger than the number of slots")


def fit(folder: str) -> None:
    import keras

    import horovod_runner.keras as hvd

    hvd.init()
    set_seed(hvd.rank())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2), np.float32) * (hvd.rank() + 1)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[broadcast])
    model.save(f"{folder}/model.keras")


def test_a_fit_without_a_distributed_optimizer_is_shown(tmp_path: Path, shown: Shown) -> None:
    warm = ClusterConfig(preload_frameworks=keras_on("torch"))
    runner = HorovodRunner(np=-2, env={"KERAS_BACKEND": "torch"}, cluster_config=warm)
    runner.run(fit, folder=str(tmp_path))
    text = shown()
    check(text, "No `DistributedOptimizer` in Keras", "All ranks write the same file")
    assert "begins with other weights" not in text


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    works('A script without `if __name__ == "__main__"`')
    script = tmp_path / "train.py"
    script.write_text(
        "from horovod_runner import HorovodRunner\n"
        "def main(): return 7\n"
        "print('result', HorovodRunner(np=-2).run(main))\n"
    )
    assert run(sys.executable, script, check=True).stdout.count("result 7") == 1


def load_after_cuda() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(torch.ones(8, 2, device="cuda"))
    list(DataLoader(rows, batch_size=4, num_workers=1))


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no GPU")
def test_a_dataloader_that_is_forked_after_cuda_was_used_is_named(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError) as caught:
        ranks.run(1, load_after_cuda)
    check(str(caught.value), "DataLoader workers that are forked after CUDA was used")


def test_every_mistake_that_can_be_known_is_made_here() -> None:
    source = Path(__file__).read_text()
    known = [name for name, mistake in MISTAKES.items() if mistake.result != "unknown"]
    assert [name for name in known if f'"{name}"' not in source and f"'{name}'" not in source] == []
