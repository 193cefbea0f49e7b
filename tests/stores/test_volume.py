"""A mounted store that knows no random write, no append and no link."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner import DataConfig, load_checkpoint, report, save_checkpoint
from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.options import Options, grouped
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.integrations.horovod_spark.store import copy_to_store
from horovod_runner.results.trace.arrivals import Arrivals
from horovod_runner.sinks.tensorboard import TensorBoardSink
from horovod_runner.tools.commands import wheels
from horovod_runner.wire.events import Unsaved
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker, file_name
from horovod_runner.wire.messages import FilePart
from tests.conftest import Ranks
from tests.preload import TORCH
from tests.savers import saving, saving_to
from tests.stores import mounted


def test_the_store_refuses_what_volumes_refuse(volume: Path) -> None:
    path = volume / "file"
    path.write_bytes(b"12345")

    def write_back() -> None:
        with (volume / "other").open("wb", buffering=0) as file:
            file.write(b"12345")
            file.seek(0)
            file.write(b"0")

    refused: list[Any] = [
        write_back,
        lambda: path.open("ab"),
        lambda: np.savez(volume / "arrays.npz", x=np.arange(3)),
        lambda: os.link(path, volume / "link"),
        lambda: os.truncate(path, 3),
    ]
    for number, action in enumerate(refused):
        with pytest.raises(OSError, match="not supported"):
            print(number, action())
    assert path.read_bytes() == b"12345"


@pytest.mark.horovod
def test_all_that_a_run_writes_arrives(volume: Path) -> None:
    def main() -> Any:
        import horovod.torch as hvd
        import torch

        hvd.init()
        checkpoint = load_checkpoint()
        if checkpoint is not None:
            return checkpoint.step, (checkpoint.state / "file").read_bytes()
        array = torch.arange(100_000, dtype=torch.float32)
        folder = Path(os.environ["HOROVOD_RUNNER_DATA"]) / "mine"
        folder.mkdir(exist_ok=True)
        (folder / "file").write_bytes(b"in a folder")
        import numpy

        states = [
            {"arrays": numpy.arange(100_000), "list": [1, None]},
            {"tensor": array, "and an array": numpy.arange(3)},
            b"bytes",
            folder,
        ]
        for step, state in enumerate(states, start=1):
            save_checkpoint(state, step)
        hvd.allreduce(array, name="x")
        report(loss=1.0, step=1)
        return None

    sinks = [TensorBoardSink(volume / "logs")]
    places = {"checkpoint_dir": volume / "checkpoints", "timeline": volume / "timeline.json"}
    ranks = Ranks("local", warm=TORCH)
    runner = ranks.runner(2, **places, sinks=sinks, num_to_keep=None)
    runner.run(main)
    run = runner.last_run
    assert run.warnings == []
    assert [each.step for each in run.checkpoints] == [1, 2, 3, 4]
    arrays, mixed, data, folder = [each.load() for each in run.checkpoints]
    assert arrays["arrays"][-1] == 99_999
    assert arrays["list"] == [1, None]
    assert mixed["tensor"][-1] == 99_999
    assert mixed["and an array"].tolist() == [0, 1, 2]
    assert data == b"bytes"
    assert (folder / "file").read_bytes() == b"in a folder"
    assert b"ALLREDUCE" in (volume / "timeline.json").read_bytes()
    assert all(path.stat().st_size > 100 for path in (volume / "logs").rglob("events*"))
    assert list((volume / "logs").glob("events*"))
    run.trace(volume / "trace.json.gz")
    run.report(volume / "run.html")
    assert len(list((volume / "checkpoints").iterdir())) == 8
    assert ranks.runner(2, **places, resume=True).run(main) == (4, b"in a folder")


def test_pieces_of_checkpoints_and_timelines_are_written_in_one_go(volume: Path) -> None:
    name = file_name(1, 10, "run1", "bytes")
    given = {"np": 1, "checkpoint_dir": volume / "c", "timeline": volume / "timeline"}
    (volume / "timeline").write_bytes(b"of the attempt before")
    traces = Arrivals("run1", volume / "traces")
    with Archive("run1", Options(**grouped(given))) as archive, traces:
        for offset, data in ((0, b"first "), (6, b"second"), (12, b"")):
            trace = traces.part(FilePart(0, "torch.json.gz", offset, data))
            if data:
                archive.part(FilePart(0, name, offset, data))
                archive.part(FilePart(0, "timeline", offset, data))
        assert trace is not None
        assert Path(trace.path).read_bytes() == b"first second"
        digest = "92088ec140fc553e4b1ede202edccb65a807bbf8a38d765a3ad38013c0f13688"
        saved = archive.saved(Marker(name, 1, 10, "bytes", 12, digest, "run1"))
        assert saved is not None
    assert (volume / "timeline").read_bytes() == b"first second"
    assert (volume / "c" / name).read_bytes() == b"first second"


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_a_file_that_arrives_in_part_is_no_checkpoint(
    volume: Path, tmp_path: Path, number: int
) -> None:
    folder = LocalFolder(volume)
    checkpoint.write_probe(folder, "run1")
    (tmp_path / "backing" / f"fail-{number}").touch()
    with saving(CheckpointPlan(str(volume), "run1")) as (saver, told):
        saver.save(bytes(100_000), 1, None)
        saver.save(b"next", 2, None)
    assert [each.step for each in checkpoint.find_complete(folder)] == [2]
    (reason,) = [each.reason for each in told if isinstance(each, Unsaved)]
    assert os.strerror(number) in reason
    checkpoint.clean_up(folder, "run1")
    assert len(list(volume.iterdir())) == 2


def test_a_store_without_rename_holds_checkpoints(tmp_path: Path) -> None:
    with mounted(tmp_path / "backing", tmp_path / "bucket", "--no-rename") as path:
        folder = LocalFolder(path)
        with saving_to(folder) as saver:
            for step in (1, 2):
                saver.save({"step": step}, step, None)
        complete = checkpoint.find_complete(folder)
        assert [each.step for each in complete] == [2, 1]
        assert Checkpoint(folder, complete[0]).load() == {"step": 2}
        checkpoint.clean_up(folder, "run1")
        assert len(list(path.iterdir())) == 4


@pytest.mark.spark
@pytest.mark.places("spark")
def test_datasets_are_packed_in_a_shared_dir(volume: Path, ranks: Ranks) -> None:
    def main(table: Any, frame: Any) -> list[float]:
        return [
            float(sum(batch["x"].sum() for batch in shard.batches(10))) for shard in (table, frame)
        ]

    assert ranks.spark is not None
    frame = ranks.spark.range(100).selectExpr("cast(id as double) x")
    table = pa.table({"x": np.arange(50.0)})
    config = DataConfig(shared_dir=volume)
    for _ in range(2):  # the second one finds what the first one left
        found = ranks.run(1, main, {"data_config": config}, table=table, frame=frame)
        assert found == [1225.0, 4950.0]
    assert not list(volume.rglob("piece-*"))


def test_wheels_and_logs_are_copied_there(volume: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    said: list[str] = []
    wheels.publish(wheels.Place(str(volume / "wheels")), "key", wheel, said.append)
    assert "copied the wheel" in said[0]
    copy = wheels.fetch(wheels.Place(str(volume / "wheels")), "key", tmp_path)
    assert copy is not None
    assert copy.read_bytes() == b"wheel"
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "events").write_bytes(b"events")
    copy_to_store(logs, (volume / "store").as_uri())
    assert (volume / "store" / "events").read_bytes() == b"events"
