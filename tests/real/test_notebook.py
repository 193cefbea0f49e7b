"""A notebook, over a real Jupyter kernel: what a cell shows, and what "interrupt" does."""

from __future__ import annotations

import os
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from horovod_runner.host.processes import wait_for_end

_SECONDS = 400.0
_SETUP = """
import os, subprocess, threading
from horovod_runner import HorovodRunner
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
scale = 3

class Trouble(Exception):
    pass

def main(x):
    print("printed by", os.environ["RANK"])
    return x * scale

def fail():
    raise Trouble("rank one is unhappy")

def wait():
    child = subprocess.Popen(["sleep", "600"])
    print("pids", os.getpid(), child.pid, flush=True)
    threading.Event().wait()
"""


class Notebook:
    """A kernel, and what its cells show."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self._client = client
        self._cell = ""
        self.shown = ""

    def start(self, code: str) -> None:
        """Run a cell, and go on."""
        self.shown = ""
        self._cell = self._client.execute(code)

    def read_until(self, pattern: str) -> None:
        """Read what the cell shows until it matches."""
        while not re.search(pattern, self.shown):
            self._read()

    def wait(self) -> tuple[Any, str]:
        """The cell's value as text, and the error's name; either may be empty."""
        value, error = "", ""
        while (message := self._read())["msg_type"] != "status" or (
            message["content"]["execution_state"] != "idle"
        ):
            if message["msg_type"] == "execute_result":
                value = message["content"]["data"]["text/plain"]
            if message["msg_type"] == "error":
                error = message["content"]["ename"]
                self.shown += "\n".join(message["content"]["traceback"])
        return value, error

    def _read(self) -> dict[str, Any]:
        while True:
            try:
                message: dict[str, Any] = self._client.get_iopub_msg(timeout=_SECONDS)
            except queue.Empty:
                raise AssertionError(f"nothing more was shown after {self.shown!r}") from None
            if message["parent_header"].get("msg_id") == self._cell:
                if message["msg_type"] == "stream":
                    self.shown += message["content"]["text"]
                return message


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    manager, client = start_new_kernel(
        kernel_name="python3", env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    )
    try:
        opened = Notebook(manager, client)
        opened.start(_SETUP)
        assert opened.wait() == ("", ""), opened.shown
        yield opened
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.spark
@pytest.mark.parametrize("np", [-2, 2], ids=["local", "spark"])
def test_interrupt_ends_all_ranks_and_the_kernel_goes_on(notebook: Notebook, np: int) -> None:
    notebook.start(f'HorovodRunner(np={np}, driver_log_verbosity="all").run(wait)')
    notebook.read_until(r"(?s)pids \d+.*pids \d+ \d+\n")
    pids = [int(n) for pair in re.findall(r"pids (\d+) (\d+)", notebook.shown) for n in pair]
    ranks = [psutil.Process(pid) for pid in pids]
    assert len(ranks) == 4
    notebook.manager.interrupt_kernel()
    assert notebook.wait()[1] == "KeyboardInterrupt"
    assert "interrupted: ending all ranks" in notebook.shown
    assert wait_for_end(ranks, 10) == []
    notebook.start(f'HorovodRunner(np={np}, driver_log_verbosity="all").run(main, x=2)')
    assert notebook.wait() == ("6", "")
    assert "[1] printed by 1" in notebook.shown


@pytest.mark.spark
@pytest.mark.parametrize("np", [-2, 2], ids=["local", "spark"])
def test_a_cell_shows_the_users_own_error_with_its_rank(notebook: Notebook, np: int) -> None:
    notebook.start(f'HorovodRunner(np={np}, driver_log_verbosity="all").run(fail)')
    assert notebook.wait()[1] == "Trouble"
    assert "rank one is unhappy" in notebook.shown
    assert "of 2 on" in notebook.shown
    assert "in fail" in notebook.shown


@pytest.mark.horovod
def test_loader_processes_that_are_not_forked_know_the_notebooks_dataset(
    notebook: Notebook,
) -> None:
    notebook.start("""
import logging
logging.basicConfig(level=logging.INFO, format="of the notebook|%(message)s")
log = logging.getLogger(__name__)

class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * index

def load(context):
    from torch.utils.data import DataLoader

    log.info("loading")
    loader = DataLoader(Squares(), 2, num_workers=1, multiprocessing_context=context)
    return [batch.tolist() for batch in loader]

runner = HorovodRunner(np=-1, progress=False)
[runner.run(load, context=context) for context in ("spawn", "forkserver")]
""")
    assert notebook.wait() == ("[[[0, 1], [4, 9]], [[0, 1], [4, 9]]]", "")
    assert notebook.shown.count("of the notebook|loading") == 2
