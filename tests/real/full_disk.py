"""Runs on a small disk that is full, or nearly; started by test_full_disk.py in its own namespace.

    python -m tests.real.full_disk <case> <disk> <another folder> <free kB, ...>

For each size the disk is filled but for that, and a run of two ranks uses it. A line of JSON for
each run says how it ended, and what the user was told.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_runner import (
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    HorovodRunner,
    commit,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.data import Shard
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.sinks.tensorboard import TensorBoardSink

_STEPS = 4
_BYTES = 40_000


def talk(data: bytes = b"") -> str:
    print("a line")
    log_to_driver("a log")
    report(loss=0.5, step=1)
    return "value"


def read(rows: Shard) -> str:
    feed = rows.batches(100, ["n", "text"])
    return "value" if sum(len(batch["text"]) for batch in feed) else "nothing"


def fill_and_return(disk: str) -> str:
    """Fill the disk, as a training may do, and return more than its buffers would hold."""
    fill_rest(Path(disk, f"rank-{os.environ['HOROVOD_RANK']}"))
    return "value" * 50_000


def save() -> str:
    for step in range(_STEPS):
        save_checkpoint(bytes([step]) * _BYTES, step)
        report(step=step, loss=0.5)
    return "value"


def save_folder(other: str) -> str:
    for step in range(_STEPS):
        with tempfile.TemporaryDirectory(dir=other) as folder:
            Path(folder, "file").write_bytes(bytes([step]) * _BYTES)
            save_checkpoint(folder, step)
    return "value"


def save_keras() -> str:
    import keras

    model = keras.Sequential([keras.layers.Input([100]), keras.layers.Dense(100)])
    weights, biases = model.get_weights()
    for step in range(2):
        model.set_weights([weights, biases + step])
        save_checkpoint(model, step)
    return "value"


def commit_all() -> str:
    for step in range(_STEPS):
        commit(bytes([step]) * _BYTES, step)
    return "value"


def profile() -> str:
    import torch

    for step in range(25):
        torch.ones(10).sum()
        report(step=step, loss=0.5)
    return "value"


def initialize() -> str:
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1))
    return "value"


def case(name: str, disk: Path, other: Path) -> tuple[Callable[..., str], dict[str, Any], Any]:
    """The main of a case, its arguments, and the options of its run."""
    main: Callable[..., str] = talk
    kwargs: dict[str, Any] = {}
    options: dict[str, Any] = {}
    match name:
        case "arguments":
            kwargs = {"data": bytes(60_000)}
        case "dataset":
            import pyarrow as pa

            main, kwargs = read, {"rows": pa.table({"n": range(2000), "text": ["words"] * 2000})}
            options = {"data_config": DataConfig(disk_limit=1 << 20)}
        case "value":
            main, kwargs = fill_and_return, {"disk": str(disk)}
        case "checkpoints":
            main, options = save, {"checkpoint_dir": disk / "saved"}
            options["checkpoint_config"] = CheckpointConfig(num_to_keep=2)
        case "temporary checkpoints":
            main = save
        case "folder":
            main, kwargs = save_folder, {"other": str(other)}
            options = {"checkpoint_dir": other / "saved"}
        case "keras":
            main, options = save_keras, {"checkpoint_dir": other / "saved"}
        case "commits":
            main, options = commit_all, {"np": (-2, -2)}
        case "tensorboard":
            options = {"sinks": [TensorBoardSink(disk / "board")]}
        case "timeline":
            main, options = initialize, {"debug_config": DebugConfig(timeline=disk / "t.json")}
        case "trace" | "trace in a rank":
            main, options = profile, {"debug_config": DebugConfig(torch_profiler=True)}
    return main, kwargs, {"np": -2, **options}


def fill(disk: Path, free: int) -> None:
    """Remove all files of a disk, and fill it but for ``free`` kB."""
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    fill_rest(disk / "filler")
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - free * 1024)


def fill_rest(path: Path) -> None:
    """Write a file that takes all the room there is."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def run(name: str, disk: Path, other: Path) -> dict[str, Any]:
    """Run a case; returns how it ended."""
    main, kwargs, options = case(name, disk, other)
    runner = HorovodRunner(**options)
    ended: dict[str, Any] = {"value": "", "error": "", "own": True}
    try:
        ended["value"] = runner.run(main, **kwargs)
    except Exception as error:
        ended |= {"error": str(error), "own": isinstance(error, HorovodRunnerError)}
    last = runner.last_run
    if last is not None:
        ended["notices"] = [line.text for line in last.logs if line.stream == "notice"]
        (disk / "filler").unlink()  # a folder's checkpoint is copied to be read
        ended["saved"] = [content(each.load()) for each in last.checkpoints]
        ended["steps"] = [each.step for each in last.checkpoints]
    return ended


def content(state: Any) -> int:
    """The step whose state this is; -1 if it is none."""
    if hasattr(state, "get_weights"):
        return int(state.get_weights()[1][0])
    data = (state / "file").read_bytes() if isinstance(state, Path) else state
    return data[0] if data == bytes(data[:1]) * _BYTES else -1


def main() -> None:
    name, disk, other, *sizes = sys.argv[1:]
    for size in sizes:
        fill(Path(disk), int(size))
        # The driver has found it while there was room. Ranks look for themselves.
        tempfile.tempdir = os.environ["TMPDIR"]
        print(json.dumps({"free": int(size), **run(name, Path(disk), Path(other))}), flush=True)


if __name__ == "__main__":
    main()
