"""Load of one driver with hundreds of simulated ranks that meet, report and fail.

The driver, its channel and its sinks are the real ones. The ranks are simulated in a few processes,
without workers: each has its own connection and sends what a rank's task sends. Steps:

    meet    all connect at once and say hello, until the last one knows its slot
    fence   the requests of MPI's startup: three fences, and the addresses of the other hosts
    report  each sends ten reports a second, in batches of a tenth of a second as a task does; once
            a second the profile of its time, and every five seconds what its host does
    fail    one rank fails, until ``run`` has raised the error that names it

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
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import report

from horovod_runner import RankFailedError
from horovod_runner.common.options import DebugConfig, Options
from horovod_runner.common.slots import Offer
from horovod_runner.driver.attempt import AttemptRunner
from horovod_runner.driver.launcher import Launch, Launcher, LaunchRequest
from horovod_runner.driver.requests import Requests
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunLog
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.sinks.terminal import TerminalSink
from horovod_runner.wire import events, messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.framing import frame
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.job_file import WorkerOutcome
from horovod_runner.wire.link import Link
from horovod_runner.wire.measurements import Machine, Profile

_PER_HOST = 8
_PROCESSES = 2
_PERIOD_SECONDS = 0.1
_SOFTWARE = {"python": "3.11", "horovod": "0.28.1", "torch": "2.9.1", "mpich": "5.0.2"}
_FENCES = 3
_MPI_ADDRESS_BYTES = 600  # about what MPICH publishes for UCX, with one rank on each host


T = TypeVar("T")


class Told(NamedTuple):
    """Results of the simulated ranks of one process; times are of the monotonic clock."""

    met: float
    fenced: float
    reported: int
    failed: float


class Figures(NamedTuple):
    """The figures of one number of ranks.

    Attributes:
        size: number of ranks.
        meet: seconds from the first hello to the last assignment.
        fence: seconds of all fences.
        meet_cpu, fence_cpu: the driver's CPU seconds meanwhile.
        cores: CPU cores that the driver uses while it receives reports.
        sent, taken: number of reports sent, and received by the driver.
        named: seconds from a rank's failure to the error.
        error: the error's first line.
    """

    size: int
    meet: float
    fence: float
    meet_cpu: float
    fence_cpu: float
    cores: float
    sent: int
    taken: int
    named: float
    error: str


def simulate(
    gate: Connection,
    address: ChannelAddress,
    tasks: Sequence[int],
    seconds: float,
    failing: int,
) -> None:
    """Simulate some ranks in a child process, until the driver has received their last messages."""
    links = {task: Link(address, task) for task in tasks}
    next_step(gate)
    for task, link in links.items():
        number = task // _PER_HOST
        host, place = f"node-{number:03}", f"10.0.{number // 250}.{number % 250}"
        store = "10.0.0.0:4000/token" if task == 0 else ""
        link.put(messages.Hello(Offer(task, host, host, place, "eth0"), store, 4001, _SOFTWARE))
        link.flush()
    assignments = each_hears(links, messages.Assignment)
    ranks = {task: found.slot.rank for task, found in assignments.items()}
    for task, link in links.items():
        link.put(messages.Started(ranks[task], 10_000 + task))
        link.put(events.Began(ranks[task]))
        link.flush()
    met = time.monotonic()
    next_step(gate)
    roots = [task for task, found in assignments.items() if found.slot.local_rank == 0]
    for fence in range(_FENCES):
        for task, link in links.items():
            values = {f"address-{task}": "x" * _MPI_ADDRESS_BYTES} if task in roots else {}
            link.put(messages.Fence(ranks[task], values if fence == 1 else {}))
            link.flush()
        each_hears(links, messages.Fenced)
    for task in roots:
        links[task].put(messages.Lookup(ranks[task]))
        links[task].flush()
    each_hears({task: links[task] for task in roots}, messages.MpiValues)
    fenced = time.monotonic()
    next_step(gate)
    reported = send_reports(links, ranks, seconds)
    next_step(gate)
    failed = time.monotonic()
    if failing in links:
        links[failing].put(messages.Failed(ranks[failing], 1, "ValueError"))
        links[failing].flush()
    each_hears(links, messages.Stop)
    for task, link in links.items():
        link.put(messages.Ended(task, link.sent + link.waiting))
        link.flush()
    each_hears(links, messages.Taken)
    for link in links.values():
        link.close()
    gate.send(Told(met, fenced, reported, failed))


def next_step(gate: Connection) -> None:
    """Wait until the ranks of the other processes have reached this step."""
    gate.send(None)
    gate.recv()


def each_hears(links: Mapping[int, Link], kind: type[T]) -> dict[int, T]:
    """Wait for a message of the driver to each rank; returns the messages by task."""
    found: dict[int, T] = {}
    while len(found) < len(links):
        for task in links.keys() - found.keys():
            for message in links[task].wait(0.001):
                if isinstance(message, kind):
                    found[task] = message
    return found


def send_reports(links: Mapping[int, Link], ranks: Mapping[int, int], seconds: float) -> int:
    """Send ten reports a second for each rank, and its profile; returns the number of reports."""
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
        said = events.Report(rank, metrics, step=int(moment * 10), epoch=1, time=time.time())
        link.put_batch(frame(messages.encode(said)))
        number = round((moment - start) / _PERIOD_SECONDS)
        if number % 10 == 9:
            link.put(profile_of(rank, len(ranks) * _PROCESSES, number // 10))
        if number % 50 == 49:
            link.put(
                Machine(rank, time.time(), 5.0, 3.5, 4, memory=1 << 30, host_rank=rank // 8 * 8)
            )
        link.beat()
        link.flush()
        sent += 1
        if moment + _PERIOD_SECONDS < start + seconds:
            heapq.heapreplace(due, (moment + _PERIOD_SECONDS, task))
        else:
            heapq.heappop(due)
    return sent


def profile_of(rank: int, size: int, second: int) -> Profile:
    """What a rank sends once a second of a training with ten steps a second."""
    most = max(4, min(100, 4000 // size))
    return Profile(
        rank,
        time.time(),
        1.0,
        {"optimizer": 10, "batches": 10, "reductions": 10},
        {"data": 0.05, "waiting": 0.1, "moving": 0.05, "report": 0.001},
        bytes=100_000_000,
        collectives=30,
        waited=0.2,
        moved=0.1,
        arrivals=[(second * most + n, 1000 + rank, 500_000) for n in range(most)],
        cpu=0.9,
        main_cpu=0.8,
    )


class SimulatedLauncher(Launcher):
    """A launcher that starts simulated ranks in a few processes."""

    where = "simulated"
    channel_host = "127.0.0.1"
    shares_files = False

    def __init__(self, seconds: float, failing: int) -> None:
        self._seconds = seconds
        self._failing = failing
        self.began: list[SimulatedLaunch] = []

    def slots(self, size: int, patience: float = 0.0) -> int:
        """Return the requested number of slots."""
        return size

    def launch(self, request: LaunchRequest) -> SimulatedLaunch:
        """Start the processes."""
        launch = SimulatedLaunch(request, self._seconds, self._failing)
        self.began.append(launch)
        return launch


class SimulatedLaunch(Launch):
    """The simulated ranks of one run; a step begins when all processes have finished the last."""

    def __init__(self, request: LaunchRequest, seconds: float, failing: int) -> None:
        context = multiprocessing.get_context("spawn")
        job = self._job = request.job
        self._failing = failing
        self._gates: list[Connection] = []
        self._processes = []
        self.told: list[Told] = []
        self.steps: list[tuple[float, float]] = []  # start, driver's CPU time then
        for at in range(_PROCESSES):
            ours, theirs = context.Pipe()
            tasks = range(at, job.size, _PROCESSES)
            arguments = (theirs, request.address, tasks, seconds, failing)
            process = context.Process(target=simulate, args=arguments, daemon=True)
            process.start()
            self._gates.append(ours)
            self._processes.append(process)
        self._thread = threading.Thread(target=self._conduct, args=[request.wake], daemon=True)
        self._thread.start()

    def _conduct(self, wake: Callable[[], None]) -> None:
        for _ in range(4):
            for gate in self._gates:
                gate.recv()
            self.steps.append((time.monotonic(), time.process_time()))
            for gate in self._gates:
                gate.send(None)
        self.told = [gate.recv() for gate in self._gates]
        for process in self._processes:
            process.join()
        self.finished = True
        wake()

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes: one rank's error, and all others stopped."""
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
    """Simulate one run with a number of ranks."""
    failing = size * 617 // 1000
    launcher = SimulatedLauncher(seconds, failing)
    options = Options(np=size, debug_config=DebugConfig(report_ranks="all"))
    job = Job(f"{size:08x}", size, options, pickle.dumps(None), software=_SOFTWARE)
    run = Run(job.run_id, size, {})
    terminal, printed = TerminalSink(size), io.StringIO()
    with TemporaryDirectory() as folder:
        log = RunLog(run, Path(folder) / "run")
        sink = FanOut(log, [terminal], [], terminal.notice)
        try:
            with redirect_stderr(printed):
                AttemptRunner(job, launcher, sink, Requests()).run()
        except RankFailedError as error:
            raised, first_line = time.monotonic(), str(error).splitlines()[0]
        log.close()
    (launch,) = launcher.began
    meet, fence, send, fail = launch.steps
    return Figures(
        size,
        max(each.met for each in launch.told) - meet[0],
        max(each.fenced for each in launch.told) - fence[0],
        fence[1] - meet[1],
        send[1] - fence[1],
        (fail[1] - send[1]) / (fail[0] - send[0]),
        sum(each.reported for each in launch.told),
        run.metrics.num_rows,
        raised - fail[0],
        first_line,
    )


def tables(found: Sequence[Figures]) -> str:
    """Print the figures of each size, and compare those of the largest with the targets."""
    heads = [
        "ranks",
        "meet, s",
        "CPU s",
        "3 fences, s",
        "CPU s",
        "reports lost",
        "cores",
        "named, s",
    ]
    rows = [
        [
            str(each.size),
            f"{each.meet:.2f}",
            f"{each.meet_cpu:.2f}",
            f"{each.fence:.2f}",
            f"{each.fence_cpu:.2f}",
            f"{each.sent - each.taken} of {each.sent}",
            f"{each.cores:.2f}",
            f"{each.named:.2f}",
        ]
        for each in found
    ]
    last = found[-1]
    judged = [
        [what, *report.at_most(f"{what}, {last.size} ranks", value, target, unit)]
        for what, value, target, unit in (
            ("until all have their slots", last.meet, 5, "s"),
            ("of the driver at ten reports a second each", last.cores, 1, "cores"),
            ("reports lost", last.sent - last.taken, 0, "reports"),
            ("until the failed rank is named", last.named, 5, "s"),
        )
    ]
    heads_of_judged = [f"{last.size} ranks", "measured", "target", ""]
    return f"{report.table(heads, rows)}\n\n{report.table(heads_of_judged, judged)}"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="Simulated ranks on one driver.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[125, 250, 500, 1000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of reports")
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    found = []
    for size in options.sizes:
        figures = measure(size, options.seconds)
        found.append(figures)
        print(figures, file=sys.stderr, flush=True)
    print(f"\n{report.machine()}; one run of each size\n")
    print(tables(found))
    if options.json:
        report.write_json(options.json, {"sizes": [each._asdict() for each in found]})


if __name__ == "__main__":
    main()
