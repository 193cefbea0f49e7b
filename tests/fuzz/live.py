"""A run that trains while its sockets are fuzzed.

Its driver is a separate process, so that its memory and descriptors can be measured. Its limit is
1024 descriptors, the default of most systems.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from horovod_runner import ClusterConfig, HorovodRunner, log_to_driver
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.channel import Channel
from tests.programs import ROOT, await_condition

#: Where a cold start is not the subject.
WARM = ClusterConfig(preload_frameworks=["horovod.torch"])
_DESCRIPTORS = 1024
_SECONDS = 300.0  # a limit for steps that take a second or two on an idle machine
_STEPS_BETWEEN_INITS = 100
_DRIVER = "import sys; from tests.fuzz import live; live.drive(sys.argv[1])"


@dataclass(frozen=True)
class Sockets:
    """The ports that the run listens on, and its secrets."""

    channel: ChannelAddress
    rendezvous_port: int
    token: str


def train(stop: str) -> int:
    """Check every sum and log every step until the file ``stop`` exists; returns the steps."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    step = 0
    while True:
        mine = torch.tensor([float(step * (hvd.rank() + 1)), float(os.path.exists(stop))])
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name="step")
        while not hvd.poll(handle):
            time.sleep(0.005)  # synchronize would use a whole core while it waits
        total, stopping = hvd.synchronize(handle).tolist()
        if total != step * 3:
            raise ArithmeticError(f"step {step}: {total} is not {step * 3}")
        log_to_driver(f"{hvd.rank()} {step}")
        step += 1
        if stopping:
            return step
        if step % _STEPS_BETWEEN_INITS == 0:  # through the rendezvous server, again and again
            hvd.shutdown()
            hvd.init()


def _announce(runner: HorovodRunner, channels: list[Channel]) -> None:
    """Print the run's sockets, as soon as it listens."""
    while not runner._runs.under_way:
        time.sleep(0.01)
    requests = runner._runs.under_way[0]._requests
    while (supervisor := requests.supervisor) is None or not supervisor.roster.all_started:
        time.sleep(0.01)
    channels.append(supervisor._channel)
    address, _, token = supervisor.roster.hellos[0].rendezvous.partition("/")
    sockets = Sockets(channels[0].address, int(address.rpartition(":")[2]), token)
    print("sockets", pickle.dumps(sockets).hex(), flush=True)


def drive(stop: str) -> None:
    """The driver's process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, hard))
    # One cycle is one step, which leaves most of the cores to the fuzzer.
    runner = HorovodRunner(np=-2, env={"HOROVOD_CYCLE_TIME": "10"}, cluster_config=WARM)
    channels: list[Channel] = []
    threading.Thread(target=_announce, args=[runner, channels], daemon=True).start()
    steps = runner.run(train, stop=stop)
    print("end", steps, channels[0].refused, channels[0].dropped, flush=True)


class LiveRun:
    """Two ranks under a separate driver process.

    Attributes:
        sockets: the run's.
        driver: the driver's process.
        steps, refused, dropped: the result of ``train`` and the channel's counts; set at the end.
    """

    steps: int
    refused: int
    dropped: int

    def __init__(self, folder: Path) -> None:
        self._stop = folder / "stop"
        self._errors = folder / "stderr"
        self._logged = {0: 0, 1: 0}
        self._strays: list[str] = []
        self._announced: list[Sockets] = []
        self._moved = threading.Condition()
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DRIVER, str(self._stop)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.driver = psutil.Process(self._process.pid)
        try:
            self._wait(lambda: self._announced and min(self._logged.values()) > 0)
            self.sockets = self._announced[0]
            self._before = self.driver.num_fds(), self.driver.memory_info().rss
        except BaseException:
            self._process.kill()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            with self._moved:
                if word == "sockets":
                    self._announced.append(pickle.loads(bytes.fromhex(rest)))
                elif word == "end":
                    self.steps, self.refused, self.dropped = map(int, rest.split())
                elif word in ("0", "1") and rest == str(self._logged[int(word)]):
                    self._logged[int(word)] += 1  # once each, and in order
                else:
                    self._strays.append(line)
                self._moved.notify_all()
        with self._moved:
            self._moved.notify_all()

    def _wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _SECONDS
        with self._moved:
            while not condition():
                assert self._process.poll() is None, self._report()
                assert time.monotonic() < deadline, (
                    f"no step for {_SECONDS:.0f} s\n{self._report()}"
                )
                self._moved.wait(1.0)

    def _report(self) -> str:
        return f"{self._strays[:20]}\n{self._errors.read_text()[-5000:]}"

    def goes_on(self) -> None:
        """Wait until both ranks have done more steps and started Horovod once more."""
        then = {rank: steps + _STEPS_BETWEEN_INITS + 1 for rank, steps in self._logged.items()}
        self._wait(lambda: all(self._logged[rank] >= then[rank] for rank in then))

    def settles(self, memory: int) -> None:
        """Wait until the driver has no more descriptors than at the start, then check its memory.

        It waits because Horovod is restarting meanwhile.

        Args:
            memory: how many bytes the driver may have grown by.
        """
        descriptors_before, memory_before = self._before
        await_condition(lambda: self.driver.num_fds() <= descriptors_before, _SECONDS)
        assert self.driver.memory_info().rss - memory_before < memory

    def ends_well(self) -> None:
        """End the run, and check that every message has arrived once and in order."""
        self._stop.touch()
        assert self._process.wait(_SECONDS) == 0, self._report()
        self._reader.join(_SECONDS)
        assert self._strays == []
        assert [self.steps] * 2 == list(self._logged.values())
        errors = self._errors.read_text()
        assert not re.search("Traceback|Exception|lost", errors), errors[-5000:]

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(psutil.Error):
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
