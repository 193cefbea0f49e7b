"""Folders on a real HDFS: the tests of every store, and what HDFS alone does."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from horovod_runner import load_checkpoint, save_checkpoint
from horovod_runner.host.folders.opening import open_folder
from tests.conftest import Ranks
from tests.engines.hadoop import Hadoop
from tests.stores.any_store import AnyStore

pytestmark = [pytest.mark.places("yarn"), pytest.mark.timeout(600)]
_number = itertools.count()


class TestHdfs(AnyStore):
    """A folder of a URL that names the NameNode."""

    @pytest.fixture
    def url(self, hadoop: Hadoop) -> str:
        return f"{hadoop.url}/store-{next(_number)}"


def test_a_process_that_has_used_hdfs_can_fork(hadoop: Hadoop) -> None:
    assert open_folder(f"{hadoop.url}/before-a-fork").names() == []
    child = get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("name", ["datanode", "namenode"])
def test_a_server_restarts_while_a_checkpoint_is_written(
    hadoop: Hadoop, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{hadoop.url}/restart-of-{name}"
    kept = {"checkpoint_dir": url, "num_to_keep": None}

    def train(steps: int, held: int) -> int:
        import horovod.torch as hvd

        hvd.init()
        found = load_checkpoint()
        first = found.step + 1 if found else 1
        for step in range(first, steps + 1):
            if held and step == 2 and hvd.rank() == 0:
                until(lambda: any("step-1-" in each for each in markers(url)))
                os.kill(held, signal.SIGSTOP)  # the next file is begun, and gets no further
            save_checkpoint({"step": step, "bytes": os.urandom(20_000_000)}, step)
            hvd.barrier()
        return first

    def restart() -> None:
        folder = open_folder(url)
        until(lambda: any("step-2-" in each for each in folder.names()))
        hadoop.restart(name)
        if name == "namenode":
            hadoop.daemons["datanode"].kill(signal.SIGCONT)

    runner = Ranks("local").runner(2, **kept)
    with ThreadPoolExecutor(1) as pool:
        restarted = pool.submit(restart)
        assert runner.run(train, steps=3, held=hadoop.daemons["datanode"].pid) == 1
        restarted.result()
    assert [each.load()["step"] for each in runner.last_run.checkpoints] == [1, 2, 3]
    assert "could not be written" not in capsys.readouterr().err
    assert Ranks("local").runner(2, resume=True, **kept).run(train, steps=4, held=0) == 4


def markers(url: str) -> list[str]:
    """The names of the markers of complete checkpoints in a folder."""
    names = open_folder(url).names()
    return [each for each in names if each.startswith("checkpoint-") and each.endswith(".json")]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what others do, at most two minutes."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
