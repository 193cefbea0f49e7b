"""Hugging Face's Trainer in a run: a callback that reports and saves, and where to resume from.

    from transformers import Trainer, TrainingArguments
    from horovod_runner.integrations.huggingface import ReportCallback, resume_from

    size = batch_per_rank(64)
    arguments = TrainingArguments("output", save_steps=50, per_device_train_batch_size=size)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ReportCallback()])
    trainer.train(resume_from_checkpoint=resume_from())

Nothing of transformers is imported here, so the driver needs none of it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horovod_runner.common.numbers import RESERVED
from horovod_runner.errors import CheckpointError, DataError
from horovod_runner.worker import context
from horovod_runner.worker.api import check_weights, load_checkpoint, report, save_checkpoint
from horovod_runner.worker.imports.patches import instead_of

_STATE = "trainer_state.json"
# Folders in a checkpoint of which each host has a part only: of FSDP and DeepSpeed.
_SHARDED = ("pytorch_model_fsdp_*", "global_step*")
_LOSSES = ("Loss", "cross_entropy", "mse_loss", "l1_loss", "nll_loss", "binary_cross_entropy")


class ReportCallback:
    """Reports what the Trainer logs, and saves its checkpoints with :func:`save_checkpoint`.

    The Trainer decides how often: ``logging_steps`` and ``save_steps`` of TrainingArguments. It
    writes a checkpoint to ``output_dir``, which may be a folder of the host, and this callback
    copies it to the run's ``checkpoint_dir``. ``save_total_limit=1`` keeps ``output_dir`` small.

    At the start of the training it checks that the Trainer has connected the ranks and divides the
    rows among them, and at an evaluation that it divides those rows, too.

    Raises:
        CheckpointError: at a checkpoint: each host has only a part of it, or it is gone already.
        DataError: the rows are one rank's part already.
        ValueError: the Trainer has not connected the ranks.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # the Trainer's other events
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any
    ) -> None:
        """Check that the Trainer trains on all ranks, and on all rows."""
        rank = context.current()
        if rank is None or rank.size == 1:
            return
        if args.world_size != rank.size:
            raise ValueError(
                f"the Trainer sees {args.world_size} process and the run has {rank.size} ranks: "
                "each would train by itself. Without GPUs, Hugging Face connects the ranks only "
                "with TrainingArguments(use_cpu=True)"
            )
        check_rows(getattr(train_dataloader, "dataset", None))

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **others: Any
    ) -> None:
        """Check that the Trainer evaluates on all rows."""
        rank = context.current()
        if rank is not None and rank.size > 1:
            check_rows(getattr(eval_dataloader, "dataset", None))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Report the numbers that the Trainer logs."""
        numbers = {
            name: value
            for name, value in (logs or {}).items()
            if isinstance(value, int | float) and name not in RESERVED
        }
        self._numbers.update(numbers)
        report(
            step=state.global_step,
            epoch=int(state.epoch or 0),
            total_steps=state.max_steps,
            **numbers,
        )

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Compare the ranks' weights, if the run asks for it."""
        check_weights(model, round(state.epoch or 0) - 1)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Copy the Trainer's checkpoint to the run's folder."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch = sys.modules["torch"]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # each rank writes a file with its random numbers
        _check_complete(folder)
        save_checkpoint(folder, state.global_step, self._numbers)


def resume_from() -> str | None:
    """Return the ``resume_from_checkpoint`` for ``Trainer.train``, after TrainingArguments is made.

    Returns:
        The path of a checkpoint of the Trainer; None if the training starts from the beginning.

    Raises:
        CheckpointError: there are checkpoints, but none can be read.
        RuntimeError: TrainingArguments, which connects the ranks, has not been made.
        TypeError: the checkpoint was not written by ReportCallback.
    """
    loaded = load_checkpoint()
    if loaded is None:
        return None
    path = loaded.state
    if not isinstance(path, str | os.PathLike) or not Path(path, _STATE).is_file():
        raise TypeError(
            "the checkpoint was not written by horovod_runner.huggingface.ReportCallback: the "
            "Trainer cannot resume from it. Load it with horovod_runner.load_checkpoint"
        )
    return str(path)


def batch_per_rank(global_batch: int) -> int:
    """Return the ``per_device_train_batch_size`` with which a step has this many rows on all ranks.

    With gradient accumulation divide ``global_batch`` by its steps before.

    Args:
        global_batch: rows of a step over all ranks; a multiple of the number of ranks.

    Raises:
        ValueError: the ranks cannot share the rows evenly.
    """
    rank = context.current()
    size = 1 if rank is None else rank.size
    if global_batch < 1 or global_batch % size:
        raise ValueError(
            f"batch_per_rank({global_batch}): {size} ranks cannot share these rows evenly. "
            f"Take a multiple of {size}, such as {max(1, round(global_batch / size)) * size}, or "
            "another np"
        )
    return global_batch // size


def patch_arguments(module: Any) -> None:
    """Let ranks without GPUs connect; called with the module ``transformers.training_args``.

    Without ``use_cpu=True`` Hugging Face connects no ranks on CPUs, and each would train by itself.
    """

    @instead_of(module.TrainingArguments, "__post_init__")
    def post_init(plain: Any, self: Any, *args: Any, **options: Any) -> Any:
        import torch

        rank = context.current()
        if rank is not None and rank.size > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        return plain(self, *args, **options)


def patch_trainer(module: Any) -> None:
    """Give the Trainer the rows of all ranks; called with the module ``transformers.trainer``.

    It divides them among the ranks itself. And where a model's loss does not use
    ``num_items_in_batch``, the Trainer multiplies no loss by the number of ranks.
    """

    @instead_of(module.Trainer, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        bound = inspect.signature(plain).bind(self, *args, **options)
        for name in ("train_dataset", "eval_dataset"):
            if name in bound.arguments:
                bound.arguments[name] = _whole(bound.arguments[name])
        plain(*bound.args, **bound.kwargs)
        if getattr(self, "compute_loss_func", None) is None and _averages_by_itself(self.model):
            self.args.average_tokens_across_devices = False

    for name in ("get_eval_dataloader", "get_test_dataloader"):

        @instead_of(module.Trainer, name)
        def loader(plain: Any, self: Any, *args: Any, **options: Any) -> Any:
            whole = {name: _whole(value) for name, value in options.items()}
            return plain(self, *map(_whole, args), **whole)


def _whole(dataset: Any) -> Any:
    """The rows of all ranks, of a Shard and of what its ``to_torch_dataset`` returned."""
    if isinstance(dataset, dict):
        return {name: _whole(each) for name, each in dataset.items()}
    if hasattr(dataset, "to_torch_dataset"):
        return dataset.to_torch_dataset(whole=True)
    if getattr(dataset, "is_whole", True) is False:
        return dataset.whole() or dataset
    return dataset


def _averages_by_itself(model: Any) -> bool:
    """Whether the loss of a model is the mean over its rank's rows, whatever the Trainer passes.

    Judged by the code of ``forward``: it calls a loss of torch, or a loss function of transformers
    that has no ``num_items_in_batch``. Where neither can be seen, the Trainer decides.
    """
    forward = inspect.unwrap(getattr(type(model), "forward", lambda: None))
    code = getattr(forward, "__code__", None)
    if code is None or "num_items_in_batch" in {*code.co_varnames, *code.co_consts}:
        return False
    if "loss_function" in code.co_names:
        return "num_items_in_batch" not in inspect.signature(model.loss_function).parameters
    return any(name.endswith(_LOSSES) for name in code.co_names)


def check_rows(dataset: Any) -> None:
    """Raise DataError if a dataset that is divided among the ranks is one rank's part already."""
    if getattr(dataset, "is_whole", True) is False:
        raise DataError(
            "to_torch_dataset() gives each rank its own part of the rows, and Hugging Face would "
            "divide that part again, so most rows would never be used: pass "
            "to_torch_dataset(..., whole=True)"
        )


def _check_complete(folder: Path) -> None:
    rank = context.current()
    if rank is None or rank.rank != 0:
        return
    if not folder.is_dir() and not any(folder.parent.glob("checkpoint-*")):
        raise CheckpointError(
            f"the Trainer has written no checkpoint to {folder.parent}. A hyperparameter_search "
            "writes to a folder of each trial, whose checkpoints a run cannot resume from: train "
            'with save_strategy="no" there'
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"the Trainer has removed {folder} right after it had written it, because of "
            "save_total_limit and of older checkpoints in output_dir: use another output_dir, or "
            "empty it before a new training"
        )
    several_hosts = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    if several_hosts and any(list(folder.glob(pattern)) for pattern in _SHARDED):
        raise CheckpointError(
            f"{folder} holds only this host's part of the checkpoint, because the weights are "
            "sharded. Save them whole: fsdp_config={'state_dict_type': 'FULL_STATE_DICT'}, or "
            "stage3_gather_16bit_weights_on_model_save of DeepSpeed with save_only_model=True"
        )
