"""The trainers of docs/howto/trainers.md train as its examples say, and go on after a failure."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from horovod_runner import ClusterConfig, HorovodRunner
from tests.preload import ALIKE, LIGHTNING

pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("trainers")]
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "trainers.md"
Runner = partial(
    HorovodRunner,
    progress=False,
    env=ALIKE,
    cluster_config=ClusterConfig(preload_frameworks=[*LIGHTNING, "transformers.trainer"]),
)


@cache
def example(title: str) -> Callable[..., Any]:
    """The ``train`` of a section of the page."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    text = next(part for part in sections if part.startswith(f"{title}\n"))
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(re.search(r"^def train\(.*?(?=^\S|\Z)", code[1], re.DOTALL | re.MULTILINE)[0], names)  # type: ignore[index]
    return names["train"]


def killed_once(train: FunctionType, at: int, **arguments: Any) -> Any:
    """Run ``train``; in the first attempt rank 1 is killed after it has reported a step."""
    import importlib

    import horovod_runner

    def report(*, step: int, **numbers: Any) -> None:
        plain(step=step, **numbers)
        is_last = os.environ["RANK"] == "1"
        if is_last and step >= at and horovod_runner.current_attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    plain = horovod_runner.report
    horovod_runner.report = report  # type: ignore[assignment]
    for name in ("huggingface", "lightning"):
        if f"horovod_runner.{name}" in train.__code__.co_names:  # their imports take seconds
            module = importlib.import_module(f"horovod_runner.integrations.{name}")
            module.report = report  # type: ignore[attr-defined]
    return train(**arguments)


def table(rows: int) -> pd.DataFrame:
    x = np.random.default_rng(0).normal(size=(rows, 2)).astype("float32")
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": x.sum(axis=1)})


def sentences(rows: int) -> pd.DataFrame:
    tokens = np.random.default_rng(0).integers(0, 100, size=(rows, 8))
    return pd.DataFrame({"input_ids": list(tokens), "labels": list(tokens)})


#: 15 steps in an epoch, of which the last one is short; a checkpoint at steps 10, 20, ...
NUMBERS = {"data": table(14 * 256 + 100), "epochs": 3}
SENTENCES = {"data": sentences(7 * 64)}


#: By section of the page: the ranks, the arguments, and the number of steps.
CASES: dict[str, tuple[int | tuple[int, int], dict[str, Any], int]] = {
    "DDP": ((-2, -2), NUMBERS, 45),
    "FSDP2 and HSDP": (-2, NUMBERS, 45),
    "Accelerate": (-2, NUMBERS, 45),
    "Lightning": (-2, NUMBERS, 45),
    "Hugging Face Trainer": (-2, SENTENCES, 40),
    "DeepSpeed": (-2, NUMBERS, 45),
}
OWN_MODELS = {"DeepSpeed", "Hugging Face Trainer"}  # of the others all have the same model
PACKAGES = {
    "Accelerate": "accelerate",
    "DeepSpeed": "deepspeed",
    "Hugging Face Trainer": "transformers",
    "Lightning": "lightning",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of all trainings: ranks are forked only if it stays the same."""
    path, before = tmp_path_factory.mktemp("trainers"), Path.cwd()
    os.chdir(path)
    yield path
    os.chdir(before)


@cache
def undisturbed(title: str) -> list[Any]:
    """The weights that one process learns; of DeepSpeed, two ranks that nobody kills."""
    shutil.rmtree("output", ignore_errors=True)
    size = -2 if title == "DeepSpeed" else -1
    return [*Runner(np=size).run(example(title), **CASES[title][1]).values()]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("title", CASES)
def test_a_killed_training_goes_on_in_its_epoch_and_learns_what_one_process_learns(
    title: str,
) -> None:
    if title in PACKAGES and find_spec(PACKAGES[title]) is None:
        pytest.skip(f"without {PACKAGES[title]}")
    size, arguments, steps = CASES[title]
    shutil.rmtree("output", ignore_errors=True)
    runner = Runner(np=size, max_restarts=1)
    learned = runner.run(killed_once, train=example(title), at=25, **arguments)
    first, second = runner.last_run.attempts
    assert "rank 1 of 2" in str(first.error)
    assert "SIGKILL" in str(first.error)
    assert second.resumed_from == 20
    assert runner.last_run.metrics.to_pylist()[-1]["step"] == steps
    expected = undisturbed(title if title in OWN_MODELS else "DDP")
    for (name, weights), other in zip(learned.items(), expected, strict=True):
        np.testing.assert_allclose(weights, other, atol=1e-5, err_msg=name)


def variants(data: Any) -> dict[str, Any]:
    """Train in several ways on four ranks, or in a plain one in one process; the weights."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    dist.init_process_group("gloo")
    is_alone = dist.get_world_size() == 1
    columns = {"x": ["a", "b"], "y": "label"}

    def network() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
        )

    def fit(model: Any, forward: Any, accumulates: bool = False) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        feed = data.to_torch(global_batch=64, columns=columns, shuffle=True, seed=1)
        feed.load_state_dict({**feed.state_dict(), "epoch": 0})  # the same rows each time
        for number, (x, y) in enumerate(feed, 1):
            steps = not accumulates or number % 2 == 0
            with contextlib.nullcontext() if steps or is_alone else model.no_sync():
                mse_loss(forward(x)[:, 0], y).backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=options)
        kept.append(model)  # freed too early, torch 2.13 may wait for ever
        return {name.removeprefix("_orig_mod."): weights.numpy() for name, weights in state.items()}

    kept: list[Any] = []
    results = {}
    if is_alone:
        for accumulates in (False, True):
            model = network()
            results["accumulated" if accumulates else "plain"] = fit(model, model, accumulates)
        return results

    parallel = DistributedDataParallel(network())
    results["accumulated"] = fit(parallel, parallel, accumulates=True)

    parallel = DistributedDataParallel(network())
    results["recomputed"] = fit(parallel, lambda x: checkpoint(parallel, x, use_reentrant=False))
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    results["compiled"] = fit(model, DistributedDataParallel(compiled))

    model = network()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    results["hsdp"] = fit(fully_shard(model, mesh=mesh), model)
    dist.destroy_process_group()
    return results


@pytest.mark.usefixtures("folder")
def test_ways_to_train_with_torch_distributed_learn_what_one_process_learns() -> None:
    together, alone = (Runner(np=n).run(variants, data=table(303)) for n in (-4, -1))
    for name, learned in together.items():
        expected = alone["accumulated" if name == "accumulated" else "plain"]
        for (of, weights), other in zip(learned.items(), expected.values(), strict=True):
            np.testing.assert_allclose(weights, other, atol=1e-5, err_msg=f"{name}: {of}")


def classify(data: Any) -> tuple[dict[str, Any], float]:
    """Train a classifier with the Trainer, as it is written for one process."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from horovod_runner.huggingface import ReportCallback, batch_per_rank

    arguments = TrainingArguments(
        "output",
        max_steps=6,
        per_device_train_batch_size=batch_per_rank(8),
        per_device_eval_batch_size=8,
        optim="sgd",
        learning_rate=0.1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **none, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
    model = BertForSequenceClassification(config)
    rows = data.to_torch_dataset()
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=rows, callbacks=[ReportCallback()]
    )
    trainer.train()
    return model.state_dict(), trainer.evaluate()["eval_loss"]


@pytest.mark.usefixtures("folder")
def test_a_classifier_of_hugging_face_learns_what_one_process_learns() -> None:
    pytest.importorskip("transformers")
    data = sentences(48).rename(columns={"labels": "unused"}).assign(labels=[0, 1, 1] * 16)
    data = data[["input_ids", "labels"]]
    (learned, loss), (alone, loss_alone) = (Runner(np=n).run(classify, data=data) for n in (-2, -1))
    for name, weights in learned.items():
        np.testing.assert_allclose(weights, alone[name], atol=1e-5, err_msg=name)
    assert loss == pytest.approx(loss_alone, abs=1e-5)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("title", "package", "metric"), [("XGBoost", "xgboost", "rmse"), ("LightGBM", "lightgbm", "l2")]
)
def test_boosting_goes_on_with_the_round_after_the_last_checkpoint(
    title: str, package: str, metric: str
) -> None:
    pytest.importorskip(package)
    runner = Runner(np=-2, max_restarts=1)
    runner.run(killed_once, train=example(title), at=6, data=table(1000), rounds=10)
    first, second = runner.last_run.attempts
    assert "rank 1 of 2" in str(first.error)
    assert "SIGKILL" in str(first.error)
    assert second.resumed_from in (5, 6)
    reports = [row for row in runner.last_run.metrics.to_pylist() if row["attempt"] == 2]
    assert [row["step"] for row in reports] == [*range(second.resumed_from + 1, 11)]
    assert reports[-1][metric] < runner.last_run.metrics.to_pylist()[0][metric] / 2


def stopped_early(data: Any, valid: Any) -> Any:
    import lightgbm as lgb

    from horovod_runner.boosting import lightgbm_ranks

    def rows(shard: Any) -> Any:
        batch = next(iter(shard.batches(global_batch=shard.rows)))
        return lgb.Dataset(batch["x"], batch["y"])

    model = lgb.train(
        {"objective": "binary", "verbosity": -1, **lightgbm_ranks()},
        rows(data),
        num_boost_round=200,
        valid_sets=[rows(valid)],
        callbacks=[lgb.early_stopping(3, verbose=False)],
    )
    return model.best_iteration, model.best_score["valid_0"]["binary_logloss"]


def test_boosting_stops_after_one_round_on_all_ranks() -> None:
    pytest.importorskip("lightgbm")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 4))
    labels = x[:, 0] + 1.5 * rng.normal(size=600) > 0
    rows = pd.DataFrame({"x": x.tolist(), "y": labels * 1})
    first, second = Runner(np=-2).run_all(stopped_early, data=rows[:401], valid=rows[401:])
    assert first == second
    assert first[0] < 100
