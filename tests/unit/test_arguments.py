"""Unknown arguments: the error says which one was meant, before anything is launched."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from horovod_runner import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    HorovodRunner,
    predict,
)
from horovod_runner.common.arguments import meant
from horovod_runner.common.options import ALIASES, GROUPS, where_options_are
from horovod_runner.data import Shard, delta, packed, parquet
from horovod_runner.data.feed import options as feed_options
from tests.errors import error_of

_train = Shard("train")


@pytest.mark.parametrize(
    ("call", "given", "suggested"),
    [
        (HorovodRunner, "driver_log_verbosty", "driver_log_verbosity"),
        (HorovodRunner, "checkpoint_directory", "checkpoint_dir"),
        # An option of a group, by its name and misspelled.
        (HorovodRunner, "hang_timeout", "debug_config=DebugConfig(hang_timeout=...)"),
        (HorovodRunner, "hang_timout", "debug_config=DebugConfig(hang_timeout=...)"),
        # Names of earlier versions and of other distributors.
        (HorovodRunner, "keep", "checkpoint_config=CheckpointConfig(num_to_keep=...)"),
        (HorovodRunner, "warm", "cluster_config=ClusterConfig(preload_frameworks=...)"),
        (HorovodRunner, "num_processes", "np"),
        (HorovodRunner, "local_mode", "np=-2 (below 0: processes on this machine)"),
        (CheckpointConfig, "num_keep", "num_to_keep"),
        (CheckpointConfig, "keep", "num_to_keep"),
        (DebugConfig, "num_to_keep", "checkpoint_config=CheckpointConfig(num_to_keep=...)"),
        (DebugConfig, "resume", "HorovodRunner(resume=...)"),
        (DataConfig, "data_dir", "shared_dir"),
        (_train.to_torch, "shufle", "shuffle"),
        (_train.to_torch, "drop_last", "last_batch='drop'"),
        (_train.to_tf, "sample_weight", "sample_weights"),
        (_train.to_torch_dataset, "colums", "columns"),
        (_train.batches, "pad", "pad_ragged"),
        # Arguments that the result has.
        (_train.to_torch_dataset, "batch_size", "DataLoader(dataset, batch_size=...)"),
        (_train.to_torch_dataset, "prefetch_factor", "DataLoader(dataset, prefetch_factor=...)"),
        (_train.to_tf, "transform_spec", "to_tf(...).map(...)"),
        (_train.to_tf, "prefetch", "to_tf(...).prefetch(...)"),
        (parquet, "filters", "filter"),
        (parquet, "schema_fields", "columns"),
        (delta, "version_as_of", "version"),
        (packed, "data_dir", "shared_dir"),
        (packed, "max_restarts", "HorovodRunner(max_restarts=...)"),
        (predict, "batchsize", "batch_size"),
        (predict, "output_column", "output"),
    ],
)
def test_an_unknown_argument_is_an_error_with_the_one_that_was_meant(
    call: Callable[..., Any], given: str, suggested: str
) -> None:
    assert error_of(TypeError, call, **{given: 1}) == (
        f"{call.__name__}() got an unexpected keyword argument {given!r}. Did you mean {suggested}?"
    )


def test_a_name_that_is_like_no_other_lists_those_that_exist() -> None:
    assert error_of(TypeError, HorovodRunner, np=2, zzz=1).startswith(
        "HorovodRunner() got an unexpected keyword argument 'zzz'. Its arguments are np, driver_log"
    )


def test_arguments_without_their_names_are_refused_with_the_name() -> None:
    assert error_of(TypeError, HorovodRunner, 4).endswith("write HorovodRunner(np=4)")
    assert error_of(TypeError, CheckpointConfig, 5).endswith(
        "write CheckpointConfig(num_to_keep=5)"
    )


def test_a_choice_that_was_misspelled_is_suggested() -> None:
    with pytest.raises(ValueError, match="Did you mean 'log_callback_only'"):
        HorovodRunner(np=1, driver_log_verbosity="log_callbacks_only")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["batches", "to_torch", "to_torch_dataset", "to_tf"])
def test_a_feed_suggests_no_argument_that_it_lacks(method: str) -> None:
    """The methods share their aliases, and not all of their arguments."""
    known = inspect.signature(getattr(Shard, method)).parameters
    names = {*feed_options.ALIASES, *feed_options.ALIASES.values(), "sample_wieghts", "devise"}
    for name in names - set(known):
        if not name.isidentifier():
            continue
        text = error_of(TypeError, getattr(Shard("train"), method), **{name: 1})
        _, asked, suggested = text.removesuffix("?").partition("Did you mean ")
        if asked:
            assert suggested in known or "(" in suggested or suggested == "last_batch='drop'"
        else:
            assert "Its arguments are " in text


def test_an_alias_of_a_name_that_does_not_exist_is_no_suggestion() -> None:
    aliases = {"spec": "transform", "drop": "last='drop'"}
    assert meant("spec", ["columns"], aliases) == ""
    assert meant("transform", ["columns"], aliases) == ""
    assert meant("specs", ["columns"], aliases) == ""
    assert meant("specs", ["columns"], aliases, {"transform": "map(...)"}) == "map(...)"
    assert meant("drop", ["columns"], aliases) == "last='drop'"
    # A name that exists is not taken for an alias.
    assert meant("timout", ["timeout"], {"timeout": "slot_timeout=..."}) == "timeout"


def test_a_parameter_that_is_given_or_has_no_name_is_no_suggestion() -> None:
    def train(data: object, /, rate: float = 0.1, **others: float) -> None:
        del data, rate, others

    def step(rate: float, *rates: float) -> None:
        del rate, rates

    runner = HorovodRunner(np=-1)
    assert "Did you mean" not in error_of(TypeError, runner.run, train, datas=1)
    assert "Did you mean" not in error_of(TypeError, runner.run, step, rate=1, rated=2)


def test_a_long_value_is_not_repeated_in_an_error() -> None:
    assert error_of(TypeError, CheckpointConfig, "x" * 99).endswith(
        "write CheckpointConfig(num_to_keep=...)"
    )
    assert error_of(TypeError, HorovodRunner, (2, 8)).endswith("write HorovodRunner(np=(2, 8))")
    assert error_of(TypeError, HorovodRunner, ([1], 8)).endswith("write HorovodRunner(np=...)")


def test_a_value_of_env_is_not_repeated_in_an_error() -> None:
    with pytest.raises(TypeError, match=r"env .*'TOKEN' .*bytes") as caught:
        HorovodRunner(np=1, env={"TOKEN": b"my-secret"})  # type: ignore[dict-item]
    assert "my-secret" not in str(caught.value)


def test_main_is_not_launched_with_a_misspelled_argument() -> None:
    def train(learning_rate: float = 0.1) -> float:
        return learning_rate

    runner = HorovodRunner(np=-1)
    assert "Did you mean learning_rate?" in error_of(TypeError, runner.run, train, learnin_rate=1.0)
    assert runner.last_run is None


def test_signatures_stay_as_they_are_written() -> None:
    assert next(iter(inspect.signature(HorovodRunner).parameters)) == "np"
    assert list(inspect.signature(CheckpointConfig).parameters)[:2] == ["num_to_keep", "metric"]
    assert list(inspect.signature(Shard.to_torch).parameters)[1:3] == ["batch_size", "columns"]


def test_every_alias_leads_to_an_option_or_says_what_to_write() -> None:
    known = where_options_are()
    own = {name for name in known if name not in GROUPS}
    for alias in ALIASES:
        text = meant(alias, own, ALIASES)
        assert text in own or "=" in text


def test_names_of_frameworks_are_checked_before_a_run() -> None:
    def preloads(given: Any) -> Any:
        return ClusterConfig(preload_frameworks=given).preload_frameworks

    assert preloads(True) is True
    assert preloads([]) == ()
    # torch's first optimizer imports torch._dynamo, which takes longer than torch itself.
    assert preloads(["keras", "horovod.torch"]) == ("keras", "horovod.torch", "torch._dynamo")
    with pytest.raises(ValueError, match=r"'tensorflw' .*Did you mean tensorflow\?"):
        preloads(["tensorflw"])
    with pytest.raises(ValueError, match=r"'lightning' .* horovod\.tensorflow, "):
        preloads(["lightning"])
    for wrong in ("torch", 1, None):
        with pytest.raises(TypeError, match=rf"preload_frameworks .*list.* {wrong!r}$"):
            preloads(wrong)
    with pytest.raises(ValueError, match="launcher='slurm'"):
        ClusterConfig(preload_frameworks=["torch"], launcher="slurm")
