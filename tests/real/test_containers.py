"""Containers that leave little memory or few cores: the kernel limits processes for real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_runner import HorovodRunner, RankFailedError
from horovod_runner.host import control_groups
from horovod_runner.results.run import Run
from horovod_runner.sinks import Sink
from horovod_runner.task import memory
from tests.control_groups import cpu_quota, memory_limit
from tests.programs import Program

MIB = 1 << 20


@pytest.fixture
def container() -> Iterator[Path]:
    """A container with 200 MiB: the file that takes its members' process ids."""
    with memory_limit(200 * MIB) as members:
        yield members


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look twenty times as often, so that less memory needs to be filled."""
    # No argument reaches the task of a run: nobody needs another rhythm.
    monkeypatch.setattr(memory, "_LOOK_SECONDS", 0.05)


class Warned(Sink):
    """Makes a file once there is a notice about memory."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def notice(self, text: str) -> None:
        if "no memory left" in text:
            self._file.touch()


def notices(run: Run | None) -> list[str]:
    assert run is not None
    return [line.text for line in run.logs if "no memory left" in line.text]


@pytest.mark.usefixtures("nothing_left")
def test_a_growing_rank_is_named_before_the_kernel_ends_it_and_after(
    container: Path, tmp_path: Path
) -> None:
    warned = tmp_path / "warned"

    def main() -> None:
        container.write_text("0")
        kept: list[bytes] = []
        while os.environ["HOROVOD_RANK"] == "1":
            # Slowly where little is left, until the driver has said so.
            is_slow = len(kept) >= 35 and not warned.exists()
            kept.append(b"x" * (MIB // 4 if is_slow else 4 * MIB))
            print(len(kept), flush=True)  # the task looks when there is something to do
            threading.Event().wait(0.05)
        threading.Event().wait()

    runner = HorovodRunner(np=-2, sinks=[Warned(warned)])
    with pytest.raises(RankFailedError) as caught:
        runner.run(main)
    (text,) = notices(runner.last_run)
    assert "of the container's 200 MiB are free, which lasts " in text
    assert "\nRank 1 has grown most (" in text
    assert caught.value.rank == 1
    error = str(caught.value)
    assert "killed by SIGKILL (the kernel's out-of-memory killer)" in error
    assert re.search(r"of the container's 200 MiB were left\. The rank had \d+ MiB in", error)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_uses_most_memory_steadily_causes_no_warning(
    container: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cached"
    with file.open("wb") as written:
        written.write(os.urandom(MIB) * 100)
        os.fsync(written.fileno())
        # Out of the cache: it must be the rank that brings it there.
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def main() -> int:
        container.write_text("0")
        kept = b"x" * (130 * MIB)
        with file.open("rb", buffering=0) as data:
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # without reading ahead
            while data.read(MIB // 4):
                print("read", flush=True)  # the task looks when there is something to do
                threading.Event().wait(0.005)
        return len(kept)

    runner = HorovodRunner(np=-1)
    assert runner.run(main) == 130 * MIB
    assert notices(runner.last_run) == []


def test_a_process_that_its_quota_stops_has_waited_for_most_of_the_time() -> None:
    code = """if True:
        import os, sys, time
        open(sys.argv[1], "w").write("0")
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        print("computed", flush=True)
        sys.stdin.read()
    """
    # A share so small that even a busy machine gives the process more.
    with cpu_quota(0.05) as members:
        command = [sys.executable, "-c", code, str(members)]
        with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "computed\n"
            assert control_groups.cpu_quota(process.pid) == 0.05
            assert control_groups.cpu_time(process.pid).throttled > 0.1
            process.communicate("")
    assert control_groups.cpu_quota() != 0.05
