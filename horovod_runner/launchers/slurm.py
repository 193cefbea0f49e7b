"""The Slurm launcher: ``srun`` starts one task per rank, in the current allocation.

    srun --stdin--> task (this module's main) --> run_rank --> worker
         <--stdout-- the rank's outcome, in lines

The job and the channel's keys go through srun's standard input, which every task reads. They are in
no argument, variable or file.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import msgspec

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.threads import start_thread
from horovod_runner.driver.launcher import (
    Launch,
    LaunchRequest,
    PoolKeeper,
    PoolRequest,
    TaskLostError,
)
from horovod_runner.errors import DataError, LaunchError, SlotError
from horovod_runner.host import network
from horovod_runner.launchers import srun
from horovod_runner.launchers.member import serve
from horovod_runner.task.task import TaskSetup, run_rank
from horovod_runner.wire import messages
from horovod_runner.wire.job import Outcome, decode_outcome
from horovod_runner.worker.startup.rank_environment import inherited_environment

_MARK = "horovod_runner"
# srun passes on what tasks print in pieces of whole lines, at most 1,024 bytes each
# (SLURM_IO_MAX_MSG_LEN), and cuts longer lines, and what a task printed last, every 1,024 bytes.
# Lines of a length that divides 1,024 stay whole, however the pieces of several tasks alternate.
_LINE_BYTES = 256
_PIECE_BYTES = 220  # of an outcome in base64; the rest is for the mark, the task and the line's end
_KEPT_LINES = 20


class SlurmLauncher(PoolKeeper):
    """Starts ranks in the Slurm allocation of this process.

    Args:
        slot_timeout: seconds to wait for the first task, where that is longer than the limit.

    Raises:
        LaunchError: this process is in no allocation.
    """

    def __init__(self, slot_timeout: float | None = None, limits: Limits = DEFAULTS) -> None:
        self._job_id = os.environ.get("SLURM_JOB_ID")
        if self._job_id is None:
            raise LaunchError(
                "launcher='slurm' starts the ranks by srun in an allocation, and this process is "
                "in none (SLURM_JOB_ID is not set): get one with salloc, or submit with sbatch."
            )
        self.where = f"slurm job {self._job_id}"
        self._seconds = max(limits.slurm_task, slot_timeout or 0.0)
        this_node = socket.gethostname().split(".")[0]
        others = [node for node in _nodes() if node.split(".")[0] != this_node]
        self.shares_files = not others
        self.channel_host = _address_towards(others[0]) if others else "127.0.0.1"

    def slots(self, size: int, patience: float = 0.0) -> int:
        """The number of ranks: at most the allocation's number of tasks; otherwise a SlotError."""
        tasks = os.environ.get("SLURM_NTASKS")
        available = int(tasks or os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        if size > available:
            asked = "--ntasks" if tasks else "no --ntasks, which makes it one for each node,"
            raise SlotError(
                f"np={size} asks for {size} slots, and allocation {self._job_id} has {available} "
                f"task(s) ({asked} in salloc or sbatch). Ask for --ntasks={size} there, or lower "
                "np."
            )
        return size or available

    def launch(self, request: LaunchRequest) -> SlurmLaunch:
        """Start one srun for all ranks.

        Raises:
            DataError: the rows of a DataFrame should be sent with the launch.
            LaunchError: srun cannot be started.
        """
        if request.dataframes:
            raise DataError(
                f"{', '.join(request.dataframes)}: Slurm's tasks get no rows from Spark. Name a "
                "folder that all nodes share, data_config=DataConfig(shared_dir=...), or write the "
                "DataFrame to Parquet there."
            )
        return SlurmLaunch(request, self._seconds)

    def expected_tasks(self) -> int | None:
        """As many as the allocation has tasks."""
        return self.slots(0)

    def launch_members(self, request: PoolRequest) -> srun.SlurmMembers:
        """Start one srun for each seat."""
        seats = min(request.seats, self.slots(0))
        return srun.SlurmMembers(replace(request, seats=seats))


def _nodes() -> list[str]:
    node_list = os.environ.get("SLURM_JOB_NODELIST", "")
    if re.fullmatch(r"[\w.-]*", node_list):
        return [node_list] if node_list else []
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"`scontrol show hostnames {node_list}` fails: {error}") from error
    return done.stdout.split()


def _address_towards(node: str) -> str:
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    for name, address, _ in network.interfaces():
        if name == interface:
            return address
    try:
        return network.address_towards(node)
    except OSError as error:
        raise LaunchError(
            f"this host knows no route to the node {node}: {error}. Set HOROVOD_GLOO_IFACE to the "
            "network interface by which nodes reach each other."
        ) from error


class SlurmLaunch(Launch):
    """One srun under way.

    Raises:
        LaunchError: srun cannot be started.
    """

    def __init__(self, request: LaunchRequest, seconds: float) -> None:
        job = request.job
        self._size = job.size
        self._wake = request.wake
        self._outcomes: dict[int, Outcome] = {}
        self._last_lines: list[str] = []  # of srun's standard error
        self._seconds = seconds
        self.expected = time.monotonic() + seconds
        self._process = srun.start(srun.command(job.size), job, subprocess.PIPE)
        parcel = srun.parcel_of(job, request.address)
        self._writer = start_thread("srun", self._write, parcel)
        self._error_reader = start_thread("srun", self._read_errors)
        self._reader = start_thread("srun", self._read)

    def _write(self, parcel: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101 - a pipe, see above
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(parcel)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None  # noqa: S101
        with self._process.stderr as pipe:
            for line in pipe:
                text = line.decode(errors="replace").strip()
                self._last_lines = [*self._last_lines, text][-_KEPT_LINES:]

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        with self._process.stdout as pipe:
            self._outcomes = read_outcomes(pipe)
        for thread in (self._writer, self._error_reader):
            thread.join()
        self._process.wait()
        self.finished = True
        self._wake()

    def late_error(self) -> SlotError:
        lines = "; ".join(self._last_lines) or "srun printed nothing"
        return SlotError(
            f"np={self._size}: Slurm has started no task within {self._seconds:g} s ({lines}). "
            "Perhaps another step uses the allocation's CPUs or GPUs: end it, or raise "
            "slot_timeout to wait longer."
        )

    def outcomes(self) -> list[Outcome]:
        self._reader.join()
        code = self._process.returncode
        lines = "; ".join(self._last_lines) or f"srun ended with exit code {code}"
        missing = sorted(set(range(self._size)) - set(self._outcomes))
        if missing and not self._outcomes:
            raise LaunchError(f"Slurm ended the step, or never started it: {lines}")
        if missing:
            raise TaskLostError(missing[0], f"Slurm says: {lines}.")
        return list(self._outcomes.values())

    def cancel(self) -> None:
        """Have srun end the step."""
        self._process.terminate()


def outcome_lines(task: int, outcome: Outcome) -> str:
    """A task's outcome as it prints it for the driver: lines of 256 bytes, then their count."""
    data = base64.b64encode(messages.encode(outcome)).decode()
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    lines = [f"{_MARK} {task} {piece}" for piece in [*pieces, f". {len(pieces)}"]]
    return "".join(line.ljust(_LINE_BYTES - 1) + "\n" for line in lines)


def read_outcomes(lines: Iterable[bytes]) -> dict[int, Outcome]:
    """The outcomes in srun's output, by task. One that did not come whole is left out."""
    outcomes: dict[int, Outcome] = {}
    pieces: dict[bytes, list[bytes]] = {}
    for line in lines:
        match line.split():
            case [mark, task, b".", count] if mark == _MARK.encode():
                encoded = pieces.pop(task, [])
                if count == str(len(encoded)).encode():
                    with suppress(ValueError, msgspec.MsgspecError):
                        data = base64.b64decode(b"".join(encoded), validate=True)
                        outcomes[int(task)] = decode_outcome(data)
            case [mark, task, piece] if mark == _MARK.encode():
                pieces.setdefault(task, []).append(piece)
    return outcomes


def main(arguments: list[str]) -> int:
    """Run the rank of one Slurm task; or with a seat as argument, serve a pool."""
    task = int(os.environ["SLURM_PROCID"])
    job, address, directory = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - from our driver
    with suppress(OSError):  # a folder that only the login node has
        os.chdir(directory)
    # The ranks of this launcher are Slurm's tasks, and may ask Slurm about them.
    of_slurm = {name: os.environ[name] for name in os.environ if name.startswith("SLURM")}
    setup = TaskSetup(
        task,
        path=list(job.path),
        user_environment={**inherited_environment(), **of_slurm, **job.environment},
    )
    if arguments:
        serve(job, address, int(arguments[0]), setup)
        return 0
    print(outcome_lines(task, run_rank(job, address, setup)), end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
