"""What one run is made of: the Job that travels to every task, and how each rank came back.

Job --launcher--> task --WorkerJob--> worker --WorkerOutcome--> task --Outcome--> driver
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import msgspec

from horovod_runner import handover, hang, software, sparkdl
from horovod_runner.errors import SerializationError
from horovod_runner.gpu import Pinning
from horovod_runner.handover import CheckpointPlan, WorkerOutcome
from horovod_runner.messages import (
    Began,
    Controller,
    ControllerChoice,
    Failed,
    Log,
    Output,
    Report,
    Saved,
    Unsaved,
)
from horovod_runner.topology import Slot

# The user's knobs of Horovod and of the libraries under it follow the job to every rank.
_FORWARDED = ("HOROVOD_", "NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "MPIR_CVAR_", "UCX_", "FI_")
ReportRanks = Literal[0, "all"]
_CELL_CHARACTERS = 1 << 18  # of a notebook, for tracebacks
_STALL_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"


@dataclass(frozen=True)
class Job:
    """One run, as every task receives it.

    Attributes:
        run_id: names the run in messages and in Spark's UI.
        size: the number of ranks.
        main: the pickled function and its keyword arguments.
        environment: the user's variables for the workers; they win over our defaults.
        path: the driver's ``sys.path``.
        argv: the driver's ``sys.argv``, for functions that read flags.
        gpus_per_rank: as given to HorovodRunner.
        gpu_pinning: as given to HorovodRunner.
        stream_output: whether what the ranks print goes to the driver as it comes.
        hang_timeout: as given to HorovodRunner.
        controller: as given to HorovodRunner.
        software: what the driver has installed.
        data: the pickled readers of the datasets; empty where there are none.
        data_limit: as given to HorovodRunner.
        attempt: of the run, from 1 on.
        checkpoints: where they go, and what to go on from.
        report_ranks: as given to HorovodRunner.
        timeline: whether Horovod's timeline is wanted.
        check_sync: whether the ranks' weights are compared.
        sparkdl: whether sparkdl's names are this package's.
        sources: see :class:`~horovod_runner.handover.WorkerJob`.
        warm: as given to HorovodRunner.
    """

    run_id: str
    size: int
    main: bytes = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    path: tuple[str, ...] = ()
    argv: tuple[str, ...] = field(default=(), repr=False)
    gpus_per_rank: float | None = None
    gpu_pinning: Pinning = "current"
    stream_output: bool = False
    hang_timeout: float | None = None
    controller: ControllerChoice = "auto"
    software: Mapping[str, str] = field(default_factory=dict)
    data: bytes = field(default=b"", repr=False)
    data_limit: int | None = None
    attempt: int = 1
    checkpoints: CheckpointPlan = handover.NO_CHECKPOINTS
    report_ranks: ReportRanks = 0
    timeline: bool = False
    check_sync: bool = False
    sparkdl: bool = False
    sources: dict[str, str] = field(default_factory=dict, repr=False)
    warm: bool = False

    @property
    def stall_seconds(self) -> int:
        """How long a collective may wait before somebody looks; the user's own number wins."""
        own = self.environment.get(_STALL_CHECK, "")
        return int(own) if own.isdigit() and int(own) else hang.WARN_SECONDS


def make_job(
    main: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    size: int,
    environment: Mapping[str, str],
    gpus_per_rank: float | None,
    gpu_pinning: Pinning,
    stream_output: bool,
    hang_timeout: float | None,
    ship_modules: Sequence[ModuleType],
    warn_bytes: int,
    report_ranks: ReportRanks = 0,
    timeline: bool = False,
    check_sync: bool = False,
    controller: ControllerChoice = "auto",
    warm: bool = False,
) -> Job:
    """Pickle a function and its arguments into a job.

    Warns (UserWarning) where they take more than ``warn_bytes``.

    Raises:
        SerializationError: something that ``main`` captures or is given cannot be pickled, or is
            too large.
    """
    # Here, not above: a task imports this module too, and pickles nothing.
    from horovod_runner import diagnosis

    name = getattr(main, "__qualname__", repr(main))
    try:
        pickled = diagnosis.pickle_for_ranks((main, dict(kwargs)), ship_modules)
    except Exception as error:
        culprit = (
            diagnosis.find_culprit(main, kwargs, ship_modules) or f"{type(error).__name__}: {error}"
        )
        raise SerializationError(
            f"{name} and its arguments are sent to the ranks by pickle, and something in them "
            f"cannot be pickled: {culprit}"
        ) from error
    if len(pickled) > min(warn_bytes, diagnosis.MAX_BYTES):
        large, largest = diagnosis.bytes_text(len(pickled)), diagnosis.find_largest(main, kwargs)
        told = (
            f"{name} and its arguments take {large} as a pickle, and each rank is sent all of it. "
            f"The largest part is {largest}. Write data to files that the ranks can read and load "
            "it inside main"
        )
        if len(pickled) > diagnosis.MAX_BYTES:
            raise SerializationError(f"{told}: a task can be sent 2 GB.")
        warnings.warn(f"{told}, or raise warn_pickle_bytes.", stacklevel=3)
    forwarded = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and "RENDEZVOUS" not in name
    }
    check = hang.check_seconds(hang_timeout)
    return Job(
        run_id=os.urandom(4).hex(),
        size=size,
        main=pickled,
        environment={_STALL_CHECK: str(check), **forwarded, **environment},
        path=tuple(sys.path),
        argv=tuple(getattr(sys, "argv", ())),
        gpus_per_rank=gpus_per_rank,
        gpu_pinning=gpu_pinning,
        stream_output=stream_output,
        hang_timeout=hang_timeout,
        controller=_controller(controller, {**forwarded, **environment}),
        software=software.installed(),
        report_ranks=report_ranks,
        timeline=timeline,
        check_sync=check_sync,
        sparkdl=sparkdl.is_installed(),
        sources=_cells(),
        warm=warm,
    )


def _controller(wanted: ControllerChoice, environment: Mapping[str, str]) -> ControllerChoice:
    """Horovod's own variable counts where nothing else is said."""
    own: dict[str, ControllerChoice] = {"": wanted, "gloo": "gloo", "mpi": "mpi"}
    said = environment.get("HOROVOD_CONTROLLER", "")
    if said.lower() not in own:
        raise ValueError(f"HOROVOD_CONTROLLER must be gloo or mpi, not {said!r}; or leave it unset")
    return own[said.lower()] if wanted == "auto" else wanted


def _cells() -> dict[str, str]:
    """The cells of a notebook that have been run, by their names in tracebacks; the last ones."""
    found: dict[str, str] = {}
    room = _CELL_CHARACTERS
    for name, entry in reversed([*linecache.cache.items()]):
        # IPython enters them without a time; "<...>" is what other packages make up.
        made_up = name.startswith("<") and not name.startswith("<ipython")
        if len(entry) != 4 or entry[1] is not None or made_up or os.path.exists(name):
            continue
        text = "".join(entry[2])
        room -= len(text)
        if room < 0:
            break
        found[name] = text
    return found


def user_path(path: tuple[str, ...]) -> list[str]:
    """The entries of the driver's ``sys.path`` that a task may add to its own.

    The folders of the user's own modules, where they exist on this host too; not the driver's
    installation, which may be another Python's.
    """
    installed = tuple(filter(None, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
    entries = [os.path.abspath(entry) for entry in path]
    return [
        entry
        for entry in entries
        if entry not in sys.path
        and os.path.exists(entry)
        and not _is_installation(entry, installed)
    ]


def _is_installation(entry: str, installed: tuple[str, ...]) -> bool:
    folders = {"site-packages", "dist-packages"}
    return entry.startswith(installed) or not folders.isdisjoint(entry.split(os.sep))


class Record(msgspec.Struct, frozen=True):
    """What became of ranks that could not reach the driver, as its deputy kept it (deputy.py).

    Attributes:
        slots: where the ranks were placed; none if they could not be.
        said: in order, with the number of the task; a text alone is a notice for the user.
        cut: how many characters of output in front were too many to keep.
        problem: the pickled error that ended the run, if any.
        controller: what the ranks' Horovod went by; None where they were not placed.
    """

    slots: list[Slot]
    said: list[tuple[int, Began | Output | Log | Report | Saved | Unsaved | Failed | str]]
    cut: int = 0
    problem: bytes = b""
    controller: Controller | None = None


class Outcome(msgspec.Struct, frozen=True):
    """How one rank ended, as its task reports it through the launcher.

    Attributes:
        rank: -1 where the task ended before it was given one.
        exit_code: the worker's, negative for a signal; None where no worker was started. The one
            that it meant, where it was stopped on its way out.
        worker: what the worker said; None if it died without a word.
        tail: the last lines that the rank printed.
        problem: why no worker was started, or why it was ended; empty otherwise.
        in_data: whether the problem is in the data that came with the task.
        stopped: its task ended it, by an order: whatever it says of its end, it is not the cause.
        lost: how many batches of messages the driver did not take.
        record: from task 0 of ranks that could not reach the driver.
    """

    task: int
    rank: int = -1
    hostname: str = ""
    pid: int | None = None
    exit_code: int | None = None
    gpus: tuple[str, ...] = ()
    worker: WorkerOutcome | None = None
    tail: list[str] = []
    problem: str = ""
    in_data: bool = False
    stopped: bool = False
    lost: int = 0
    record: Record | None = None

    @property
    def ok(self) -> bool:
        """Whether ``main`` returned on this rank."""
        return self.worker is not None and self.worker.ok
