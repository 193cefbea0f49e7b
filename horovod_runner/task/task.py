"""Runs one rank of a job: meets the driver, starts the worker process, reports the outcome.

Runs in a Spark task, in a Slurm task or in a thread of the driver; never in the worker process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from horovod_runner.common.threads import start_thread
from horovod_runner.errors import DataError, HorovodRunnerError, LaunchError
from horovod_runner.host import control_groups, gpus, software
from horovod_runner.host.scratch import (
    TEMPORARY_VARIABLE,
    VARIABLE,
    RunFolder,
    rank_folder,
    remove_left,
)
from horovod_runner.task import meeting, transfer
from horovod_runner.task.orders import DetachError, receive
from horovod_runner.task.process import WorkerProcess
from horovod_runner.task.relay import Relay
from horovod_runner.wire import messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.job_file import (
    LEFT_VARIABLE,
    RUN_VARIABLE,
    CheckpointPlan,
    WorkerJob,
    imported_file,
)
from horovod_runner.wire.link import Link
from horovod_runner.wire.messages import Assignment
from horovod_runner.worker.startup import rank_environment
from horovod_runner.worker.startup.pmi import segments

_LOOK_SECONDS = 1.0
_TIMELINE = "HOROVOD_TIMELINE"


@dataclass(frozen=True)
class TaskSetup:
    """The launcher's settings for one task, beside the job.

    Attributes:
        user_environment: the variables that count as set by the user.
        task_gpus: the GPUs that Spark gave this task.
        directory: the worker's working directory; None for this process's.
        inherited: the environment variables that the worker inherits; None for this process's.
        echo: called with each line that the rank prints; None prints nothing here.
        detached: how the tasks continue when the driver cannot be reached: all of them enter this
            context, get the address of the driver's stand-in, and leave it together. None: they
            fail instead.
        receive_rows: writes the DataFrame rows that came with the task to a folder, and returns
            their metadata by dataset name. None: no rows come with the task.
        owner: the process on this host that ends with the session; a fork server ends with it.
            None: no fork server may be kept.
        commits: the folder for commits, in this host's memory; empty unless the run is elastic.
        refusal: why no rank can work here, with what to do; empty if one can.
    """

    task: int
    path: list[str]
    user_environment: Mapping[str, str]
    task_gpus: tuple[str, ...] = ()
    directory: str | None = None
    inherited: Mapping[str, str] | None = None
    echo: Callable[[str], None] | None = None
    detached: AbstractContextManager[ChannelAddress] | None = None
    receive_rows: Callable[[Path], dict[str, bytes]] | None = None
    owner: int | None = None
    commits: str = ""
    refusal: str = ""


def run_rank(job: Job, address: ChannelAddress, setup: TaskSetup) -> Outcome:
    """Run one rank, from the first message to the driver to the worker's end.

    Whatever the rank itself does is in the outcome; it is never raised.

    Raises:
        LaunchError: the driver cannot be reached, and the tasks could not meet without it.
    """
    with ExitStack() as stack:  # the run's scratch folder survives the switch to detached mode
        try:
            return _run_with(job, address, setup, stack)
        except DetachError:
            assert setup.detached is not None  # noqa: S101 - only then is it raised
        with setup.detached as stand_in:
            return _run_with(job, stand_in, replace(setup, detached=None), stack)


def _run_with(job: Job, address: ChannelAddress, setup: TaskSetup, stack: ExitStack) -> Outcome:
    link = Link(address, setup.task, job.limits)
    try:
        # Before Hello: the driver starts all ranks once all tasks have said Hello, so a task that
        # says it must be able to take part.
        if setup.detached is not None and not link.reaches(job.limits.driver_reached):
            raise DetachError
        try:
            folder = keep_scratch(job, stack)
            outcome = _RankTask(job, address, setup, link, folder).run()
        except DetachError:
            raise
        except Exception as error:
            # Reported at once: other ranks may already wait for this one in a collective.
            failed = messages.Failed(-1, 1, type(error).__name__)
            link.put_patiently(failed, job.limits.messages_taken)
            outcome = Outcome(
                setup.task,
                hostname=socket.gethostname(),
                problem=str(error) if isinstance(error, HorovodRunnerError) else repr(error),
                in_data=isinstance(error, DataError),
            )
        lost = _drain(link, setup.task, job.limits.messages_taken)
        return msgspec.structs.replace(outcome, lost=lost)
    finally:
        link.close()


def keep_scratch(job: Job, stack: ExitStack) -> Path | None:
    """Keep the run's scratch folder on this host as long as ``stack``.

    Returns:
        The folder; None if the job needs none.
    """
    if not (job.data or job.checkpoints.resume or _wants_timeline(job) or _wants_trace(job)):
        return None
    limit = job.options.data_config.disk_limit
    return stack.enter_context(RunFolder(job.run_id, limit=limit)).path


def _wants_timeline(job: Job) -> bool:
    return job.options.debug_config.timeline is not None


def _wants_trace(job: Job) -> bool:
    return job.options.debug_config.torch_profiler is not False


@dataclass(frozen=True)
class _RankTask:
    """The steps of one rank: meet, fetch, run the worker.

    Attributes:
        folder: the run's scratch folder on this host; None where the job needs none.
    """

    job: Job
    address: ChannelAddress
    setup: TaskSetup
    link: Link
    folder: Path | None

    def run(self) -> Outcome:
        """Run the rank to its end.

        Raises:
            DetachError: the tasks must switch to detached mode.
            LaunchError: no rank can work here.
        """
        job, setup, link = self.job, self.setup, self.link
        if setup.refusal:
            raise LaunchError(setup.refusal)
        pieces: dict[str, bytes] = {}
        if setup.receive_rows is not None and self.folder is not None:
            pieces = setup.receive_rows(self.folder)
        interface = setup.user_environment.get("HOROVOD_GLOO_IFACE", "")
        offer = meeting.make_offer(job, self.address, setup.task, setup.task_gpus, interface)
        with meeting.meeting_points(job, setup.task, offer.address) as (rendezvous, port):
            versions = software.installed(setup.path)
            link.put(messages.Hello(offer, rendezvous, port, versions, pieces))
            assignment = meeting.await_assignment(link, self.address, job.limits.driver_answer)
            rank = assignment.slot.rank
            with ExitStack() as stack:
                temporary, checkpoints = None, job.checkpoints
                if self.folder is not None:
                    temporary = stack.enter_context(rank_folder(self.folder, rank, job.attempt))
                if rank == 0 and checkpoints.resume and temporary is not None:
                    checkpoints = transfer.fetch_checkpoint(
                        checkpoints, link, temporary, job.limits.checkpoint_piece
                    )
                outcome = self._run_worker(assignment, checkpoints, temporary)
            remove_left(job.run_id)
            return outcome

    def _run_worker(
        self, assignment: Assignment, checkpoints: CheckpointPlan, temporary: Path | None
    ) -> Outcome:
        job, setup, slot = self.job, self.setup, assignment.slot
        timeline, trace = None, ""  # the start of the paths of the traces of its framework
        if self.folder is not None:
            timeline = self.folder / "timeline.json" if _wants_timeline(job) else None
            trace = str(self.folder / f"rank-{slot.rank}") if _wants_trace(job) else ""
        preload = job.options.cluster_config.preload_frameworks
        warm = preload or bool(setup.commits)
        with WorkerProcess(
            self._worker_job(assignment, checkpoints, trace),
            self._worker_variables(assignment, timeline, temporary),
            setup.directory,
            inherited=setup.inherited,
            mpi=assignment.controller == "mpi",
            owner=setup.owner if warm else None,
            preload=() if isinstance(preload, bool) else preload,
            # For heartbeats: no message concerns a rank at this point, except Stop.
            meanwhile=lambda: receive(self.link, 0),
        ) as worker:
            relay = Relay(job, assignment, self.link, worker, setup.echo)
            with _restart_prepared(worker, setup.commits):
                relay.run()
            if timeline is not None and slot.rank == 0:
                transfer.send_timeline(timeline, self.link, job.limits.messages_taken)
            outcome = relay.outcome()
            if trace:
                transfer.send_trace(trace, slot.rank, self.link, job.limits.messages_taken)
            keep = preload is True or not outcome.ok
            if keep and worker.fork_server is not None and outcome.worker is not None:
                worker.fork_server.keep(outcome.worker.imported)
            return outcome

    def _worker_job(
        self, assignment: Assignment, checkpoints: CheckpointPlan, trace: str
    ) -> WorkerJob:
        job, slot = self.job, assignment.slot
        return WorkerJob(
            rank=slot.rank,
            size=slot.size,
            local_rank=slot.local_rank,
            options=job.options,
            main=job.main,
            path=self.setup.path,
            argv=list(job.argv),
            data=job.data,
            pieces=assignment.pieces,
            attempt=job.attempt,
            checkpoints=checkpoints,
            replacements=job.replacements,
            import_hooks=job.import_hooks,
            all_values=job.all_values,
            sources=job.sources,
            trace=trace,
            commits=self.setup.commits,
            logs=job.logs,
            warning_filters=job.warning_filters,
            mlflow_run=job.mlflow_run and job.mlflow_run.for_rank(slot.rank),
        )

    def _worker_variables(
        self, assignment: Assignment, timeline: Path | None, temporary: Path | None
    ) -> dict[str, str]:
        job, slot = self.job, assignment.slot
        variables = rank_environment.worker_variables(
            slot,
            assignment,
            control_groups.available_cores(),
            _gpu_variables(job, assignment),
            self.setup.user_environment,
            limits=job.limits,
        )
        variables[RUN_VARIABLE] = job.run_id
        if self.folder is not None:
            variables[VARIABLE] = str(self.folder)
        if temporary is not None:
            variables[TEMPORARY_VARIABLE] = str(temporary)
        if timeline is not None:  # all ranks must ask for one; only rank 0 writes it
            variables[_TIMELINE] = str(timeline) if slot.rank == 0 else os.devnull
        if _wants_trace(job):
            # Otherwise torch's profiler prints its own log on stderr.
            variables.setdefault("KINETO_LOG_LEVEL", "99")
        if assignment.controller == "mpi":
            variables[LEFT_VARIABLE] = os.pathsep.join(segments(assignment))
        return variables


@contextmanager
def _restart_prepared(worker: WorkerProcess, commits: str) -> Iterator[None]:
    """Start a fork server while a worker runs, as soon as the worker has said what to import.

    A worker that is killed says nothing at its end, and the next one has to start quickly.
    """
    server, ended = worker.fork_server, threading.Event()
    if server is None or not commits:
        yield
        return

    def prepare() -> None:
        path = Path(imported_file(commits))
        while not ended.wait(_LOOK_SECONDS):
            with suppress(OSError, ValueError):
                server.keep(json.loads(path.read_text()))
                return

    thread = start_thread("restart", prepare)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _gpu_variables(job: Job, assignment: Assignment) -> dict[str, str]:
    if assignment.hide_gpus:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return gpus.environment(assignment.slot, job.options.cluster_config.gpu_pinning)


def _drain(link: Link, task: int, patience: float) -> int:
    """Wait until the driver has taken all messages; returns the number of batches it has not.

    It may take none for ``patience`` seconds. On a full disk some may be lost: the outcome never
    is.
    """
    dropped, expected = link.dropped, link.sent + link.waiting
    if not link.put_patiently(messages.Ended(task, expected), patience):
        return link.waiting + dropped
    sent, deadline = link.sent, time.monotonic() + patience
    while time.monotonic() < deadline and not link.lost:
        if any(isinstance(message, messages.Taken) for message in link.wait(0.5)):
            return dropped
        if link.sent > sent:
            sent, deadline = link.sent, time.monotonic() + patience
    return link.waiting + dropped


def stderr_echo(line: str) -> None:
    """Print a line on this process's stderr; in Spark that is the executor's log."""
    print(line, file=sys.stderr, flush=True)
