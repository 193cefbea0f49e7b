"""Disturb elastic trainings at random moments, and check that they end as an undisturbed one.

On this machine, with two or three ranks: a rank is killed, all ranks, two ranks shortly one after
the other, rank 0 in the middle of a commit, the driver (which is started again with
``resume=True``); a rank is stopped for 5 s. On a standalone Spark cluster of two hosts (network
namespaces), with two to four ranks: an executor is killed, an executor and then a rank of the
attempt that has grown again, a host; a host is cut off for 5 s and for 30 s, stopped for 20 s; an
executor is decommissioned.

Checked for each training: its weights equal those of an undisturbed training with one rank; each
row was trained on once an epoch; no more steps were repeated than there are between two commits
(two checkpoints, if the driver is killed), and none at a planned change; no process is left.

    python benchmarks/faults_elastic.py [--runs 30] [--seed 0] [--only host]

The namespaces require root. The exit status is 0 without problems.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import faults
import faults_elastic_training as training_file
import psutil
import report
from faults import FaultError
from faults_elastic_training import BATCH, COMMIT_EVERY, ROWS, SAVE_EVERY, STEPS

_TRAINING = Path(training_file.__file__)
_TOLERANCE = 1e-9  # relative to the largest weight; the weights are float64
_LIMIT_SECONDS = 300.0
_END_SECONDS = 30.0  # for processes of a host that was cut off or stopped


class Begun(NamedTuple):
    """A rank that has begun: its attempt, place and process, and the step from which it goes on."""

    attempt: int
    rank: int
    size: int
    pid: int
    start: int
    host: str
    directory: str


class Training(faults.Training):
    """One elastic training, in a separate driver process; a context manager.

    Args:
        folder: for the training's notes.
        rows: the Parquet file.
        cluster: where it runs; None for ranks on this machine.
    """

    def __init__(self, folder: Path, rows: Path, cluster: Cluster | None = None) -> None:
        self._rows, self.cluster = rows, cluster
        self._at, self._reached = 0, 0
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        for name in ("begun", "rows"):
            (folder / name).touch()
        super().__init__(folder, checkpoints)

    def start(self, resume: bool = False) -> None:
        """Start the driver, also after it was killed."""
        self._deadline = time.monotonic() + _LIMIT_SECONDS
        prefix, master, address = self.cluster.driver if self.cluster else ((), "", "")
        settings = [self.folder, self._rows, master, address, int(resume)]
        command = [*prefix, sys.executable, str(_TRAINING), *map(str, settings)]
        with (self.folder / "output").open("ab") as file:
            self.driver = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def ranks(self) -> list[Begun]:
        """The ranks that have begun so far."""
        lines = (self.folder / "begun").read_text().splitlines()
        return [Begun(*json.loads(line)) for line in lines]

    @property
    def current(self) -> list[Begun]:
        """The ranks of the latest attempt, once all of them have begun."""
        ranks = self.ranks
        while ranks:
            latest = [each for each in ranks if each.attempt == ranks[-1].attempt]
            if len(latest) == latest[-1].size:
                return sorted(latest, key=lambda each: each.rank)
            ranks = [each for each in ranks if each not in latest]
        return []

    @property
    def step(self) -> int:
        """The step that a rank has begun last."""
        with (self.folder / "rows").open("rb") as file:
            file.seek(self._at)
            *lines, rest = file.read().split(b"\n")
            self._at = file.tell() - len(rest)
        if lines:
            self._reached = json.loads(lines[-1])[2]
        return self._reached


class Cluster:
    """A standalone cluster of two hosts with a driver on a third one."""

    def __init__(self, network: Any, folder: Path) -> None:
        from tests.cluster.standalone import Place, StandaloneCluster
        from tests.hosts.network import ADDRESSES

        self.network = network
        workers = [Place(ADDRESSES[host.name], host.enter) for host in network.workers]
        master = Place(ADDRESSES["master"], network.master.enter)
        self._cluster = StandaloneCluster(folder, workers, master)
        self._address = ADDRESSES["driver"]

    @property
    def driver(self) -> tuple[tuple[str, ...], str, str]:
        """The driver's host as a prefix of its command, Spark's master, the driver's address."""
        return self.network.driver.enter, self._cluster.master, self._address

    def host(self, name: str) -> Any:
        """The host of a name."""
        return next(host for host in self.network.workers if host.name == name)

    def __enter__(self) -> Cluster:
        self._cluster.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()
        for host in self.network.workers:
            self.network.plug(host)
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()


def _kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _rank(training: Training, random: Random) -> str:
    struck = random.choice(training.current)
    _kill(struck.pid)
    return f"rank {struck.rank}"


def _all(training: Training, _: Random) -> str:
    _kill(*(each.pid for each in training.current))
    return "all ranks"


def _twice(training: Training, random: Random) -> str:
    first = training.current[-1]
    _kill(first.pid)
    training.wait_for("it went on", lambda: training.current[0].attempt > first.attempt)
    time.sleep(random.uniform(0, 0.3))
    _kill(training.current[0].pid)
    return f"rank {first.rank}, then rank 0"


def _commit(training: Training, random: Random) -> str:
    struck = training.current[0]
    step = training.step
    # The rows of the next step are noted only after the commit.
    due = step + COMMIT_EVERY - step % COMMIT_EVERY
    training.wait_for("a commit was due", lambda: training.step >= due)
    time.sleep(training_file.STEP_SECONDS + random.uniform(0, 0.03))
    _kill(struck.pid)
    return "rank 0 in a commit"


def _driver(training: Training, _: Random) -> str:
    training.wait_for("there was a checkpoint", lambda: training.complete)
    _kill(training.driver.pid)
    training.driver.wait()
    training.start(resume=True)
    return "driver"


def _stopped(training: Training, random: Random) -> str:
    struck = random.choice(training.current)
    os.kill(struck.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(struck.pid, signal.SIGCONT)
    return f"rank {struck.rank} stopped for 5 s"


def _java(rank: Begun) -> psutil.Process:
    """The executor of a rank: both have the same working directory."""
    for process in psutil.process_iter(["name", "cwd"]):
        if (process.info["name"], process.info["cwd"]) == ("java", rank.directory):
            return process
    raise FaultError(f"no executor in {rank.directory}")


def _executor(training: Training, random: Random) -> str:
    struck = random.choice(training.current)
    _java(struck).kill()
    return f"executor on {struck.host}"


def _growth(training: Training, random: Random) -> str:
    struck = random.choice(training.current)
    _java(struck).kill()
    training.wait_for(
        "it shrank and grew",
        lambda: (
            training.current[0].size == 4
            and any(each.size < 4 and each.attempt > struck.attempt for each in training.ranks)
        ),
    )
    time.sleep(random.uniform(0, 0.5))
    _kill(random.choice(training.current).pid)
    return f"executor on {struck.host}, then a rank after growth"


def _host(training: Training, random: Random) -> str:
    assert training.cluster is not None
    host = training.cluster.host(random.choice(training.current).host)
    training.cluster.network.unplug(host)
    _kill(*(process.pid for process in host.processes()))
    return f"host {host.name}"


def _cut(seconds: float) -> Callable[[Training, Random], str]:
    def strike(training: Training, random: Random) -> str:
        assert training.cluster is not None
        host = training.cluster.host(random.choice(training.current).host)
        training.cluster.network.unplug(host)
        time.sleep(seconds)
        training.cluster.network.plug(host)
        return f"{host.name} cut off for {seconds:g} s"

    return strike


def _host_stopped(training: Training, random: Random) -> str:
    assert training.cluster is not None
    host = training.cluster.host(random.choice(training.current).host)
    stopped = host.processes()
    for process in stopped:
        process.suspend()
    time.sleep(20)
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.resume()
    return f"{host.name} stopped for 20 s"


def _decommissioned(training: Training, random: Random) -> str:
    struck = random.choice(training.current)
    _java(struck).send_signal(signal.SIGPWR)
    return f"executor on {struck.host} decommissioned"


Strike = Callable[[Training, Random], str]
LOCAL: dict[str, Strike] = {
    "rank": _rank,
    "all": _all,
    "twice": _twice,
    "commit": _commit,
    "driver": _driver,
    "stopped": _stopped,
}
ON_SPARK: dict[str, Strike] = {
    "executor": _executor,
    "growth": _growth,
    "host": _host,
    "cut-5": _cut(5),
    "cut-30": _cut(30),
    "host-stopped": _host_stopped,
    "decommissioned": _decommissioned,
}
KINDS = LOCAL | ON_SPARK


class Course(NamedTuple):
    """What a training's notes say.

    Attributes:
        starts: by attempt, the step from which it went on.
        reached: by attempt, the last step that rank 0 has begun.
        rows: by epoch, how often each row was trained on. Of the attempts at a step the last one
            counts.
    """

    starts: dict[int, int]
    reached: dict[int, int]
    rows: dict[int, Counter[int]]

    def repeated(self, attempt: int) -> int:
        """How many finished steps of the attempt before this one were done again."""
        earlier = max(each for each in self.starts if each < attempt)
        # All ranks have finished a step when rank 0 begins the next one.
        return self.reached.get(earlier, 0) - 1 - self.starts[attempt]


def course(folder: Path) -> Course:
    """Read the notes of a training."""
    begun = [Begun(*json.loads(line)) for line in (folder / "begun").read_text().splitlines()]
    starts = {each.attempt: each.start for each in begun if each.rank == 0}
    reached: dict[int, int] = {}
    of_steps: dict[int, tuple[int, int, list[int]]] = {}  # attempt, epoch, rows
    for line in (folder / "rows").read_text().splitlines():
        attempt, rank, step, epoch, rows = json.loads(line)
        if rank == 0:
            reached[attempt] = max(step, reached.get(attempt, 0))
        known = of_steps.get(step)
        if known is None or known[0] < attempt:
            of_steps[step] = (attempt, epoch, rows)
        elif known[0] == attempt:
            known[2].extend(rows)
    seen: dict[int, Counter[int]] = {}
    for _, epoch, rows in of_steps.values():
        seen.setdefault(epoch, Counter()).update(rows)
    return Course(starts, reached, seen)


def _problems(training: Training, kind: str, complete: int, result: dict[str, Any]) -> list[str]:
    found, attempts = course(training.folder), result["attempts"]
    problems = []
    steps_of_epoch = -(-ROWS // BATCH)
    for epoch, rows in found.rows.items():
        least = min(ROWS, (STEPS - epoch * steps_of_epoch) * BATCH)
        if len(rows) != least or set(rows.values()) != {1}:
            problems.append(f"epoch {epoch} had {len(rows)} rows of {least}, {rows.most_common(1)}")
    if sum(map(len, found.rows.values())) != _rows_of_all_steps():
        problems.append("some steps are missing")
    for attempt in sorted(found.starts)[1:]:
        repeated, first = found.repeated(attempt), attempt == 101
        if repeated > (2 * SAVE_EVERY if first else COMMIT_EVERY):
            problems.append(f"attempt {attempt} repeated {repeated} steps")
        if first and found.starts[attempt] < complete:
            problems.append(f"the checkpoint of step {complete} was passed over")
    # After a planned change the step that rank 0 had begun last was the last one.
    changes = [number for number, each in enumerate(attempts, 1) if each[2]]
    for number in changes:
        if number + 1 in found.starts and found.repeated(number + 1) != -1:
            problems.append(f"{found.repeated(number + 1) + 1} steps were lost at a planned change")
    restarts = len(found.starts) - 1
    if kind == "stopped" and restarts:
        problems.append("a rank that was stopped for a moment ended the attempt")
    if kind not in ("stopped", "cut-5", "cut-30") and not restarts:
        problems.append("nothing was restarted")
    if kind == "decommissioned" and not changes:
        problems.append("the decommission was no planned change")
    return problems


def _rows_of_all_steps() -> int:
    steps_of_epoch = -(-ROWS // BATCH)
    epochs, steps = divmod(STEPS, steps_of_epoch)
    return epochs * ROWS + min(ROWS, steps * BATCH)


def _await_end_of_workers() -> str:
    deadline = time.monotonic() + _END_SECONDS
    while left := faults.workers_left():
        if time.monotonic() > deadline:
            return f"processes left: {left}"
        time.sleep(0.1)
    return ""


def _difference(weights: list[float], expected: list[float]) -> float:
    pairs = zip(weights, expected, strict=True)
    return max(abs(one - other) for one, other in pairs) / max(map(abs, expected))


def disturbed(
    kind: str, random: Random, training: Training, expected: list[float]
) -> tuple[list[str], list[str]]:
    """Disturb one training; returns its row of the table, and its problems."""
    target, complete = random.randint(3 * COMMIT_EVERY, STEPS // 2), 0
    pause = random.uniform(0, 2 * training_file.STEP_SECONDS)
    row, problems = [kind, str(target), "-", "-", "-", "-"], []
    with training:
        try:
            training.wait_for(f"step {target}", lambda: training.step >= target)
            time.sleep(pause)
            row[0] = KINDS[kind](training, random)
            complete = training.complete if kind == "driver" else 0
            result = training.finish()
            problems += _problems(training, kind, complete, result)
            found = course(training.folder)
            later = sorted(found.starts)[1:]
            difference = _difference(result["weights"], expected)
            if difference > _TOLERANCE:
                problems.append("other weights")
            sizes = [
                len({each.rank for each in training.ranks if each.attempt == attempt})
                for attempt in sorted(found.starts)
            ]
            pauses = [each[3] for each in result["attempts"] if each[3] is not None]
            row[2] = " ".join(map(str, sizes))
            row[3] = " ".join(str(max(0, found.repeated(attempt))) for attempt in later) or "-"
            row[4] = " ".join(f"{seconds:.1f}" for seconds in pauses) or "-"
            row[5] = f"{difference:.0e}"
        except (FaultError, OSError, psutil.Error) as error:
            problems.append(f"{type(error).__name__}: {error}")
        if left := _await_end_of_workers():
            problems.append(left)
        if problems:
            print(training.output[-6000:], file=sys.stderr)
    return row, problems


def _write_rows(path: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    columns = {**dict(zip("abcd", x.T, strict=True)), "row": np.arange(ROWS)}
    pq.write_table(pa.table(columns), path, row_group_size=100)


def _undisturbed(folder: Path, rows: Path) -> list[float]:
    """The weights of a training with one rank."""
    from horovod_runner import HorovodRunner
    from horovod_runner.data import parquet

    folder.mkdir()
    weights: list[float] = HorovodRunner(np=-1, progress=False).run(
        training_file.train, data=parquet(str(rows)), folder=str(folder)
    )
    return weights


@contextlib.contextmanager
def _network(folder: Path, needed: bool) -> Iterator[Any]:
    if not needed:
        yield None
        return
    from tests.hosts.network import Network, missing

    if reason := missing():
        raise SystemExit(f"no hosts: {reason}")
    folder.mkdir()
    with Network(folder) as network:
        yield network


def campaign(kinds: list[str], seed: int, folder: Path) -> list[tuple[list[str], list[str]]]:
    """Run all trainings; returns the table's rows, each with its problems."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    rows = folder / "rows.parquet"
    _write_rows(rows)
    expected = _undisturbed(folder / "undisturbed", rows)
    done = []
    with _network(folder / "network", any(kind in ON_SPARK for kind in kinds)) as network:
        for number, kind in enumerate(kinds, 1):
            own, random = folder / f"run-{number}", Random(f"{seed} {number}")
            own.mkdir()
            with contextlib.ExitStack() as stack:
                cluster = None
                if kind in ON_SPARK:
                    cluster = stack.enter_context(Cluster(network, own))
                row, problems = disturbed(kind, random, Training(own, rows, cluster), expected)
            told = f"{number}/{len(kinds)}: {', '.join(row)}"
            print("; ".join([told, *problems]), file=sys.stderr, flush=True)
            done.append((row, problems))
    return done


def main() -> None:
    """Run the trainings and print the table."""
    parser = argparse.ArgumentParser(description="Elastic trainings that are disturbed.")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    parser.add_argument("--only", choices=KINDS, nargs="+", help="disturb in these ways alone")
    options = parser.parse_args()
    kinds = options.only or list(KINDS)
    kinds = [kinds[number % len(kinds)] for number in range(options.runs)]
    with tempfile.TemporaryDirectory() as name:
        own = Path(name)
        (own / "tmp").mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(own / "tmp")
        os.environ["SPARK_LOCAL_DIRS"] = str(own / "spark")
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ[faults.MARK] = str(os.getpid())
        done = campaign(kinds, options.seed, own)
    print(f"\n{report.machine()}\n")
    heads = ["disturbed", "at step", "ranks", "steps repeated", "pauses in s", "weights differ by"]
    print(report.table(heads, [row for row, _ in done]))
    for number, (row, problems) in enumerate(done, 1):
        if problems:
            print(f"run {number} ({row[0]}): {'; '.join(problems)}")
    well = sum(not problems for _, problems in done)
    print(f"\n{well}/{len(done)} ended as the undisturbed training")
    report.at_least("disturbed elastic trainings with the same weights / all", well / len(done), 1)
    if options.json:
        raw = [dict(zip(heads, row, strict=True)) for row, _ in done]
        report.write_json(options.json, {"runs": raw})


if __name__ == "__main__":
    main()
