"""Checks that end in all ways, for tests/unit/test_verify.py: child processes import them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from horovod_runner.results.run import Run
from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyReading, check, equal
from tests.made_up_runs import keep

_here = check("howto/gpu.md", 60, Needs(frameworks=()))


@_here
def passing(case: VerifyCase) -> Iterator[VerifyReading]:
    print("not shown")
    yield equal("quick", case.quick, True)
    yield equal("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), "0,1")


@_here
def recording(case: VerifyCase) -> Iterator[VerifyReading]:
    """Leave the record of a run, as a run does."""
    yield equal("kept", keep(Run("checks", 1)).exists(), True)


@_here
def wrong(case: VerifyCase) -> Iterator[VerifyReading]:
    print("shown")
    yield equal("two", 1 + 1, 3)
    yield equal("one", 1, 1)


@_here
def raising(case: VerifyCase) -> Iterator[VerifyReading]:
    yield equal("one", 1, 1)
    raise ArithmeticError("a failure on purpose")


@_here
def killed(case: VerifyCase) -> Iterator[VerifyReading]:
    yield equal("one", 1, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@_here
def leaving(case: VerifyCase) -> Iterator[VerifyReading]:
    os._exit(7)
    yield equal("one", 1, 1)


@_here
def silent(case: VerifyCase) -> Iterator[VerifyReading]:
    yield from ()


@_here
def hanging(case: VerifyCase) -> Iterator[VerifyReading]:
    """Hang, until an interrupt comes, as a run in the main thread does."""
    yield equal("one", 1, 1)
    sign = Path(os.environ["HANGS"])
    try:
        sign.touch()
        threading.Event().wait()
    finally:
        sign.write_text("interrupted")


@_here
def stubborn(case: VerifyCase) -> Iterator[VerifyReading]:
    """Hang, and have a child that hangs; both ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield equal("one", 1, 1)
    child = os.fork()
    if not child:
        signal.alarm(120)  # a test that fails leaves it
    else:
        sign = Path(os.environ["HANGS"])
        sign.with_suffix(".part").write_text(str(child))
        sign.with_suffix(".part").rename(sign)
    threading.Event().wait()
