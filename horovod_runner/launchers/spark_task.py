"""Runs in a Spark task: of a barrier job, which returns a rank's outcome as a row, or of a pool."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from horovod_runner.host.folders.urls import hadoop_variables
from horovod_runner.host.network import host_id
from horovod_runner.host.processes import lift_address_space
from horovod_runner.host.python_path import rank_path
from horovod_runner.launchers.detached import Detached
from horovod_runner.launchers.member import serve
from horovod_runner.task.task import TaskSetup, run_rank, stderr_echo
from horovod_runner.wire import messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job

# On two cores PyTorch with Horovod maps 3.6 GiB, and TensorFlow 5; more with each thread.
_LEAST_ADDRESS_SPACE = 8 << 30

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext


def run_task(
    job: Job,
    address: ChannelAddress,
    batches: Iterator[pa.RecordBatch],
    *,
    echo: bool,
    stays: bool,
    detaches: bool,
    dataframes: tuple[str, ...],
) -> Iterator[pa.RecordBatch]:
    """The body of one task, for ``mapInArrow``; yields the outcome of its rank.

    The batches are the task's rows of the named DataFrames; without DataFrames, a row with its
    number. ``echo`` says whether the executor's log gets what the rank prints, ``stays`` whether
    the rank's folder is the executor's on the driver's host, too, and ``detaches`` whether the
    tasks may do without the driver.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    receive_rows = None
    if dataframes:
        from horovod_runner.data.read import spill

        # The rank may start a second time, in detached mode: the rows can be read only once.
        number = context.partitionId()
        receive_rows = cache(lambda folder: spill.receive_rows(dataframes, folder, number, batches))
    else:
        for _ in batches:
            pass  # the context knows the task's number too
    without_driver = Detached(job, context) if detaches else None
    setup = replace(
        _setup(job, context, echo=echo, stays=stays),
        detached=without_driver,
        receive_rows=receive_rows,
    )
    outcome = run_rank(job, address, setup)
    if without_driver is not None:
        outcome = msgspec.structs.replace(outcome, record=without_driver.record)
    yield _one_row(messages.encode(outcome))


def run_member(
    job: Job,
    pool: ChannelAddress,
    seat: int,
    batches: Iterator[pa.RecordBatch],
    *,
    echo: bool,
    stays: bool,
) -> Iterator[pa.RecordBatch]:
    """The body of a task of a pool, for ``mapInArrow``; yields nothing.

    See :func:`serve` and, for the rest, :func:`run_task`.
    """
    from pyspark import TaskContext

    for _ in batches:
        pass
    serve(job, pool, seat, _setup(job, TaskContext.get(), echo=echo, stays=stays))
    yield from ()


def _setup(job: Job, context: TaskContext, *, echo: bool, stays: bool) -> TaskSetup:
    resources = context.resources()
    is_drivers_host = job.host == host_id() and os.path.isdir(job.directory)
    return TaskSetup(
        context.partitionId(),
        path=rank_path(job.path, job.directory),
        # Not os.environ: Spark itself sets OMP_NUM_THREADS there.
        user_environment=job.environment,
        # Otherwise the folder that Spark made for the executor.
        directory=job.directory if is_drivers_host and not stays else None,
        inherited=_environment_at_start(),
        task_gpus=tuple(resources["gpu"].addresses) if "gpu" in resources else (),
        echo=stderr_echo if echo else None,
        # Spark's daemon of Python workers, which the executor ends with the session. This process
        # may end after an idle minute.
        owner=os.getppid(),
        refusal=_refusal(),
    )


def _refusal() -> str:
    """Why no framework can work in a process of this task; empty if one can."""
    limit = lift_address_space()
    if limit is None or limit >= _LEAST_ADDRESS_SPACE:
        return ""
    return (
        f"spark.executor.pyspark.memory limits the address space of this task's processes to "
        f"{limit / (1 << 30):.1f} GiB. Frameworks map {_LEAST_ADDRESS_SPACE >> 30} GiB and more, "
        "most of which they never use, and lifting the limit takes CAP_SYS_RESOURCE. Start the "
        "session without that setting, and ask for the ranks' memory by "
        "spark.executor.memoryOverhead"
    )


def _environment_at_start() -> dict[str, str] | None:
    """This process's environment variables as Spark set them; None where they cannot be read.

    Spark uses a Python worker for one task after the other. An earlier one may have imported a
    framework that sets variables, on some hosts and not on others.
    """
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
    variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    # A program that shows another title in ps writes it over this block. Spark sets this variable.
    return {**hadoop_variables(variables), **variables} if "PYTHONPATH" in variables else None


def _one_row(value: bytes) -> pa.RecordBatch:
    """A batch of one row with one binary column.

    Made from buffers: ``pa.array`` would import pandas, half a second in a fresh Python worker.
    """
    import pyarrow as pa

    offsets = struct.pack("=ii", 0, len(value))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(value)]
    return pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.binary(), 1, buffers)], names=["outcome"]
    )
