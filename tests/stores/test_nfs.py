"""Checkpoints on NFS: hosts see late what others change, and files of theirs vanish."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod_runner import CheckpointError
from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import marker_name
from tests.savers import saving
from tests.stores import mounted


def test_a_driver_and_a_rank_agree_though_their_hosts_believe_old_news(tmp_path: Path) -> None:
    served = tmp_path / "served"
    with (
        mounted(served, tmp_path / "driver", "--cached", "60") as path,
        mounted(served, tmp_path / "rank", "--cached", "60") as seen,
    ):
        driver = LocalFolder(path)
        assert checkpoint.find_complete(driver) == []
        checkpoint.write_probe(driver, "run1")
        assert checkpoint.has_probe(LocalFolder(seen), "run1")
        with saving(CheckpointPlan(str(seen), "run1")) as (saver, _):
            saver.save(b"first", 1, None)
            saver.finish()
            assert [each.step for each in checkpoint.find_complete(driver)] == [1]
            saver.save(b"second", 2, None)
        latest, first = checkpoint.find_complete(driver)
        assert (latest.step, first.step) == (2, 1)
        assert Checkpoint(driver, first).load() == b"first"
        checkpoint.remove(LocalFolder(seen), first)
        assert checkpoint.find_complete(driver) == [latest]
        with pytest.raises(CheckpointError, match=r"\(step 1\).*num_to_keep"):
            Checkpoint(driver, first).load()
        assert Checkpoint(driver, latest).load() == b"second"
        checkpoint.clean_up(driver, "run1")
    assert sorted(os.listdir(served)) == sorted([latest.name, marker_name(latest.name)])
