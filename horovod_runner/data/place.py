"""This rank's place in a run: its number, and the run's folder on this host."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from pathlib import Path

from horovod_runner.host.scratch import VARIABLE, RunFolder


def place() -> tuple[int, int]:
    """This rank's number and the number of ranks; (0, 1) outside a run."""
    return int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1"))


def run_folder() -> Path:
    """The run's folder on this host; outside a run, a folder of this process."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = str(process_folder(f"process-{os.getpid()}"))
    return Path(os.environ[VARIABLE])


def process_folder(name: str) -> Path:
    """A new folder on this host, which is removed at the end of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(RunFolder(name)).path
