"""A limit of open files that is too low is told before a launch; a run that begins has enough.

ZeroMQ ends a process that can open no more files, so each case runs in its own process.
"""

from __future__ import annotations

import pytest

from tests.programs import run_python

_RUN = """
import faulthandler, os, resource, sys
from horovod_runner import HorovodRunner
from horovod_runner.sinks import Sink

np, limit, taken = eval(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limit), limit))
faulthandler.dump_traceback_later(90, exit=True)

class Taker(Sink):
    # Takes files between the first check and the launch, as other code of the driver may.
    def prepare(self):
        while taken and len(os.listdir("/dev/fd")) < taken:
            os.dup(0)

def main():
    return int(os.environ["HOROVOD_SIZE"])

print("value", HorovodRunner(np=np, sinks=[Taker()]).run(main))
"""


def run(np: int | tuple[int, int], limit: int, taken: int = 0) -> str:
    """Run in a process with a hard limit of open files.

    Args:
        np: as for HorovodRunner.
        limit: the hard limit.
        taken: how many files the driver has open right before the launch.

    Returns:
        What the process printed, or the last line of its error.
    """
    done = run_python(_RUN, repr((np, limit, taken)))
    assert done.returncode in (0, 1), done.stderr  # and no signal
    if done.returncode:
        assert "rank  host" not in done.stderr  # nothing was launched
        return done.stderr.splitlines()[-1]
    return done.stdout.splitlines()[-1]


def test_too_few_open_files_for_the_ranks_are_refused_before_the_launch() -> None:
    error = run(-104, 1024)
    assert "ChannelError: the driver needs about 3808 more open files for 104 ranks" in error
    assert "of the 1024 that this process may open" in error
    assert "ulimit -n 4256" in error


@pytest.mark.parametrize("free", [5, 30, 60, 90, 120, 150, 180, 205, 230, 260])
def test_open_files_that_other_code_takes_are_counted_right_before_the_launch(free: int) -> None:
    """The limit would be reached at one point of the start after the other."""
    limit = 300
    ended = run(-4, limit, limit - free)
    if free < 208:  # 36 for each rank, and some
        assert "more open files for 4 ranks" in ended
        assert "ulimit -n " in ended
    if free > 240:
        assert ended == "value 4"


def test_tasks_of_an_elastic_run_need_more() -> None:
    assert "needs about 264 more open files for 4 ranks" in run((-1, -4), 200)
    assert run((-1, -4), 330) == "value 4"


def test_many_ranks_have_the_files_that_they_need_above_the_soft_limit() -> None:
    assert run(-104, 3860) == "value 104"
