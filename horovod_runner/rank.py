"""One rank's life on its host: say hello, get a slot, run the worker, tell how it ended.

Runs in a Spark task or in a thread of the driver, beside the worker and never in it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from horovod_runner import environment, gpu, host, messages, software
from horovod_runner.channel import ChannelAddress, Link
from horovod_runner.errors import CheckpointError, DataError, HorovodRunnerError
from horovod_runner.folder import VARIABLE, RunFolder, remove_left
from horovod_runner.handover import LEFT_VARIABLE, RUN_VARIABLE, CheckpointPlan, WorkerJob
from horovod_runner.job import Job, Outcome
from horovod_runner.marker import Marker
from horovod_runner.messages import Assignment, FromDriver
from horovod_runner.pmi import segments
from horovod_runner.process import WorkerProcess
from horovod_runner.topology import Offer, Slot
from horovod_runner.watch import LOST_DRIVER, Watch

REACH_SECONDS = 30.0
_APART_SECONDS = 10.0
_DRAIN_SECONDS = 30.0  # without any progress
_FETCH_SECONDS = 60.0  # for the driver to check a checkpoint and give a piece of it
_PIECE_BYTES = 1 << 20
_ENOUGH_WAITING = 32  # pieces that the driver has not taken
_TIMELINE = "HOROVOD_TIMELINE"


class _CalledOffError(HorovodRunnerError):
    """The driver called the rank off before its worker was started."""


class _ApartError(Exception):
    """The tasks have to do without the driver."""


@dataclass(frozen=True)
class Surroundings:
    """What a launcher knows of the place where a rank is to run.

    Attributes:
        task: the number of the task, 0 to size - 1.
        path: the worker's ``sys.path``.
        user_environment: what counts as set by the user.
        task_gpus: the GPUs that Spark gave this task.
        directory: the worker's working directory; None for this process's.
        echo: takes each line that the rank prints, beside the driver.
        apart: how to go on where the driver cannot be reached: all tasks enter it, are given the
            address of the driver's deputy, and leave it together. None: not at all.
        take_in: writes the rows that came with the task to a folder, once, and gives what there is
            to tell of them; None where none came.
        owner: the process on this host that lasts as long as the session, with which what is kept
            for the next run ends; None where nothing may be kept.
    """

    task: int
    path: list[str]
    user_environment: Mapping[str, str]
    task_gpus: tuple[str, ...] = ()
    directory: str | None = None
    echo: Callable[[str], None] | None = None
    apart: AbstractContextManager[ChannelAddress] | None = None
    take_in: Callable[[Path], dict[str, bytes]] | None = None
    owner: int | None = None


def run_rank(job: Job, address: ChannelAddress, here: Surroundings) -> Outcome:
    """Run one rank of a job here, from hello to outcome; never raises for what the rank does.

    Raises:
        LaunchError: the driver cannot be reached, and the tasks did not meet without it.
    """
    with ExitStack() as kept:  # what came with the task is there for the second try too
        try:
            return _run_linked(job, address, here, kept)
        except _ApartError:
            assert here.apart is not None  # noqa: S101 - raised for it alone
        with here.apart as deputy:
            return _run_linked(job, deputy, replace(here, apart=None), kept)


def _run_linked(job: Job, address: ChannelAddress, here: Surroundings, kept: ExitStack) -> Outcome:
    link = Link(address, here.task)
    try:
        # Before the hello: once all have said it the driver starts them, and none may be missing.
        if here.apart is not None and not link.reaches(_APART_SECONDS):
            raise _ApartError
        try:
            folder = None
            if job.data or job.checkpoints.resume or job.timeline:
                folder = kept.enter_context(RunFolder(job.run_id, limit=job.data_limit))
            outcome = _run(job, address, here, link, folder)
        except _ApartError:
            raise
        except Exception as error:
            # Told at once: the others may be waiting for this rank already.
            link.put(messages.Failed(-1, 1, type(error).__name__))
            told = isinstance(error, HorovodRunnerError)
            problem = str(error) if told else repr(error)
            outcome = Outcome(
                here.task,
                hostname=socket.gethostname(),
                problem=problem,
                in_data=isinstance(error, DataError),
            )
        return msgspec.structs.replace(outcome, lost=_drain(link, here.task))
    finally:
        link.close()


def _run(
    job: Job, address: ChannelAddress, here: Surroundings, link: Link, folder: RunFolder | None
) -> Outcome:
    pieces = {} if here.take_in is None or folder is None else here.take_in(folder.path)
    offer = _offer(job, address, here)
    # Task 0 becomes rank 0: the meeting points are on its host.
    with _Meeting(offer.address, job.size) if here.task == 0 else _NoMeeting() as meeting:
        hello = messages.Hello(
            offer, meeting.rendezvous, meeting.master_port, software.installed(here.path), pieces
        )
        link.put(hello)
        assignment = _await_assignment(link, address)
        slot = assignment.slot
        plan = job.checkpoints
        if slot.rank == 0 and plan.resume and folder is not None:
            plan = _fetched(plan, link, folder.path)
        worker_job = WorkerJob(
            slot.rank,
            job.main,
            here.path,
            list(job.argv),
            job.data,
            assignment.pieces,
            slot.size,
            job.attempt,
            job.report_ranks in ("all", slot.rank),
            plan,
            job.check_sync,
            job.sparkdl,
            job.sources,
            job.warm,
        )
        variables = environment.worker_variables(
            slot,
            assignment,
            environment.available_cores(),
            _gpu_variables(job, slot),
            here.user_environment,
        )
        variables[RUN_VARIABLE] = job.run_id
        if folder is not None:
            variables[VARIABLE] = str(folder.path)
        timeline = folder.path / "timeline.json" if job.timeline and folder is not None else None
        if timeline is not None:  # all ranks must ask for it; rank 0 alone writes
            variables[_TIMELINE] = str(timeline) if slot.rank == 0 else os.devnull
        mpi = assignment.controller == "mpi"
        if mpi:
            variables[LEFT_VARIABLE] = os.pathsep.join(segments(assignment))
        owner = here.owner if job.warm else None
        with WorkerProcess(
            worker_job,
            variables,
            here.directory,
            mpi=mpi,
            owner=owner,
            meanwhile=lambda: _keep_in_touch(link),
        ) as worker:
            watch = Watch(job, slot, link, worker, here.echo, assignment=assignment)
            watch.until_end()
            if timeline is not None and slot.rank == 0:
                _send_timeline(timeline, link)
            outcome = watch.outcome()
            if worker.warm is not None and outcome.worker is not None:
                worker.warm.keep(outcome.worker.imported)
        remove_left(job.run_id)
        return outcome


def _fetched(plan: CheckpointPlan, link: Link, folder: Path) -> CheckpointPlan:
    """See to it that rank 0 has what it goes on from.

    Raises:
        CheckpointError: the driver has no whole one, or does not answer.
    """
    # Here, not above: few tasks have anything to go on from.
    from horovod_runner import checkpoint, stores

    if checkpoint.is_seen(stores.open_folder(plan.folder), plan.token):
        return plan
    problems = []
    for marker in plan.resume:
        problem = _fetch(marker, link, folder)
        if not problem:
            return plan._replace(fetched=str(folder / marker.name))
        problems.append(problem)
    raise CheckpointError(f"nothing to go on from could be fetched: {' '.join(problems)}")


def _fetch(marker: Marker, link: Link, folder: Path) -> str:
    """Copy a checkpoint here, piece by piece; returns why that cannot be, or nothing.

    Raises:
        _CalledOffError: the driver called the run off.
    """
    offset = 0
    with (folder / marker.name).open("wb") as file:
        while offset < marker.size:
            link.put(messages.Fetch(0, marker.name, offset))
            answer = _await_piece(link, marker.name, offset)
            if answer.problem or not answer.data:
                return answer.problem or f"{marker.name} was cut short at {offset} bytes."
            file.write(answer.data)
            offset += len(answer.data)
    return ""


def _await_piece(link: Link, name: str, offset: int) -> messages.Fetched:
    deadline = time.monotonic() + _FETCH_SECONDS
    while time.monotonic() < deadline:
        for message in _heard(link, 0.5):
            if not isinstance(message, messages.Fetched):
                continue
            if (message.name, message.offset) == (name, offset):
                return message
    problem = f"the driver gave no piece of {name} within {_FETCH_SECONDS:.0f} s."
    return messages.Fetched(name, offset, problem=problem)


def _send_timeline(path: Path, link: Link) -> None:
    """Send what Horovod has written, also where the worker was killed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # main never called hvd.init()
        return
    with file:
        offset = 0
        while data := file.read(_PIECE_BYTES):
            link.put(messages.FilePart(0, "timeline", offset, data))
            offset += len(data)
            while link.waiting >= _ENOUGH_WAITING and not link.lost:
                link.wait(0.1)


def _offer(job: Job, address: ChannelAddress, here: Surroundings) -> Offer:
    own_address = host.address_towards(address.host)
    look_for_gpus = not here.task_gpus and job.gpus_per_rank != 0
    return Offer(
        task=here.task,
        host=host.host_id(),
        hostname=socket.gethostname(),
        address=own_address,
        interface=host.interface_of(own_address),
        task_gpus=here.task_gpus,
        host_gpus=gpu.visible_gpus() if look_for_gpus else (),
        ports=host.port_count(),
    )


class _NoMeeting:
    """The meeting points are on another host."""

    rendezvous = ""
    master_port = 0

    def __enter__(self) -> _NoMeeting:
        return self

    def __exit__(self, *_: object) -> None:
        return


class _Meeting(_NoMeeting):
    """Where the ranks meet: Horovod's store, and a port held for torch.distributed's."""

    def __init__(self, address: str, size: int) -> None:
        from horovod_runner.rendezvous import Rendezvous  # here: only task 0 needs asyncio

        self._store = Rendezvous(address, size) if size > 1 else None
        self._port = host.hold_port(address)
        self.rendezvous = self._store.address if self._store else ""
        self.master_port = self._port.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self._port.close()
        if self._store is not None:
            self._store.close()


def _await_assignment(link: Link, address: ChannelAddress) -> Assignment:
    """Wait until all tasks are there.

    Raises:
        _CalledOffError: the driver called the run off, or cannot be reached.
    """
    deadline = time.monotonic() + REACH_SECONDS
    reached = False
    while True:
        for message in _heard(link, 0.5):
            reached = True
            if isinstance(message, Assignment):
                return message
            if isinstance(message, messages.Apart):
                raise _ApartError
        if not reached and time.monotonic() > deadline:
            link.give_up()
            raise _CalledOffError(
                f"the driver did not answer at {address.host}:{address.port} within "
                f"{REACH_SECONDS:.0f} s: a firewall between executors and driver, or a wrong "
                "spark.driver.host (with Spark Connect, where task 0 stands in for a driver that "
                "cannot be reached, between the executors)"
            )


def _keep_in_touch(link: Link) -> None:
    """Send the driver a sign of life; called while the worker is being started.

    Raises:
        _CalledOffError: the driver called the run off, or is lost.
    """
    for _ in _heard(link, 0):
        pass  # there is nothing yet that they could be for


def _heard(link: Link, seconds: float) -> Iterator[FromDriver]:
    """The driver's messages, after so many seconds at most.

    Raises:
        _CalledOffError: the driver called the run off, or is lost.
    """
    for message in link.wait(seconds):
        if isinstance(message, messages.Stop):
            raise _CalledOffError(message.reason)
        yield message
    if link.lost:
        raise _CalledOffError(LOST_DRIVER)


def _gpu_variables(job: Job, slot: Slot) -> dict[str, str]:
    if job.gpus_per_rank == 0:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return gpu.environment(slot, job.gpu_pinning)


def _drain(link: Link, task: int) -> int:
    """Wait until the driver has taken everything; returns how many batches it did not."""
    expected = link.sent + link.waiting
    link.put(messages.Ended(task, expected))
    sent, deadline = link.sent, time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < deadline and not link.lost:
        if any(isinstance(message, messages.Taken) for message in link.wait(0.5)):
            return 0
        if link.sent > sent:
            sent, deadline = link.sent, time.monotonic() + _DRAIN_SECONDS
    return link.waiting


def stderr_echo(line: str) -> None:
    """Print a line on this process's stderr: an executor's log, in Spark."""
    print(line, file=sys.stderr, flush=True)
