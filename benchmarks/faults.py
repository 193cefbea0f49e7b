"""What is left of a training when something is killed in the middle of it.

A campaign of trainings, each struck at a random moment, in one of six ways: a rank is killed, all
ranks, an executor of a standalone Spark cluster, the driver itself (which is then started again
with ``resume=True``), rank 0 in the middle of writing a checkpoint, or the disk is full when a
checkpoint is due and a rank is killed after that. Two ranks train a small model with real Horovod,
and their weights after the last step are a pure function of the number of steps.

Of each training is checked: it went on from a checkpoint, and lost no more steps than were done
since the latest checkpoint that lay complete in the folder at that moment; its weights are, bit by
bit, those of an undisturbed training; no process and no temporary file of it is left.

    python benchmarks/faults.py [--runs 20] [--seed 0] [--only writer]

The full disk is a small tmpfs, which takes root to mount. The exit status is 0 if all went well.
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
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil
import report

import horovod_runner

ROOT = Path(__file__).resolve().parents[1]
_SIZE = 2
_STEPS = 300
_STEP_SECONDS = 0.01  # and what the step itself takes
_EVERY = 20  # steps, then a checkpoint
_KEEP = 3
_BALLAST_BYTES = 32 << 20  # so that writing takes long enough to be hit
_SMALL_BALLAST_BYTES = 2 << 20  # on a disk of so many:
_DISK_BYTES = 16 << 20
_LIMIT_SECONDS = 180.0
_MARK = "HOROVOD_RUNNER_FAULTS"  # all processes of this campaign have it in their environment
_NAME = re.compile(r"checkpoint-(\d+)-step-(\d+)-\w+\.(?:pt|json)")
# Two executors with room for one rank each.
_CONF = {
    "spark.executor.cores": "2",
    "spark.task.cpus": "2",
    "spark.executor.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def train(folder: str, ballast_bytes: int) -> str:
    """The ranks' ``main``; returns a digest of the weights."""
    import hashlib

    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 1e-3), named_parameters=model.named_parameters()
    )
    # Changes with each step: a checkpoint that mixes two of them would show.
    ballast = torch.zeros(ballast_bytes // 4)
    loaded, start = horovod_runner.load_checkpoint(), 0
    if loaded is not None:
        start = loaded.step
        model.load_state_dict(loaded.state["model"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        if not bool((loaded.state["ballast"] == start).all()):
            raise AssertionError(f"the checkpoint of step {start} is not of that step")
    with open(f"{folder}/begun", "a") as file:  # one line, so in one piece
        file.write(f"{json.dumps([hvd.rank(), os.getpid(), start])}\n")
    steps = os.open(f"{folder}/steps", os.O_WRONLY | os.O_CREAT)
    for step in range(start + 1, _STEPS + 1):
        generator = torch.Generator().manual_seed(step * hvd.size() + hvd.rank())
        x = torch.randn(32, 16, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        ballast.fill_(step)
        time.sleep(_STEP_SECONDS)
        os.pwrite(steps, step.to_bytes(8, "little"), 8 * hvd.rank())
        horovod_runner.report(loss=loss, step=step)
        if step % _EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            horovod_runner.save_checkpoint({**state, "ballast": ballast}, step)
    os.close(steps)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def drive(folder: str, checkpoints: str, ballast_bytes: int, master: str, resume: bool) -> None:
    """The driver process of one training; leaves its result in the folder."""
    options: dict[str, Any] = {"np": -_SIZE}
    if master:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master)
        for name, value in _CONF.items():
            builder = builder.config(name, value)
        options = {"np": _SIZE, "spark": builder.getOrCreate(), "slot_timeout": 60}
        options["spark"].sparkContext.setLogLevel("OFF")
    runner = horovod_runner.HorovodRunner(
        **options, checkpoint_dir=checkpoints, keep=_KEEP, resume=resume, max_restarts=2
    )
    weights = runner.run(train, folder=folder, ballast_bytes=ballast_bytes)
    assert runner.last_run is not None
    told = [attempt.resumed_from for attempt in runner.last_run.attempts]
    Path(folder, "result").write_text(json.dumps({"weights": weights, "resumed_from": told}))
    if master:
        options["spark"].stop()


class FaultError(Exception):
    """A training did not go as it should."""


class Begun(NamedTuple):
    """A rank that has begun: its worker's process, and the step that it goes on from."""

    rank: int
    pid: int
    start: int


class Strike(NamedTuple):
    """What was struck, and how far the training was: its step, and the complete checkpoint's."""

    what: str
    step: int
    complete: int


class Training:
    """One training, in a driver process of its own; use it as a context.

    Args:
        folder: for what it notes.
        checkpoints: its ``checkpoint_dir``.
        ballast_bytes: the larger part of a checkpoint.
        master: Spark's; empty for ranks on this machine alone.
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

    def start(self, resume: bool = False) -> None:
        """Start the driver, for the first time or again."""
        settings = [self.folder, self.checkpoints, self.ballast_bytes, self._master]
        command = [sys.executable, __file__, "--drive", *map(str, settings), "yes" * resume]
        with (self.folder / "output").open("ab") as file:
            self.driver = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, what: str, happened: Callable[[], Any]) -> None:
        """Wait until something is so while the training goes on."""
        while not happened():
            if self.driver.poll() is not None or time.monotonic() > self._deadline:
                raise FaultError(f"it ended, or the time did, before {what}")
            time.sleep(0.0005)

    def finish(self) -> dict[str, Any]:
        """Wait for the end; returns the result."""
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
        """The ranks that have begun so far, attempt after attempt."""
        lines = (self.folder / "begun").read_text().splitlines()
        return [Begun(*json.loads(line)) for line in lines]

    @property
    def step(self) -> int:
        """How many steps rank 0 has done."""
        with contextlib.suppress(FileNotFoundError):
            return int.from_bytes((self.folder / "steps").read_bytes()[:8], "little")
        return 0

    @property
    def complete(self) -> int:
        """The step of the latest complete checkpoint; 0 if there is none."""
        found = map(_NAME.fullmatch, os.listdir(self.checkpoints))
        markers = [match for match in found if match and match[0].endswith(".json")]
        return max(((int(match[1]), int(match[2])) for match in markers), default=(0, 0))[1]

    @property
    def part_bytes(self) -> int:
        """The size of the checkpoint that is being written; 0 if none is."""
        with contextlib.suppress(FileNotFoundError):
            for path in self.checkpoints.glob(".part-checkpoint-*.pt"):
                return path.stat().st_size
        return 0

    def strike(self, what: str, *processes: int) -> Strike:
        """Kill processes; the first attempt's workers, by rank, are :attr:`workers`."""
        complete = self.complete  # before: what is written now may yet become so
        for process in processes:
            os.kill(process, signal.SIGKILL)
        return Strike(what, self.step, complete)

    @property
    def workers(self) -> list[int]:
        """The process ids of the first attempt's workers, by rank."""
        return [begun.pid for begun in sorted(self.begun[:_SIZE])]


def _strike_rank(training: Training, random: Random) -> Strike:
    rank = random.randrange(_SIZE)
    return training.strike(f"rank {rank}", training.workers[rank])


def _strike_all(training: Training, _: Random) -> Strike:
    return training.strike("all ranks", *training.workers)


def _strike_executor(training: Training, random: Random) -> Strike:
    # Its worker <- guard <- the task's Python <- pyspark.daemon <- the executor.
    parents = psutil.Process(training.workers[random.randrange(_SIZE)]).parents()
    java = next(process for process in parents if process.name() == "java")
    if random.random() < 0.5:
        return training.strike("executor", java.pid)
    return training.strike("executor, its Python", *(each.pid for each in parents[1:3]), java.pid)


def _strike_driver(training: Training, _: Random) -> Strike:
    struck = training.strike("driver", training.driver.pid)
    training.driver.wait()
    training.start(resume=True)
    return struck


def _strike_writer(training: Training, random: Random) -> Strike:
    size = random.uniform(0.05, 0.9) * training.ballast_bytes
    rank = training.workers[0]
    training.wait_for("a checkpoint was begun", lambda: training.part_bytes == 0)
    training.wait_for("a checkpoint was half written", lambda: training.part_bytes > size)
    struck = training.strike("", rank)
    share = training.part_bytes / training.ballast_bytes
    if not 0 < share < 1:
        raise FaultError("the checkpoint was whole before its writer could be killed")
    return struck._replace(what=f"writer, {share:.0%} written")


def _strike_full(training: Training, random: Random) -> Strike:
    """Fill the disk, see that the training goes on with its checkpoint kept, and kill a rank."""
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


def _workers_left() -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command, status = process.info["cmdline"] or [], process.info["status"]
        if "horovod_runner.worker" in command and status != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == os.environ[_MARK]:
                    found.append(process.info["pid"])
    return found


def _files_left(checkpoints: Path) -> list[str]:
    names = os.listdir(checkpoints)
    left = [name for name in names if not _NAME.fullmatch(name)]
    left += [name for name in names if f"{name.rpartition('.')[0]}.json" not in names]
    left += sorted(name for name in names if name.endswith(".json"))[:-_KEEP]
    temporary = os.listdir(tempfile.gettempdir())
    return left + [name for name in temporary if not name.startswith("torchinductor_")]  # torch's


def disturbed(kind: str, random: Random, folder: Path, master: str, weights: str) -> list[str]:
    """Run one training and strike it; returns its row of the table, problems last."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    target = random.randint(3 * _EVERY, _STEPS - 4 * _EVERY)
    pause = random.uniform(0, 2 * _STEP_SECONDS)
    full = kind == "disk"
    ballast_bytes = _SMALL_BALLAST_BYTES if full else _BALLAST_BYTES
    with (
        _small_disk(checkpoints) if full else contextlib.nullcontext(),
        Training(folder, checkpoints, ballast_bytes, master) as training,
    ):
        struck = Strike(kind, target, 0)
        try:
            training.wait_for(f"step {target}", lambda: training.step >= target)
            time.sleep(pause)
            struck = KINDS[kind](training, random)
            result = training.finish()
            starts = [begun.start for begun in training.begun]
            first, second = starts[:_SIZE], set(starts[_SIZE:])
            resumed = starts[-1]
            checks = {
                f"the ranks began at the steps {starts}": (len(starts), len(second)) != (4, 1),
                "it began anew": resumed == 0 or any(first),
                "a complete checkpoint was passed over": resumed < struck.complete,
                f"the driver told {result['resumed_from']}": result["resumed_from"][-1] != resumed,
                "other weights": result["weights"] != weights,
                f"processes left: {(workers := _workers_left())}": workers,
                f"files left: {(files := _files_left(checkpoints))}": files,
            }
            problems = [problem for problem, found in checks.items() if found]
            numbers = [struck.step, struck.complete, resumed, struck.step - resumed]
            equal = "yes" if result["weights"] == weights else "NO"
            row = [struck.what, *map(str, numbers), equal]
        except (FaultError, OSError, psutil.Error, StopIteration) as error:
            problems = [str(error) or traceback.format_exc()]
            row = [struck.what or kind, str(struck.step), str(struck.complete), "-", "-", "-"]
        if problems:
            print(training.output[-5000:], file=sys.stderr)
    return [*row, "; ".join(problems)]


def campaign(kinds: list[str], seed: int, folder: Path, stack: contextlib.ExitStack) -> list[Any]:
    """Run all trainings; returns the table's rows."""
    sys.path.insert(0, str(ROOT))
    from tests.cluster.standalone import Place, StandaloneCluster

    masters, weights = {"": ""}, {}
    if "executor" in kinds:
        (folder / "cluster").mkdir()
        cluster = StandaloneCluster(folder / "cluster", (Place(), Place()))
        masters["executor"] = stack.enter_context(cluster).master
    for kind, master in masters.items():
        own = folder / f"undisturbed-{kind}"
        own.mkdir()
        with Training(own, own, master=master) as training:
            weights[kind] = training.finish()["weights"]
    rows = []
    for number, kind in enumerate(kinds):
        own = folder / f"run-{number}"
        own.mkdir()
        at = kind if kind in masters else ""
        row = disturbed(kind, Random(f"{seed} {number}"), own, masters[at], weights[at])
        print(f"{number + 1}/{len(kinds)}: {', '.join(row)}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Run the campaign and print the table."""
    parser = argparse.ArgumentParser(description="Trainings that are killed, and go on.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="strike all trainings in this way")
    parser.add_argument("--drive", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        folder, checkpoints, ballast_bytes, master, resume = options.drive
        drive(folder, checkpoints, int(ballast_bytes), master, bool(resume))
        return
    kinds = [options.only] if options.only else list(KINDS)
    kinds = [kinds[number % len(kinds)] for number in range(options.runs)]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        own = Path(name)
        (own / "tmp").mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(own / "tmp")
        os.environ["SPARK_LOCAL_DIRS"] = str(own / "spark")
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ[_MARK] = str(os.getpid())
        rows = campaign(kinds, options.seed, own, stack)
    print(f"\n{report.machine()}\n")
    heads = ["killed", "at step", "last complete", "resumed from", "steps lost", "weights equal"]
    print(report.table(heads, [row[:-1] for row in rows]))
    well = sum(not row[-1] for row in rows)
    for number, row in enumerate(rows):
        if row[-1]:
            print(f"run {number + 1} ({row[0]}): {row[-1]}")
    print(f"\n{well}/{len(rows)} resumed")
    sys.exit(well < len(rows))


if __name__ == "__main__":
    main()
