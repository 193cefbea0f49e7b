"""The weight check: hashing on the ranks, comparing on the driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from horovod_runner import SyncError
from horovod_runner.driver.sync_check import NoteCheck, SyncCheck
from horovod_runner.wire.measurements import Note
from horovod_runner.wire.messages import Weights
from horovod_runner.worker.agreement import exchange
from horovod_runner.worker.checks import calls, models, notes, steps
from horovod_runner.worker.profiling.steps import OptimizerSteps
from horovod_runner.worker.weights import hash_weights, is_sharded
from tests.stand_ins import as_rank


class Variable:
    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.value = value


def test_only_rank_0_sends_names() -> None:
    weights = {"a": np.zeros(2), "b": np.ones(2)}
    first, second = (hash_weights(weights, rank, 4) for rank in (0, 1))
    assert (first.names, second.names) == (["a", "b"], [])
    assert first.digests == second.digests
    assert len(set(first.digests)) == 2
    assert (first.epoch, second.rank) == (4, 1)


def test_nested_weights_are_named_by_their_path_or_their_index() -> None:
    class Model:
        trainable_variables = (Variable("dense/kernel", np.zeros(2)),)

    listed = [Variable("bias", np.ones(1)), np.ones(2)]
    weights = hash_weights({"g": Model(), "d": listed, "c": np.zeros(2)}, 0, None)
    assert weights.names == ["g/dense/kernel", "d/bias", "d/1", "c"]
    assert weights.digests[0] == weights.digests[3]


@pytest.mark.parametrize("model", [3, {}, {"a": "text"}, [None]])
def test_an_argument_without_weights_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="check_weights"):
        hash_weights(model, 0, None)


@pytest.mark.parametrize("odd", [1, 2])
def test_weights_are_compared_once_all_ranks_have_sent_theirs(odd: int) -> None:
    check = SyncCheck(3)
    for rank, digest in ((0, b"x"), (0, b"y"), (3 - odd, b"x"), (3 - odd, b"y"), (odd, b"x")):
        check.take(Weights(rank, ["a"], [digest], None))
    assert check.compared == 1
    with pytest.raises(SyncError, match=rf"rank {odd} .*rank 0, .* a \(1 of 1 "):
        check.take(Weights(odd, [], [b"z"], None))


def test_a_rank_that_checks_alone_ends_the_run() -> None:
    check, message = SyncCheck(2), Weights(1, [], [b"x"], None)
    for _ in range(100):
        check.take(message)
    with pytest.raises(SyncError, match=r"rank 1 .* 101 .*rank 0: .*check_weights"):
        check.take(message)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Weights(1, [], [b"x"], 3), "rank 1 .*epoch 3 .*rank 0 .*epoch 2:"),
        (Weights(1, [], [b"x", b"y"], 2), "rank 1 .* 2 weights .*epoch 2, .*rank 0 .* 1:"),
        (
            Weights(1, [], [b"y"], 2),
            r"epoch 2: rank 1 .*rank 0, .* one \(1 of 1 ",
        ),  # rank 0 sent no name
    ],
)
def test_other_differences_end_the_run(other: Weights, text: str) -> None:
    check = SyncCheck(2)
    check.take(Weights(0, [], [b"x"], 2))
    with pytest.raises(SyncError, match=text):
        check.take(other)


def test_a_rank_whose_weights_have_only_other_names_has_no_other_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {0: ("a", (2, 3)), 1: ("b", (2, 3)), 2: ("c", (2, 4))}
    texts = {
        rank: f"t.py:{rank}\n{name} of shape {shape}" for rank, (name, shape) in weights.items()
    }
    monkeypatch.setattr(models, "connected", lambda _: None)
    monkeypatch.setattr(models, "exchange", lambda *_, **__: ([], texts))
    told = r"rank 0 has a of shape \(2, 3\) at t.py:0, and rank 2 c of shape \(2, 4\) at t.py:2 "
    with as_rank(0, 3), pytest.raises(ValueError, match=told):
        models.check_same_model([weights[0]], same_names=False)


@pytest.mark.parametrize(
    ("file", "is_library"), [("site-packages/tool/run.py", True), ("threading.py", False)]
)
def test_libraries_may_be_in_the_folder_of_the_standard_library(
    file: str, is_library: bool
) -> None:
    """As without a virtual environment."""
    path = os.path.join(os.path.dirname(os.__file__), file)
    called: dict[str, Any] = {"notes": notes}
    exec(compile("found = notes.from_library(), notes.users_line()", path, "exec"), called)
    found, line = called["found"]
    assert found is is_library
    assert line.startswith("test_sync.py:")


def test_ranks_compare_calls_in_files_whose_names_are_no_utf_8() -> None:
    ranks: Any = SimpleNamespace(
        gather=lambda sent, _: [sent, [0, *sent[1:]]], broadcast=lambda data, *_: data
    )
    name = os.fsdecode(b"caf\xe9.py")
    assert exchange(ranks, name, name)[1] == {0: r"caf\udce9.py", 1: ""}


def warnings_of(*notes: Note, size: int = 2, hosts: str = "aa") -> list[str]:
    shown: list[str] = []
    check = NoteCheck(size, lambda rank: hosts[rank], shown.append)
    for note in notes:
        check.take(note)
    check.finish()
    return shown


def feeds(rank: int, *values: str, data: str = "train") -> list[Note]:
    return [
        Note(rank, "feed", f"{data}\n{number}", value, "t.py:3")
        for number, value in enumerate(values, 1)
    ]


def test_the_same_notes_of_all_ranks_are_no_mistake() -> None:
    ahead, other = feeds(1, *"abcdefgh"), feeds(0, *"abcdefgh")
    assert warnings_of(*ahead[:2], *other, *ahead[2:]) == []


def test_feeds_that_differ_are_reported_once_with_both_ranks() -> None:
    shown = warnings_of(*feeds(1, "seed=1", "seed=1"), *feeds(0, "seed=0", "seed=0"))
    assert len(shown) == 1
    assert "read train differently: rank 1 reads seed=1 at t.py:3, and rank 0 seed=0" in shown[0]


def test_feeds_that_some_ranks_do_not_read_are_reported() -> None:
    (text,) = warnings_of(*feeds(0, "a", "b"), *feeds(1, "a"))
    assert text.startswith("rank 0 read train at t.py:3, and rank 1 did not.")
    # Not only at the end, where the ranks are far apart.
    shown: list[str] = []
    times = iter([0.0, 50.0, 50.0, 120.0, 120.0])
    check = NoteCheck(3, lambda _: "", shown.append, lambda: next(times))
    for note in feeds(0, *"abc"):
        assert not shown
        check.take(note)
    (text,) = shown
    assert text.startswith("rank 0 read train at t.py:3, and ranks 1-2 did not.")


@pytest.mark.parametrize(("hosts", "count"), [("aa", 1), ("ab", 0)])
def test_a_file_that_two_ranks_of_a_host_write_is_reported(hosts: str, count: int) -> None:
    for path, text in (
        ("/tmp/model.pt", "ranks 0-1 of one host write the same file, /tmp/model.pt at t.py:9: "),
        ("/tmp/logs/", "ranks 0-1 of one host write to the same folder of logs, /tmp/logs/ at "),
    ):
        notes = [Note(rank, "file", path, "", "t.py:9") for rank in (0, 1)]
        shown = warnings_of(*notes, hosts=hosts)
        assert len(shown) == count
        assert all(text in each for each in shown)


@pytest.mark.parametrize(
    ("key", "first", "other", "text"),
    [
        (
            "before the first step",
            "SGD\t0.1\na 00\nb 11",
            "SGD\t0.1\na 00\nb 12",
            "rank 1 begins with other weights than rank 0 (b of 2",
        ),
        (
            "after step 1",
            "SGD\t0.1\na 00\nb 11",
            "SGD\t0.1\na 00\nb 12",
            "the gradients are not averaged: the SGD that steps there",
        ),
        (
            "after step 1",
            "Distributed SGD\t0.1\na 00",
            "Distributed SGD\t0.1\na 01",
            "although the optimizer is distributed",
        ),
        (
            "at the end, after hvd.join()",
            "Distributed SGD\t0.1\na 00",
            "Distributed SGD\t0.1\na 01",
            "that calls hvd.join() misses",
        ),
        (
            "after step 40",
            "Distributed SGD\t0.1, 0.5\na 00",
            "Distributed SGD\t0.1, 0.05\na 00",
            "another learning rate than rank 0 after step 40 at t.py:5 (0.1, 0.05 and 0.1, 0.5)",
        ),
        ("after step 1", "SGD\na 0", "", "rank 1 trains 0 weights and rank 0 1"),
        ("at the end", "SGD\t0.1\nnetwork/a 00", "SGD\t0.1\na 00", ""),  # other names alone
    ],
)
def test_weights_that_differ_are_reported_with_the_cause(
    key: str, first: str, other: str, text: str
) -> None:
    notes = [
        Note(rank, "weights", key, value, "t.py:5") for rank, value in enumerate((first, other))
    ]
    shown = warnings_of(*notes)
    assert len(shown) == (1 if text else 0)
    assert all(text in each and "t.py:5" in each for each in shown)


@pytest.fixture
def noted() -> Iterator[list[str]]:
    """What the patches of frameworks note; this process is rank 1 of 2."""
    done: list[str] = []
    with as_rank(1, 2, start_check=True) as rank:
        rank.pipe.send = lambda note: done.append(f"{note.kind} {note.key}")
        yield done


def test_callbacks_of_keras_note_where_they_write(noted: list[str]) -> None:
    class CSVLogger:
        filename = "log.csv"

        def on_train_begin(self, logs: object = None) -> None:
            noted.append("opened")

    class TensorBoard:
        log_dir = "/logs"

        def set_model(self, model: object) -> None:
            noted.append("set")

    calls.watch_keras_csv(SimpleNamespace(CSVLogger=CSVLogger))
    calls.watch_keras_logs(SimpleNamespace(TensorBoard=TensorBoard))
    CSVLogger().on_train_begin()
    TensorBoard().set_model(None)
    assert noted == [f"file {os.path.abspath('log.csv')}", "opened", "set", "file /logs/"]


def test_a_folder_of_logs_may_be_a_path_or_a_url(noted: list[str]) -> None:
    class SummaryWriter:
        def __init__(self, log_dir: object) -> None:
            self.log_dir = log_dir

    calls.watch_torch_logs(SimpleNamespace(SummaryWriter=SummaryWriter))
    for folder in (Path("/logs/a"), "/logs/b", "s3://bucket/c"):
        assert SummaryWriter(folder).log_dir == folder
    assert noted == ["file /logs/a/", "file /logs/b/", "file s3://bucket/c/"]


def test_files_are_noted_however_the_arguments_are_passed(noted: list[str]) -> None:
    def save(obj: object, f: object, pickle_protocol: int = 2) -> object:
        return obj, f, pickle_protocol

    def save_model(model: object, filepath: object, overwrite: bool = True) -> object:
        return model, filepath, overwrite

    def save_weights(model: object, filepath: object) -> object:
        return model, filepath

    torch = SimpleNamespace(save=save)
    keras = SimpleNamespace(save_model=save_model, save_weights=save_weights)
    calls.watch_torch_save(torch)
    calls.watch_keras_save(keras)
    assert torch.save(1, "/a") == (1, "/a", 2)
    assert torch.save(1, f=Path("/b"), pickle_protocol=3) == (1, Path("/b"), 3)
    assert torch.save(f="/c", obj=1) == (1, "/c", 2)
    assert keras.save_model(1, filepath="/d") == (1, "/d", True)
    assert keras.save_weights(model=1, filepath="/e") == (1, "/e")
    buffer = BytesIO()
    assert torch.save(1, f=buffer) == (1, buffer, 2)
    assert noted == ["file /a", "file /b", "file /c", "file /d", "file /e"]
    with pytest.raises(TypeError, match="'f'"):
        torch.save(1)


def test_each_file_that_a_rank_writes_is_noted_once(noted: list[str]) -> None:
    torch = SimpleNamespace(save=lambda obj, f: None)
    calls.watch_torch_save(torch)
    for _ in range(2):
        for file in ("/a", "/b", "/c"):
            torch.save(1, file)
    assert noted == ["file /a", "file /b", "file /c"]


def test_a_look_at_a_batch_before_the_first_epoch_is_no_repeated_epoch(
    noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(is_grad_enabled=lambda: True))

    class DistributedSampler:
        shuffle, epoch = True, 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    calls.watch_sampler(SimpleNamespace(DistributedSampler=DistributedSampler))
    sampler = DistributedSampler()
    assert next(iter(sampler)) == 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(sampler) == [0, 1, 2]
    assert noted == []
    list(sampler)
    assert noted == ["mistake sampler"]


class Optimizer:
    """Steps as torch's optimizers do, with their hooks."""

    before: Any = None
    after: Any = None

    def __init__(self, inner: Any = None) -> None:
        self.param_groups: list[Any] = []
        self.inner = inner

    def step(self, error: Exception | None = None) -> None:
        Optimizer.before(self, (), {})
        if self.inner is not None:
            self.inner.step(error)
        if error is not None:
            raise error
        Optimizer.after(self, (), {})


def set_hook(name: str) -> Any:
    return lambda hook: setattr(Optimizer, name, staticmethod(hook))


HOOKS = SimpleNamespace(
    register_optimizer_step_pre_hook=set_hook("before"),
    register_optimizer_step_post_hook=set_hook("after"),
)


@pytest.fixture
def watched(noted: list[str]) -> list[str]:
    """What is noted of the steps of optimizers."""
    steps.watch_torch(HOOKS)
    return noted


def test_each_of_the_first_optimizers_is_compared_also_if_earlier_ones_were_freed(
    watched: list[str],
) -> None:
    for _ in range(6):  # each is freed before the next one is made, and may get its address
        Optimizer().step()
    assert watched == ["weights before the first step", "weights after step 1"] * 4


def test_a_step_inside_another_one_is_part_of_it(watched: list[str]) -> None:
    inner = Optimizer()
    outer = Optimizer(inner)
    outer.step()
    assert watched == ["weights before the first step", "weights after step 1"]
    inner.step()
    assert len(watched) == 4


def test_after_a_step_that_raised_the_comparison_goes_on(watched: list[str]) -> None:
    outer = Optimizer(Optimizer())
    outer.step()
    with pytest.raises(ValueError, match="skipped"):
        outer.step(ValueError("skipped"))
    for _ in range(19):
        outer.step()
    assert watched[2:] == ["weights after step 20"]
    with pytest.raises(ValueError, match="skipped"):
        outer.step(ValueError("skipped"))
    other = Optimizer(Optimizer())
    for _ in range(2):  # the first one may still belong to the step that raised
        other.step()
    assert watched[3:] == ["weights before the first step", "weights after step 1"]


def test_the_optimizer_with_the_most_steps_counts_them() -> None:
    counter = OptimizerSteps()
    counter.watch(HOOKS)
    generator = Optimizer()
    for steps_of_critic in (1, 3, 1):
        critic = Optimizer(Optimizer())
        for _ in range(steps_of_critic):
            critic.step()
        del critic
        generator.step()
    assert counter.count == 3


def test_a_keras_model_without_an_optimizer_is_compared(watched: list[str]) -> None:
    class CallbackList:
        model = SimpleNamespace(built=True, optimizer=None, trainable_variables=())

        def on_train_begin(self, logs: object = None) -> None:
            pass

        on_train_batch_end = on_epoch_end = on_train_end = on_train_begin

    steps.watch_keras(SimpleNamespace(CallbackList=CallbackList))
    CallbackList().on_train_begin()
    assert watched == ["weights before the first step"]


class DTensor:
    """Named like torch's."""


@pytest.mark.parametrize("part", [DTensor(), SimpleNamespace(ds_id=3), object()])
def test_weights_that_are_divided_among_the_ranks_are_recognized(part: object) -> None:
    model = SimpleNamespace(named_parameters=list, modules=list, parameters=lambda: [part])
    assert is_sharded(model) is not (type(part) is object)
    assert not is_sharded({"weights": part})
