"""A driver with secrets in its arguments, its environment and its URLs, for test_privacy.

    python -m tests.real.private_program FOLDER local|spark

Each secret begins with the variable PLANTED, so that no file but one that leaks has it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd

from horovod_runner import (
    HorovodRunner,
    load_checkpoint,
    load_run,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.common.options import grouped
from horovod_runner.data import parquet
from horovod_runner.results import registry
from horovod_runner.run.handle import RunHandle
from horovod_runner.sinks import Sink
from horovod_runner.sinks.mlflow import MLflowSink
from horovod_runner.sinks.tensorboard import TensorBoardSink
from tests.real import vault

FOLDER = Path(sys.argv[1])
PLANTED = os.environ["PLANTED"]


def secret(name: str) -> str:
    return f"{PLANTED}-{name}"


def url(folder: str) -> str:
    return f"vault://me:{secret('in-a-url')}@vault.example{FOLDER}/{folder}"


class Plain(Sink):
    """Writes all that it hears."""

    def __init__(self) -> None:
        self._file = (FOLDER / "heard").open("a")

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        file = self._file

        def hear(*arguments: Any) -> None:
            print(name, *map(repr, arguments), file=file, flush=True)

        return hear


class Broken(Sink):
    """Fails with an error that quotes a URL."""

    def begin(self, run: Any) -> None:
        raise OSError(f"cannot write to {url('sink')}")


def main(
    wait: bool = False, fail: str = "", save: bool = True, train: Any = None, **_secrets: Any
) -> dict[str, str]:
    assert vault.Vault.protocol == "vault"  # in the ranks, too
    assert os.environ["HF_TOKEN"].startswith(os.environ["PLANTED"])
    if not save:  # with a single rank
        load_checkpoint()
    if train is not None:
        assert sum(len(batch["x"]) for batch in train.batches(2)) > 0
    for step in range(2):
        report(loss=1 / (step + 1), step=step)
        print("step", step)
    log_to_driver("at work")
    if save:
        save_checkpoint({"step": 1}, 1, {"loss": 0.5})
    if wait:
        (FOLDER / f"waits-{os.environ['RANK']}").touch()
        while not (FOLDER / "go").exists():
            time.sleep(0.05)
    if fail:
        raise OSError(f"cannot read {fail}")
    return {"api_key": secret("in-a-result"), "data": url("result")}


def show(what: Any) -> None:
    print(repr(what), str(what), getattr(what, "_repr_html_", lambda: "")(), sep="\n", flush=True)


def wait_for(path: Path, handle: RunHandle) -> None:
    while not path.exists():
        if handle.done():
            handle.result()
        time.sleep(0.05)


def good_run(np: int) -> None:
    """A run that works, looked at in all ways while it lasts and afterwards."""
    sinks = [MLflowSink(), TensorBoardSink(FOLDER / "events"), Plain(), Broken()]
    runner = HorovodRunner(
        np=np,
        checkpoint_dir=url("checkpoints"),
        env={"WANDB_API_KEY": secret("in-env")},
        sinks=sinks,
    )
    handle = runner.start(
        main,
        wait=True,
        train=parquet(url("rows"), storage_options={"asynchronous": False}),
        hf_token=secret("token"),
        password=secret("password"),
        api_key=secret("key"),
        login={"user": "me", "password": secret("nested")},
        data_url=f"https://me:{secret('https')}@host/rows?token={secret('query')}",
        bucket=f"s3://bucket/rows?access_key={secret('access')}&secret_key={secret('s3')}",
    )
    for rank in range(2):
        wait_for(FOLDER / f"waits-{rank}", handle)
    run = handle.run
    for what in (runner, handle, run, run.diagnose()):
        show(what)
    assert registry.write_log(run.run_id)
    run.report(FOLDER / "during.html")
    (FOLDER / "look").touch()
    handle.result()
    run.report(FOLDER / "after.html")
    run.trace(FOLDER / "trace.json.gz")
    recorded = load_run(run.run_id)
    for what in (runner, handle, run, recorded, *run.checkpoints, *recorded.checkpoints):
        show(what)
    recorded.report(FOLDER / "recorded.html")


def failing_runs(np: int) -> None:
    """Runs that fail with an error of this package: all of it is printed."""
    rows, there = {"train": parquet(url("no-rows"))}, {"checkpoint_dir": url("checkpoints")}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"checkpoint_dir": f"nosuch://me:{secret('scheme')}@host/folder"}, {}),
        ({"checkpoint_dir": url("refused")}, {}),
        ({"checkpoint_dir": url("unwritable"), "required": True}, {}),
        ({}, rows),
        ({**there, "resume": True}, {"save": False}),
        ({"max_restarts": 1, **there}, {"fail": url("data")}),
    ]
    for number, (given, kwargs) in enumerate(cases):
        if number == 4:  # all are damaged
            for file in (FOLDER / "checkpoints").glob("*.npz"):
                file.write_bytes(b"x" * file.stat().st_size)
        sinks, ranks = [MLflowSink(), Plain()], np // 2 if "resume" in given else np
        runner = HorovodRunner(**grouped({"np": ranks, "sinks": sinks, **given}))
        try:
            runner.run(main, **kwargs)
        except Exception as error:
            # An exception of main arrives unchanged; its cause is the package's own error.
            told = error.__cause__ if kwargs.get("fail") else error
            print("".join(traceback.format_exception(told)), flush=True)
            show(told)
        else:
            print(f"run {number} has not failed", flush=True)
            sys.exit(3)
        show(runner)
        if runner.last_run is not None:
            show(runner.last_run)
            runner.last_run.report(FOLDER / f"failed-{number}.html")


if __name__ == "__main__":
    with ExitStack() as stack:
        np = -2
        if sys.argv[2] == "spark":
            from pyspark.sql import SparkSession

            session = SparkSession.builder.master("local[2]").config(
                map={
                    "spark.eventLog.enabled": "true",
                    "spark.eventLog.dir": f"file://{FOLDER}",
                    "spark.local.dir": str(FOLDER / "tmp"),
                }
            )
            stack.callback(session.getOrCreate().stop)
            np = 2
        (FOLDER / "rows").mkdir()
        pd.DataFrame({"x": range(8)}).to_parquet(FOLDER / "rows" / "0.parquet")
        good_run(np)
        failing_runs(np)
    print("done")
