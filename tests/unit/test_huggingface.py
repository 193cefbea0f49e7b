"""The callback for Hugging Face's Trainer, without transformers and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner import CheckpointError, DataError
from horovod_runner.checkpoints import checkpoint
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.integrations import huggingface
from horovod_runner.integrations.huggingface import ReportCallback, resume_from
from horovod_runner.wire.job_file import CheckpointPlan
from tests.savers import saving_to
from tests.stand_ins import Rank, as_rank

STATE = SimpleNamespace(global_step=20, max_steps=40, epoch=1.25)
ALONE, CONNECTED = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
PART = SimpleNamespace(dataset=SimpleNamespace(is_whole=False))  # a loader of one rank's rows


@pytest.fixture
def rank() -> Iterator[Rank]:
    """This process is rank 0 of 2."""
    with as_rank(0, 2) as entered:
        yield entered


@pytest.fixture
def not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch without torch.distributed."""
    torch = SimpleNamespace(distributed=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(huggingface.sys.modules, "torch", torch)


@pytest.mark.usefixtures("rank")
def test_a_training_whose_ranks_are_not_connected_is_refused() -> None:
    with pytest.raises(ValueError, match=r" 1 process .* 2 ranks.*\(use_cpu=True\)"):
        ReportCallback().on_train_begin(ALONE, STATE, None)
    ReportCallback().on_train_begin(CONNECTED, STATE, None)


@pytest.mark.usefixtures("rank")
def test_rows_that_are_one_ranks_part_already_are_refused() -> None:
    for dataset in (SimpleNamespace(is_whole=True), [1, 2, 3]):
        loader = SimpleNamespace(dataset=dataset)
        ReportCallback().on_train_begin(CONNECTED, STATE, None, train_dataloader=loader)
    with pytest.raises(DataError, match="whole=True"):
        ReportCallback().on_train_begin(CONNECTED, STATE, None, train_dataloader=PART)
    with pytest.raises(DataError, match="whole=True"):
        ReportCallback().on_prediction_step(CONNECTED, STATE, None, eval_dataloader=PART)


@pytest.mark.usefixtures("rank")
def test_the_ranks_share_a_batch_evenly() -> None:
    assert huggingface.batch_per_rank(64) == 32
    with pytest.raises(ValueError, match=r"2 ranks cannot share .* such as 8,"):
        huggingface.batch_per_rank(7)


def _passed_on(labels: object, num_items_in_batch: object = None) -> None:
    """A loss function of transformers that counts all ranks' items."""


class _Model:
    def __init__(self, loss: Callable[..., object] = _passed_on) -> None:
        self.loss_function = loss


class _OfTransformers(_Model):
    def forward(self, labels: object, **kwargs: object) -> object:
        return self.loss_function(labels, **kwargs)


class _WithOwnLoss(_Model):
    def forward(self, x: object, torch: Any, **kwargs: object) -> object:
        return torch.nn.CrossEntropyLoss()(x)


class _Counting(_Model):
    def forward(self, x: object, functional: Any, **kwargs: object) -> object:
        return functional.cross_entropy(x, reduction="sum") / kwargs["num_items_in_batch"]


class _Silent(_Model):
    def forward(self, x: object, **kwargs: object) -> object:
        return x


@pytest.mark.parametrize(
    ("model", "averages"),
    [
        (_OfTransformers(), False),
        (_OfTransformers(lambda labels: None), True),
        (_WithOwnLoss(), True),
        (_Counting(), False),
        (_Silent(), False),
    ],
)
def test_the_code_of_a_model_tells_whether_its_loss_is_a_mean_of_the_rank(
    model: Any, averages: bool
) -> None:
    assert huggingface._averages_by_itself(model) == averages


def test_outside_a_run_and_on_one_rank_nothing_is_refused() -> None:
    ReportCallback().on_train_begin(ALONE, STATE, None, train_dataloader=PART)
    ReportCallback().on_prediction_step(None, STATE, None, eval_dataloader=PART)
    assert resume_from() is None


def test_numbers_that_are_logged_are_reported(rank: Rank) -> None:
    logs = {"loss": 0.5, "epoch": 1.25, "learning_rate": 1e-3, "note": "text", "step": 3}
    logs |= {"time": 1.0, "rank": 1, "attempt": 2, "total_steps": 4}
    ReportCallback().on_log(None, STATE, None, logs=logs)
    step, epoch, total_steps = 20, 1, 40
    assert rank.reported == [({"loss": 0.5, "learning_rate": 1e-3}, step, epoch, total_steps)]


@pytest.mark.usefixtures("not_connected")
def test_a_checkpoint_has_the_latest_of_each_number_that_was_logged(
    rank: Rank, tmp_path: Path
) -> None:
    callback = ReportCallback()
    (tmp_path / "checkpoint-20").mkdir()
    for logs in ({"loss": 0.5}, {"eval_loss": 0.7}, {"loss": 0.4}):  # as the Trainer logs them
        callback.on_log(None, STATE, None, logs=logs)
    callback.on_save(SimpleNamespace(output_dir=tmp_path), STATE, None)
    ((_, _, numbers),) = rank.checkpoints_saved
    assert numbers == {"loss": 0.4, "eval_loss": 0.7}


def test_rows_to_evaluate_and_to_test_with_are_those_of_all_ranks() -> None:
    class Trainer:
        compute_loss_func = len

        def __init__(self, train_dataset: Any = None, eval_dataset: Any = None) -> None:
            pass

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return eval_dataset

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return test_dataset

    huggingface.patch_trainer(SimpleNamespace(Trainer=Trainer))
    trainer = Trainer()
    part = SimpleNamespace(is_whole=False, whole=lambda: "all rows")
    assert trainer.get_eval_dataloader() is None
    assert trainer.get_eval_dataloader(part) == trainer.get_test_dataloader(part) == "all rows"
    assert trainer.get_eval_dataloader(eval_dataset={"a": part}) == {"a": "all rows"}
    assert trainer.get_test_dataloader(test_dataset=part) == "all rows"


def test_other_events_of_the_trainer_are_ignored() -> None:
    callback = ReportCallback()
    assert callback.on_prediction_step(None, STATE, None, eval_dataloader=None) is None
    with pytest.raises(AttributeError):
        callback.other  # noqa: B018


@pytest.mark.usefixtures("not_connected")
def test_a_part_of_a_checkpoint_is_refused_where_there_are_several_hosts(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint-20"
    (folder / "pytorch_model_fsdp_0").mkdir(parents=True)
    arguments = SimpleNamespace(output_dir=str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(CheckpointError, match=r"/checkpoint-20 .*FULL_STATE_DICT"):
        ReportCallback().on_save(arguments, STATE, None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ReportCallback().on_save(arguments, STATE, None)
    assert rank.checkpoints_saved == [(folder, 20, {})]


@pytest.mark.usefixtures("rank", "not_connected")
def test_a_checkpoint_that_the_trainer_has_removed_is_missed(tmp_path: Path) -> None:
    arguments = SimpleNamespace(output_dir=str(tmp_path))
    (tmp_path / "run-1" / "checkpoint-20").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="hyperparameter_search"):
        ReportCallback().on_save(arguments, STATE, None)
    (tmp_path / "checkpoint-30").mkdir()
    with pytest.raises(CheckpointError, match=r"/checkpoint-20 .*save_total_limit"):
        ReportCallback().on_save(arguments, STATE, None)


def test_a_checkpoint_of_another_training_cannot_be_resumed(tmp_path: Path) -> None:
    trained = tmp_path / "checkpoint-20"
    trained.mkdir()
    for state in (trained, {"model": 1}):
        with (
            resuming(tmp_path / "kept", state),
            pytest.raises(TypeError, match=r"ReportCallback.*load_checkpoint"),
        ):
            resume_from()
    (trained / "trainer_state.json").touch()
    with resuming(tmp_path / "kept", trained):
        path = resume_from()
        assert path is not None
        assert [file.name for file in Path(path).iterdir()] == ["trainer_state.json"]


@contextmanager
def resuming(folder: Path, state: object) -> Iterator[None]:
    """This process is a rank that resumes from a checkpoint with this state."""
    folder.mkdir(exist_ok=True)
    local = LocalFolder(folder)
    with saving_to(local) as saver:
        saver.save(state, 20, None)
    latest, *_ = checkpoint.find_complete(local)
    with as_rank(0, 1, checkpoints=CheckpointPlan(local.url, "run1", resume=(latest,))):
        yield
    checkpoint.remove(local, latest)
