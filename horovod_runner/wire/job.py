"""A run as it travels: the Job that every task receives, and the Outcome of each rank.

Job --launcher--> task --WorkerJob--> worker --WorkerOutcome--> task --Outcome--> driver
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from horovod_runner.common.limits import Limits
from horovod_runner.common.options import STALL_CHECK, STALL_WARN_SECONDS, CpuCollectives, Options
from horovod_runner.common.slots import Slot
from horovod_runner.wire.addresses import Call
from horovod_runner.wire.events import DriverEvent
from horovod_runner.wire.job_file import (
    NO_CHECKPOINTS,
    CheckpointPlan,
    ImportHook,
    MLflowRun,
    WorkerOutcome,
)
from horovod_runner.wire.measurements import MemoryUse
from horovod_runner.wire.messages import RankEvent

if TYPE_CHECKING:
    from horovod_runner.wire.log_settings import LogSettings

_A_WEEK: Final = 604_800.0  # seconds


@dataclass(frozen=True)
class Job:
    """One launch of a run, as every task receives it.

    Attributes without a line here are those of :class:`~horovod_runner.wire.job_file.WorkerJob`,
    with the driver's values.

    Attributes:
        run_id: the run's id in messages and in Spark's UI.
        options: the user's, without the objects that exist only on the driver.
        environment: the user's variables for the workers; they take precedence over our defaults.
        host: the id of the driver's host, see host/network.py.
        controller: the library that coordinates CPU collectives, from the option or from the user's
            variables.
        software: versions of packages on the driver.
        mlflow_run: the driver's MLflow run, with its credentials; None without one.
        call: how the driver may call a stand-in; None: it cannot.
    """

    run_id: str
    size: int
    options: Options
    main: bytes = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    path: tuple[str, ...] = ()
    argv: tuple[str, ...] = field(default=(), repr=False)
    directory: str = ""
    host: str = ""
    logs: LogSettings | None = field(default=None, repr=False)
    warning_filters: tuple[tuple[Any, ...], ...] = field(default=(), repr=False)
    controller: CpuCollectives = "auto"
    software: Mapping[str, str] = field(default_factory=dict)
    data: bytes = field(default=b"", repr=False)
    attempt: int = 1
    checkpoints: CheckpointPlan = NO_CHECKPOINTS
    replacements: tuple[str, ...] = ()
    import_hooks: tuple[ImportHook, ...] = field(default=(), repr=False)
    all_values: bool = False
    sources: dict[str, str] = field(default_factory=dict, repr=False)
    mlflow_run: MLflowRun | None = field(default=None, repr=False)
    call: Call | None = None

    @property
    def limits(self) -> Limits:
        """The time limits of the run."""
        return self.options.cluster_config.limits

    def patient(self) -> Job:
        """The job without a limit of heartbeats, for tasks that are threads of the driver.

        They end and freeze with it, and busy cores answer late.
        """
        cluster = self.options.cluster_config
        cluster = replace(cluster, limits=replace(cluster.limits, heartbeat=_A_WEEK))
        return replace(self, options=replace(self.options, cluster_config=cluster))

    @property
    def stall_seconds(self) -> int:
        """Seconds that a collective may wait before the ranks' stacks are read.

        A value that the user set in the environment takes precedence.
        """
        given = self.environment.get(STALL_CHECK, "")
        return int(given) if given.isdigit() and int(given) else STALL_WARN_SECONDS


#: What the stand-in in detached mode keeps for the driver.
Kept = RankEvent | DriverEvent
decode_kept: Final = msgspec.msgpack.Decoder(list[Kept]).decode


class Record(msgspec.Struct, frozen=True):
    """A run in detached mode, as the stand-in (driver/detached/stand_in.py) recorded it.

    Attributes:
        kept: events for the driver to replay, in order, without those in the journal's files.
        cut: characters dropped from the start of the output, which was too long to keep.
        problem: the pickled error that ended the run; empty without one.
        failed: the ranks that failed by themselves, in the order of their reports.
        written: how many files the journal has had.
        unread: the last of them, which the driver cannot read any more.
    """

    slots: list[Slot]
    kept: list[Kept]
    cut: int = 0
    problem: bytes = b""
    failed: list[int] = []
    written: int = 0
    unread: list[list[Kept]] = []


class Outcome(msgspec.Struct, frozen=True):
    """How one rank ended, as its task reports it through the launcher, or to a pool.

    Attributes:
        rank: -1 if the task ended before it was given one.
        exit_code: the worker's, negative for a signal; None if no worker was started. If the worker
            was killed while it exited, the code that it meant to exit with.
        worker: the worker's report; None if it died without one.
        problem: why no worker was started, or why the task ended it; empty otherwise.
        in_data: whether the problem is in the data that came with the task.
        stopped: the driver ordered the task to end the worker, so its error is not the cause.
        lost: how many batches of messages the driver did not receive.
        memory: what the rank's processes had in memory, and what was left, shortly before the
            worker ended; None if it lived for less than a moment.
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
    memory: MemoryUse | None = None

    @property
    def ok(self) -> bool:
        """Whether ``main`` returned on this rank."""
        return self.worker is not None and self.worker.ok


decode_outcome: Final = msgspec.msgpack.Decoder(Outcome).decode
