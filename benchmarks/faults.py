"""Kill trainings at random moments, and check that they resume correctly.

Each training is struck in one of six ways: a rank is killed, all ranks, an executor of a standalone
Spark cluster, the driver (which is then started again), rank 0 while it writes a checkpoint, or the
disk is full at a checkpoint and a rank is killed after that. Two ranks train a small model with
Horovod. Their weights after the last step depend only on the number of steps.

Checked for each training: it resumed from a checkpoint; it lost no more than the steps since the
latest complete checkpoint in the folder at that moment; its weights are bitwise equal to those of
an undisturbed training; it left no process and no temporary file.

    python benchmarks/faults.py [--runs 20] [--seed 0] [--only writer]

The full disk is a small tmpfs; mounting it requires root. The exit status is 0 without problems.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil
import report
from faults_training import EVERY, KEEP, SIZE, STEP_SECONDS, STEPS

_TRAINING = Path(__file__).with_name("faults_training.py")
_BALLAST_BYTES = 32 << 20  # so that writing takes long enough to be hit
_SMALL_BALLAST_BYTES = 2 << 20  # the size of the disk
_DISK_BYTES = 16 << 20
_LIMIT_SECONDS = 300.0
MARK = "HOROVOD_RUNNER_FAULTS"  # marks all processes of this benchmark in their environment
_NAME = re.compile(r"checkpoint-(\d+)-step-(\d+)-\w+\.(?:pt|json)")


class FaultError(Exception):
    """A training did not do what was expected."""


class Begun(NamedTuple):
    """A rank that has begun: its process, and the step from which it resumes."""

    rank: int
    pid: int
    start: int


class Strike(NamedTuple):
    """What was killed, and how far the training was: its step, and the complete checkpoint's."""

    what: str
    step: int
    complete: int


class Training:
    """One training, in a separate driver process; a context manager.

    Args:
        folder: for the training's notes.
        checkpoints: its ``checkpoint_dir``.
        ballast_bytes: size of the larger part of a checkpoint.
        master: Spark's master; empty for ranks on this machine.
    """

    def __init__(
        self, folder: Path, checkpoints: Path, ballast_bytes: int = _BALLAST_BYTES, master: str = ""
    ) -> None:
        self.folder, self.checkpoints, self.ballast_bytes = folder, checkpoints, ballast_bytes
        self._master = master
        self._deadline = time.monotonic() + _LIMIT_SECONDS
        self.start()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.driver.pid, signal.SIGKILL)
        self.driver.wait()

    def start(self, again: bool = False) -> None:
        """Start the driver, also after it was killed."""
        self.has_lost_driver = again
        settings = [self.folder, self.checkpoints, self.ballast_bytes, self._master]
        command = [sys.executable, str(_TRAINING), *map(str, settings)]
        with (self.folder / "output").open("ab") as file:
            self.driver = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, what: str, happened: Callable[[], Any]) -> None:
        """Wait until a condition holds while the training continues."""
        while not happened():
            if self.driver.poll() is not None or time.monotonic() > self._deadline:
                raise FaultError(f"it ended, or the time did, before {what}")
            time.sleep(0.0005)

    def finish(self) -> dict[str, Any]:
        """Wait for the end; returns the training's result."""
        try:
            status = self.driver.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise FaultError(f"it did not end in {_LIMIT_SECONDS:.0f} s") from None
        if status:
            raise FaultError(f"the driver ended with exit status {status}")
        return json.loads((self.folder / "result").read_text())  # type: ignore[no-any-return]

    @property
    def output(self) -> str:
        """What the driver has printed."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def begun(self) -> list[Begun]:
        """The ranks that have begun so far, in the order of the attempts."""
        lines = (self.folder / "begun").read_text().splitlines()
        return [Begun(*json.loads(line)) for line in lines]

    @property
    def step(self) -> int:
        """Number of steps that rank 0 has done."""
        path = self.folder / "steps"
        return int.from_bytes(path.read_bytes()[:8], "little") if path.exists() else 0

    @property
    def complete(self) -> int:
        """The step of the latest complete checkpoint; 0 if there is none."""
        found = map(_NAME.fullmatch, os.listdir(self.checkpoints))
        markers = [match for match in found if match and match[0].endswith(".json")]
        return max(((int(match[1]), int(match[2])) for match in markers), default=(0, 0))[1]

    @property
    def part_bytes(self) -> int:
        """Size in bytes of the checkpoint that is being written; 0 if none is."""
        with contextlib.suppress(FileNotFoundError):
            for path in self.checkpoints.glob(".part-checkpoint-*.pt"):
                return path.stat().st_size
        return 0

    def strike(self, what: str, *processes: int) -> Strike:
        """Kill processes."""
        complete = self.complete  # read first: another checkpoint may become complete meanwhile
        for process in processes:
            os.kill(process, signal.SIGKILL)
        return Strike(what, self.step, complete)

    @property
    def workers(self) -> list[int]:
        """The processes of the first attempt, by rank."""
        return [begun.pid for begun in sorted(self.begun[:SIZE])]


def _strike_rank(training: Training, random: Random) -> Strike:
    rank = random.randrange(SIZE)
    return training.strike(f"rank {rank}", training.workers[rank])


def _strike_all(training: Training, _: Random) -> Strike:
    return training.strike("all ranks", *training.workers)


def _strike_executor(training: Training, random: Random) -> Strike:
    # The parents of the worker: guard <- the task's Python <- pyspark.daemon <- the executor.
    parents = psutil.Process(training.workers[random.randrange(SIZE)]).parents()
    java = [each.name() for each in parents].index("java")
    if random.random() < 0.5:
        return training.strike("executor", parents[java].pid)
    return training.strike("executor's Python", *(each.pid for each in parents[1:java]))


def _strike_driver(training: Training, _: Random) -> Strike:
    struck = training.strike("driver", training.driver.pid)
    training.driver.wait()
    training.start(again=True)
    return struck


def _strike_writer(training: Training, random: Random) -> Strike:
    size, rank = training.ballast_bytes, training.workers[0]
    least = random.uniform(0.05, 0.7) * size
    training.wait_for("the former checkpoint was written", lambda: training.part_bytes == 0)
    training.wait_for("one was half written", lambda: least < training.part_bytes < 0.9 * size)
    struck = training.strike("", rank)
    return struck._replace(what=f"writer, {training.part_bytes / size:.0%} written")


def _strike_full(training: Training, random: Random) -> Strike:
    # The training continues and keeps its checkpoint; then a rank is killed.
    filler = training.checkpoints / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    kept = training.complete
    training.wait_for("it was told", lambda: "could not be written" in training.output)
    going_on = training.step + 10
    training.wait_for("it had gone on", lambda: training.step >= going_on)
    if training.complete < kept:
        raise FaultError("a full disk took a complete checkpoint away")
    struck = _strike_rank(training, random)
    filler.unlink()
    return struck._replace(what=f"disk full, then {struck.what}")


KINDS: dict[str, Callable[[Training, Random], Strike]] = {
    "rank": _strike_rank,
    "all": _strike_all,
    "executor": _strike_executor,
    "driver": _strike_driver,
    "writer": _strike_writer,
    "disk": _strike_full,
}


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def workers_left() -> list[int]:
    """The ranks of this benchmark that have not ended, by their process ids."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command, status = process.info["cmdline"] or [], process.info["status"]
        if "horovod_runner.worker.main" in command and status != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == os.environ[MARK]:
                    found.append(process.info["pid"])
    return found


def _files_left(training: Training) -> list[str]:
    names = set(os.listdir(training.checkpoints)) - {".resumed-by"}  # whose the folder is
    if training.has_lost_driver:  # a killed driver's probe stays for a day: its ranks may still run
        names -= set([name for name in names if name.startswith(".seen-")][:1])
    markers = [name for name in names if _NAME.fullmatch(name) and name.endswith(".json")]
    for marker in sorted(markers)[-KEEP:]:
        names -= {marker, marker.replace(".json", ".pt")}
    temporary = os.listdir(tempfile.gettempdir())
    others = [name for name in temporary if not name.startswith("torchinductor_")]  # torch's own
    return sorted(names) + others


def _problems(training: Training, struck: Strike, result: dict[str, Any]) -> list[str]:
    starts, told = [begun.start for begun in training.begun], result["resumed_from"][-1]
    resumed, last = starts[-1], training.complete
    workers, files = workers_left(), _files_left(training)
    checks = {
        f"the ranks began at the steps {starts}": starts != [0] * SIZE + [resumed] * SIZE,
        "it began anew": resumed == 0,
        "a complete checkpoint was passed over": resumed < struck.complete,
        f"the driver told of step {told}": told != resumed,
        f"the last checkpoint is of step {last}": last != STEPS,
        f"processes left: {workers}": workers,
        f"files left: {files}": files,
    }
    return [problem for problem, found in checks.items() if found]


def disturbed(kind: str, random: Random, folder: Path, master: str, weights: str) -> list[str]:
    """Run one training and strike it; returns its row of the table, with its problems last."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    target = random.randint(3 * EVERY, STEPS - 4 * EVERY)
    pause = random.uniform(0, 2 * STEP_SECONDS)
    full = kind == "disk"
    disk = _small_disk(checkpoints) if full else contextlib.nullcontext()
    ballast_bytes = _SMALL_BALLAST_BYTES if full else _BALLAST_BYTES
    struck, after = Strike(kind, target, 0), ["-", "-", "-"]
    with disk, Training(folder, checkpoints, ballast_bytes, master) as training:
        try:
            training.wait_for(f"step {target}", lambda: training.step >= target)
            time.sleep(pause)
            struck = KINDS[kind](training, random)
            result = training.finish()
            resumed = training.begun[-1].start
            equal = result["weights"] == weights
            after = [str(resumed), str(struck.step - resumed), "yes" if equal else "NO"]
            problems = [*_problems(training, struck, result), *["other weights"] * (not equal)]
        except (FaultError, OSError, psutil.Error) as error:
            problems = [f"{type(error).__name__}: {error}"]
        if problems:
            print(training.output[-5000:], file=sys.stderr)
    return [struck.what, str(struck.step), str(struck.complete), *after, "; ".join(problems)]


def campaign(kinds: list[str], seed: int, folder: Path) -> list[list[str]]:
    """Run all trainings; returns the table's rows."""
    (folder / "undisturbed" / "checkpoints").mkdir(parents=True)
    with Training(folder / "undisturbed", folder / "undisturbed" / "checkpoints") as training:
        weights = training.finish()["weights"]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.cluster.standalone import Place, StandaloneCluster

    rows, master = [], ""
    with contextlib.ExitStack() as stack:
        for number, kind in enumerate(kinds, 1):
            if kind == "executor" and not master:
                master = stack.enter_context(StandaloneCluster(folder, (Place(), Place()))).master
            own, random = folder / f"run-{number}", Random(f"{seed} {number}")
            row = disturbed(kind, random, own, master if kind == "executor" else "", weights)
            print(f"{number}/{len(kinds)}: {', '.join(row)}", file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Run the trainings and print the table."""
    parser = argparse.ArgumentParser(description="Trainings that are killed, and go on.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    parser.add_argument("--only", choices=KINDS, help="strike all trainings in this way")
    options = parser.parse_args()
    kinds = [options.only] if options.only else list(KINDS)
    kinds = [kinds[number % len(kinds)] for number in range(options.runs)]
    with tempfile.TemporaryDirectory() as name:
        own = Path(name)
        (own / "tmp").mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(own / "tmp")
        os.environ["SPARK_LOCAL_DIRS"] = str(own / "spark")
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ[MARK] = str(os.getpid())
        rows = campaign(kinds, options.seed, own)
    print(f"\n{report.machine()}\n")
    heads = ["killed", "at step", "last complete", "resumed from", "steps lost", "weights equal"]
    print(report.table(heads, [row[:-1] for row in rows]))
    for number, row in enumerate(rows, 1):
        if row[-1]:
            print(f"run {number} ({row[0]}): {row[-1]}")
    well = sum(not row[-1] for row in rows)
    print(f"\n{well}/{len(rows)} resumed")
    report.at_least("killed trainings that went on / all", well / len(rows), 1)
    if options.json:
        report.write_json(
            options.json, {"runs": [dict(zip(heads, row[:-1], strict=True)) for row in rows]}
        )


if __name__ == "__main__":
    main()
