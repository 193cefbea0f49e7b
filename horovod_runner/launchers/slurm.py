"""The Slurm launcher: ``srun`` starts a task for each rank, in the allocation that there is.

    srun --stdin--> task (this module's main) --> run_rank --> worker
         <--stdout-- the rank's outcome, in lines

The job and the channel's keys go through srun's standard input, which every task reads: nothing of
them is in an argument, a variable or a file.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from horovod_runner import handover, host
from horovod_runner.channel import ChannelAddress
from horovod_runner.errors import DataError, LaunchError, SlotError
from horovod_runner.handover import RUN_VARIABLE
from horovod_runner.job import Job, Outcome
from horovod_runner.launchers import TaskLostError
from horovod_runner.process import inherited_environment
from horovod_runner.rank import Surroundings, run_rank

_MARK = "horovod_runner"
_LINE_BYTES = 1 << 12  # of an outcome; srun keeps lines whole
_FIRST_TASK_SECONDS = 120.0  # for nodes that have to load Python from a slow file system
_KEPT_LINES = 20


class SlurmLauncher:
    """Starts ranks in the Slurm allocation that this process is in.

    Args:
        slot_timeout: as given to HorovodRunner.

    Raises:
        LaunchError: this process is in none.
    """

    def __init__(self, slot_timeout: float | None = None) -> None:
        self._job_id = os.environ.get("SLURM_JOB_ID")
        if self._job_id is None:
            raise LaunchError(
                "launcher='slurm' starts the ranks by srun in an allocation, and this process is "
                "in none (SLURM_JOB_ID is not set): get one with salloc, or submit with sbatch."
            )
        self.where = f"slurm job {self._job_id}"
        self._seconds = max(_FIRST_TASK_SECONDS, slot_timeout or 0.0)
        nodes = _nodes()
        here = socket.gethostname()
        others = [node for node in nodes if node.split(".")[0] != here.split(".")[0]]
        self.shares_files = not others
        self.channel_host = _address_towards(others[0]) if others else "127.0.0.1"
        self.frames: Mapping[str, Any] = {}

    def slots(self, size: int, patience: float = 0.0) -> int:
        """As many as the allocation has tasks.

        Raises:
            SlotError: more are asked for.
        """
        tasks = os.environ.get("SLURM_NTASKS")
        there = int(tasks or os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        if size > there:
            asked = "--ntasks" if tasks else "no --ntasks, which makes it one for each node,"
            raise SlotError(
                f"np={size} asks for {size} slots, and allocation {self._job_id} has {there} "
                f"task(s) ({asked} in salloc or sbatch). Ask for --ntasks={size} there, or lower "
                "np."
            )
        return size or there

    def launch(self, job: Job, address: ChannelAddress, wake: Callable[[], None]) -> SlurmLaunch:
        """Start one srun for all ranks.

        Raises:
            DataError: rows of a DataFrame should come with the launch.
            LaunchError: srun cannot be started.
        """
        if self.frames:
            raise DataError(
                f"{', '.join(self.frames)}: Slurm's tasks get no rows from Spark. Name a folder "
                "that all nodes share (data_dir), or write the DataFrame to Parquet there."
            )
        return SlurmLaunch(job, address, wake, self._seconds)


def _nodes() -> list[str]:
    """The names of the allocation's nodes."""
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    if re.fullmatch(r"[\w.-]*", listed):
        return [listed] if listed else []
    try:
        said = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"`scontrol show hostnames {listed}` fails: {error}") from error
    return said.stdout.split()


def _address_towards(node: str) -> str:
    chosen = os.environ.get("HOROVOD_GLOO_IFACE")
    for name, address, _ in host.interfaces():
        if name == chosen:
            return address
    try:
        return host.address_towards(node)
    except OSError as error:
        raise LaunchError(
            f"this host knows no way to the node {node}: {error}. Set HOROVOD_GLOO_IFACE to the "
            "network interface by which nodes reach each other."
        ) from error


def command(size: int) -> list[str]:
    """The srun of a launch."""
    found = [
        "srun",
        f"--ntasks={size}",
        "--kill-on-bad-exit=0",
        "--cpu-bind=none",
        "--quit-on-interrupt",
    ]
    # Since 22.05 steps do not take this over from the allocation, and would have a CPU a task.
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
        found.append(f"--cpus-per-task={cpus}")
    if os.environ.get("SLURM_JOB_GPUS"):
        found.append("--gpu-bind=none")  # a rank sees all of its host's: see gpu.py
    if "SLURM_STEP_ID" in os.environ:
        found.append("--overlap")  # an interactive shell is a step too, and would be waited for
    return [*found, *handover.command("horovod_runner.launchers.slurm")]


class SlurmLaunch:
    """One srun under way."""

    running = False

    def __init__(
        self, job: Job, address: ChannelAddress, wake: Callable[[], None], seconds: float
    ) -> None:
        self._size = job.size
        self._wake = wake
        self._outcomes: dict[int, Outcome] = {}
        self._said: list[str] = []
        self._done = threading.Event()
        self._seconds = seconds
        self.expected: float | None = time.monotonic() + seconds
        try:
            self._process = subprocess.Popen(
                command(job.size),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, RUN_VARIABLE: job.run_id},
                start_new_session=True,  # Ctrl-C is the driver's to hear
            )
        except OSError as error:
            raise LaunchError(f"srun cannot be started: {error}") from error
        parcel = pickle.dumps((job, address, os.getcwd()))
        self._feeder = self._start(lambda: self._feed(parcel))
        self._listener = self._start(self._listen)
        self._reader = self._start(self._read)

    @staticmethod
    def _start(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="horovod_runner-srun", daemon=True)
        thread.start()
        return thread

    def _feed(self, parcel: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(parcel)

    def _listen(self) -> None:
        """Keep srun's last words."""
        assert self._process.stderr is not None  # noqa: S101
        with self._process.stderr as pipe:
            for line in pipe:
                self._said = [*self._said, line.decode(errors="replace").strip()][-_KEPT_LINES:]

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        pieces: dict[int, list[bytes]] = {}
        with self._process.stdout as pipe:
            for line in pipe:
                match line.split():
                    case [mark, task, b"."] if mark == _MARK.encode():
                        data = base64.b64decode(b"".join(pieces.pop(int(task), [])))
                        self._outcomes[int(task)] = msgspec.msgpack.decode(data, type=Outcome)
                    case [mark, task, piece] if mark == _MARK.encode():
                        pieces.setdefault(int(task), []).append(piece)
        for thread in (self._feeder, self._listener):
            thread.join()
        self._process.wait()
        self._done.set()
        self._wake()

    @property
    def late(self) -> SlotError:
        """What to say when no task has started in time."""
        said = "; ".join(self._said) or "srun says nothing"
        return SlotError(
            f"np={self._size}: Slurm has started no task within {self._seconds:.0f} s ({said}). "
            "Does another step take the allocation's CPUs or GPUs? slot_timeout waits longer."
        )

    @property
    def finished(self) -> bool:
        """Whether srun has ended."""
        return self._done.is_set()

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended.

        Raises:
            TaskLostError: a task ended without an outcome.
            LaunchError: none has one.
        """
        self._reader.join()
        said = "; ".join(self._said) or f"srun ended with exit code {self._process.returncode}"
        missing = sorted(set(range(self._size)) - set(self._outcomes))
        if missing and not self._outcomes:
            raise LaunchError(f"Slurm ended the step, or never started it: {said}")
        if missing:
            raise TaskLostError(missing[0], f"Slurm says: {said}.")
        return list(self._outcomes.values())

    def cancel(self) -> None:
        """Have srun end the step."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)


def main() -> int:
    """One task: run the rank that it is."""
    task = int(os.environ["SLURM_PROCID"])
    job, address, directory = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - srun's own
    with suppress(OSError):  # of a login node, say
        os.chdir(directory)
    here = Surroundings(
        task,
        path=list(job.path),
        user_environment={**inherited_environment(), **job.environment},
    )
    data = base64.b64encode(msgspec.msgpack.encode(run_rank(job, address, here)))
    out = sys.stdout
    for start in range(0, len(data), _LINE_BYTES):
        out.write(f"{_MARK} {task} {data[start : start + _LINE_BYTES].decode()}\n")
    out.write(f"{_MARK} {task} .\n")
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
