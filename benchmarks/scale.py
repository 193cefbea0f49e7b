"""What one driver takes: so many simulated ranks that meet, report and fail over the real channel.

The driver, its channel and its sinks are those of every run. The ranks are simulated: each has a
link of its own and says what a rank's task says, in a few processes, without a worker. Steps:

    meet    all connect at once and say hello, until the last one knows its slot
    report  each sends ten reports a second, in batches of a tenth of a second as a task does
    fail    one rank of them fails; until ``run`` has raised the error that names it

    python benchmarks/scale.py [--sizes 125 250 500 1000] [--seconds 10] [--json scale.json]
"""

from __future__ import annotations

import argparse
import heapq
import io
import multiprocessing
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from horovod_runner import RankFailedError, messages
from horovod_runner.channel import ChannelAddress, Link
from horovod_runner.driver import Driver
from horovod_runner.frames import frame
from horovod_runner.handover import WorkerOutcome
from horovod_runner.job import Job, Outcome
from horovod_runner.recorder import Recorder
from horovod_runner.result import Run
from horovod_runner.sinks import Sinks
from horovod_runner.sinks.terminal import TerminalSink
from horovod_runner.topology import Offer

_PER_HOST = 8
_PROCESSES = 2
_PERIOD_SECONDS = 0.1
_TARGETS = {"meet": 5.0, "cores": 1.0, "named": 5.0}
_SOFTWARE = {"python": "3.11", "horovod": "0.28.1", "torch": "2.9.1", "horovod_runner": "1"}


class Told(NamedTuple):
    """What the simulated ranks of one process tell in the end; moments of the monotonic clock."""

    began: float
    met: float
    reported: int
    failed: float


class Figures(NamedTuple):
    """Of one size.

    Attributes:
        meet: seconds from the first hello to the last assignment.
        meet_cpu: seconds of the driver's CPU until then.
        cores: of the driver while it takes reports.
        sent, taken: reports.
        named: seconds from a rank's failure to the error.
        error: its first line.
        table: what was printed of the ranks.
    """

    size: int
    meet: float
    meet_cpu: float
    cores: float
    sent: int
    taken: int
    named: float
    error: str
    table: str


def simulate(
    gate: Connection,
    address: ChannelAddress,
    tasks: Sequence[int],
    seconds: float,
    failing: int,
) -> None:
    """Be some ranks, in a process of its own, until the driver has taken their last words."""
    links = {task: Link(address, task) for task in tasks}
    gate.send(None)
    gate.recv()
    began = time.monotonic()
    for task, link in links.items():
        host = f"node-{task // _PER_HOST:03}"
        offer = Offer(
            task, host, host, f"10.0.{task // _PER_HOST // 250}.{task // _PER_HOST % 250}", "eth0"
        )
        link.put(messages.Hello(offer, "10.0.0.0:4000/token" if task == 0 else "", 4001, _SOFTWARE))
        link.flush()
    ranks: dict[int, int] = {}
    while len(ranks) < len(tasks):
        for task, link in links.items():
            if task in ranks:
                continue
            for message in link.wait(0.001):
                if isinstance(message, messages.Assignment):
                    ranks[task] = message.slot.rank
                    link.put(messages.Started(ranks[task], 10_000 + task))
                    link.put(messages.Began(ranks[task]))
                    link.flush()
    met = time.monotonic()
    gate.send(None)
    gate.recv()
    reported = send_reports(links, ranks, seconds)
    gate.send(None)
    gate.recv()
    failed = time.monotonic()
    if failing in links:
        links[failing].put(messages.Failed(ranks[failing], 1, "ValueError"))
        links[failing].flush()
    stay_until_stopped(links)
    end(links)
    gate.send(Told(began, met, reported, failed))


def send_reports(links: Mapping[int, Link], ranks: Mapping[int, int], seconds: float) -> int:
    """Ten a second from each rank, at moments of its own; returns how many."""
    start = time.monotonic()
    due = [(start + _PERIOD_SECONDS * at / len(links), task) for at, task in enumerate(links)]
    heapq.heapify(due)
    sent = 0
    while due:
        moment, task = due[0]
        pause = moment - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        rank, link = ranks[task], links[task]
        metrics = {"loss": 0.123, "accuracy": 0.456}
        said = messages.Report(rank, metrics, step=int(moment * 10), epoch=1, time=time.time())
        link.put_batch(frame(messages.encode(said)))
        link.beat()
        link.flush()
        sent += 1
        if moment + _PERIOD_SECONDS < start + seconds:
            heapq.heapreplace(due, (moment + _PERIOD_SECONDS, task))
        else:
            heapq.heappop(due)
    return sent


def stay_until_stopped(links: Mapping[int, Link]) -> None:
    """As tasks do whose rank waits in a collective."""
    running = dict(links)
    while running:
        for task, link in list(running.items()):
            if any(isinstance(message, messages.Stop) for message in link.wait(0.001)):
                del running[task]


def end(links: Mapping[int, Link]) -> None:
    """Say that nothing follows, and wait until that was taken."""
    for task, link in links.items():
        link.put(messages.Ended(task, link.sent + link.waiting))
        link.flush()
    left = dict(links)
    while left:
        for task, link in list(left.items()):
            if any(isinstance(message, messages.Taken) for message in link.wait(0.001)):
                del left[task]
    for link in links.values():
        link.close()


class SimulatedLauncher:
    """Starts simulated ranks in a few processes."""

    where = "simulated"
    channel_host = "127.0.0.1"
    shares_files = False
    frames: Mapping[str, Any] = {}

    def __init__(self, seconds: float, failing: int) -> None:
        self._seconds = seconds
        self._failing = failing
        self.began: list[SimulatedLaunch] = []

    def slots(self, size: int, patience: float = 0.0) -> int:
        """As many as asked for."""
        return size

    def launch(
        self, job: Job, address: ChannelAddress, wake: Callable[[], None]
    ) -> SimulatedLaunch:
        """Start the processes."""
        launch = SimulatedLaunch(job, address, wake, self._seconds, self._failing)
        self.began.append(launch)
        return launch


class SimulatedLaunch:
    """The simulated ranks of one run; steps begin when those in all processes are done."""

    late = None
    expected = None
    running = False

    def __init__(
        self,
        job: Job,
        address: ChannelAddress,
        wake: Callable[[], None],
        seconds: float,
        failing: int,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._job = job
        self._failing = failing
        self._gates: list[Connection] = []
        self._processes = []
        self.told: list[Told] = []
        self.cpu: list[tuple[float, float]] = []  # the driver's, and when, at each step
        self.finished = False
        for at in range(_PROCESSES):
            ours, theirs = context.Pipe()
            tasks = range(at, job.size, _PROCESSES)
            arguments = (theirs, address, tasks, seconds, failing)
            process = context.Process(target=simulate, args=arguments, daemon=True)
            process.start()
            self._gates.append(ours)
            self._processes.append(process)
        self._thread = threading.Thread(target=self._conduct, args=[wake], daemon=True)
        self._thread.start()

    def _conduct(self, wake: Callable[[], None]) -> None:
        for _ in range(3):
            for gate in self._gates:
                gate.recv()
            self.cpu.append((time.process_time(), time.monotonic()))
            for gate in self._gates:
                gate.send(None)
        self.told = [gate.recv() for gate in self._gates]
        for process in self._processes:
            process.join()
        self.finished = True
        wake()

    def outcomes(self) -> list[Outcome]:
        """One rank's error, and all others stopped."""
        text = "Traceback (most recent call last):\nValueError: odd label"
        failed = WorkerOutcome(False, 1, b"", "ValueError", text)
        return [
            Outcome(
                task,
                task,
                f"node-{task // _PER_HOST:03}",
                10_000 + task,
                1 if task == self._failing else -15,
                worker=failed if task == self._failing else None,
                stopped=task != self._failing,
            )
            for task in range(self._job.size)
        ]

    def cancel(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()


def measure(size: int, seconds: float) -> Figures:
    """One run of so many ranks."""
    failing = size * 617 // 1000
    launcher = SimulatedLauncher(seconds, failing)
    job = Job(f"{size:08x}", size, pickle.dumps(None), report_ranks="all", software=_SOFTWARE)
    run = Run(job.run_id, size, {})
    recorder, terminal = Recorder(run), TerminalSink(size)
    printed = io.StringIO()
    driver = Driver(
        job, launcher, Sinks([recorder, terminal], [], terminal.notice), threading.Event()
    )
    try:
        with redirect_stderr(printed):
            driver.run()
    except RankFailedError as error:
        raised, first_line = time.monotonic(), str(error).splitlines()[0]
    (launch,) = launcher.began
    (cpu_start, _), (cpu_met, met_at), (cpu_reported, reported_at) = launch.cpu
    told = launch.told
    return Figures(
        size,
        max(each.met for each in told) - min(each.began for each in told),
        cpu_met - cpu_start,
        (cpu_reported - cpu_met) / (reported_at - met_at),
        sum(each.reported for each in told),
        len(run.metrics) if hasattr(run.metrics, "__len__") else 0,
        raised - min(each.failed for each in told),
        first_line,
        printed.getvalue(),
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Simulated ranks on one driver.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[125, 250, 500, 1000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of reports")
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    parser.add_argument("--show", action="store_true", help="also what is printed of the ranks")
    options = parser.parse_args()
    found = []
    for size in options.sizes:
        figures = measure(size, options.seconds)
        found.append(figures)
        print(figures._replace(table=""), file=sys.stderr, flush=True)
        if options.show:
            print(figures.table)


if __name__ == "__main__":
    main()
