"""Runs a daemon, and ends it with everything that it has ever started.

    python -m tests.engines.reaper COMMAND...

A NodeManager's containers are process groups of their own, and outlive it. Here they become
children of this process. They end when its standard input closes, or when they have all ended: the
process that holds the other end of the pipe needs to do nothing, not even when it is killed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run the command until standard input closes."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    daemon = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    print(daemon.pid, flush=True)
    threading.Thread(target=_end_with_input, daemon=True).start()
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _end_with_input() -> None:
    """Kill all descendants once the input has closed, again and again: they may start others."""
    while os.read(0, 1):  # by a buffered file, Python could not end while it is read
        pass
    while True:
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                each.kill()


if __name__ == "__main__":
    main()
