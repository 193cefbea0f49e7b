"""Starts srun: for all ranks of a launch, or once for each task of a pool."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import time
from collections.abc import Collection

from horovod_runner.common.threads import start_thread
from horovod_runner.driver.launcher import MemberTasks, PoolRequest
from horovod_runner.errors import LaunchError
from horovod_runner.wire import job_file
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job
from horovod_runner.wire.job_file import RUN_VARIABLE

_KEPT_LINES = 20
_AGAIN_SECONDS = 1.0


def command(size: int, *, together: bool = True) -> list[str]:
    """The srun command of a launch with so many ranks.

    Unless they are all that runs in the allocation (``together``), the step takes no more than it
    needs, beside others.
    """
    arguments = [
        "srun",
        f"--ntasks={size}",
        # The allocation may have shrunk since its variables were set: one node is always right.
        *([] if together else ["--exact", "--nodes=1"]),
        "--kill-on-bad-exit=0",
        "--cpu-bind=none",
        "--quit-on-interrupt",
    ]
    # Since Slurm 22.05 steps do not inherit this from the allocation, and get one CPU per task.
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
        arguments.append(f"--cpus-per-task={cpus}")
    if os.environ.get("SLURM_JOB_GPUS"):
        arguments.append("--gpu-bind=none")  # a rank sees all GPUs of its host: see host/gpus.py
    if "SLURM_STEP_ID" in os.environ:
        # An interactive shell is a step too, and srun would wait for its end.
        arguments.append("--overlap")
    return [*arguments, *job_file.command("horovod_runner.launchers.slurm")]


def start(arguments: list[str], job: Job, output: int) -> subprocess.Popen[bytes]:
    """Start srun, with pipes to its stdin and from its stderr, or raise a LaunchError."""
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            env={**os.environ, RUN_VARIABLE: job.run_id},
            start_new_session=True,  # so that Ctrl-C reaches only the driver
        )
    except OSError as error:
        raise LaunchError(f"srun cannot be started: {error}. Is it on PATH?") from error


def parcel_of(job: Job, address: ChannelAddress) -> bytes:
    """The bytes for a task's standard input."""
    return pickle.dumps((job, address, os.getcwd()))


class SlurmMembers(MemberTasks):
    """The tasks of a pool: one srun each."""

    def __init__(self, request: PoolRequest) -> None:
        self._job = request.job
        self._address = request.address
        self._ended = request.ended
        self._over = threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads = [
            start_thread(f"srun-{seat}", self._keep, seat) for seat in range(request.seats)
        ]

    def _keep(self, seat: int) -> None:
        """Run a seat's task, again and again until the pool is closed."""
        while not self._over.is_set():
            process = None
            try:
                process = self._processes[seat] = start(
                    [*command(1, together=False), str(seat)], self._job, subprocess.DEVNULL
                )
                # Its last lines say what went wrong; a task of a pool prints nothing itself.
                parcel = parcel_of(self._job, self._address)
                lines = process.communicate(parcel)[1].decode(errors="replace").splitlines()
                reason = "; ".join(lines[-_KEPT_LINES:]) or f"exit code {process.returncode}"
            except (OSError, LaunchError) as error:
                reason = str(error)
            if not self._over.is_set():
                self._ended(seat, LaunchError(f"Slurm ended a task of the run: {reason}"))
                self._over.wait(_AGAIN_SECONDS)

    def close(self, served: Collection[int], seconds: float) -> None:
        self._over.set()
        for seat, process in list(self._processes.items()):  # the seats' threads add to it
            if seat not in served:
                process.terminate()
        ends = (subprocess.Popen.terminate, subprocess.Popen.kill)
        for end in ends:
            until = time.monotonic() + seconds
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))
            for process in list(self._processes.values()):
                end(process)
