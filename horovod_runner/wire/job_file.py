"""The files between a task, its worker and its fork server: the job file and the outcome file.

They are pickles in unnamed files, between a process and its child: whoever writes them already runs
as the user. A worker has loaded pickle in any case; importing another codec would double its start.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from horovod_runner.common.limits import Limits
from horovod_runner.common.options import CheckpointConfig, Options
from horovod_runner.wire.marker import Marker

if TYPE_CHECKING:
    from horovod_runner.wire.log_settings import LogSettings

# The socket over which a worker's MPICH sends its PMI requests (worker/startup/pmi.py).
PMI_VARIABLE: Final = "PMI_FD"
# The files that a worker's guard removes after the worker's end.
LEFT_VARIABLE: Final = "HOROVOD_RUNNER_LEFT"
# The bytes of the outcome file that a worker locks while one of its processes writes to the pipe of
# messages, and while it writes a checkpoint.
PIPE_BYTE: Final = 0
CHECKPOINT_BYTE: Final = 1
# The run that a process belongs to, for results/registry.py and for people who look.
RUN_VARIABLE: Final = "HOROVOD_RUNNER_RUN"


class CheckpointPlan(NamedTuple):
    """Where a run's checkpoints go, and which ones it resumes from.

    Attributes:
        token: the run's id; also names the probe file that shows a host that it sees the folder.
        next_number: the sequence number of the next checkpoint in the folder.
        lineage: whether retention also covers the checkpoints that earlier runs left in the folder.
        owned: whether the run may save only as long as it owns the folder, see checkpoints.owner.
        resume: the checkpoints to resume from, the latest first; empty for a new training.
        fetched: the path of the first intact one of them, if it was copied from the driver; empty
            otherwise.
    """

    folder: str
    token: str
    attempt: int = 1
    next_number: int = 1
    config: CheckpointConfig = CheckpointConfig(num_to_keep=None)
    lineage: bool = False
    owned: bool = False
    resume: tuple[Marker, ...] = ()
    fetched: str = ""


NO_CHECKPOINTS = CheckpointPlan("", "")


class MLflowRun(NamedTuple):
    """The MLflow run of the driver, which rank 0 joins with what it logs to MLflow by itself.

    Attributes:
        tracking_uri: where it is stored; empty on ranks other than 0.
        variables: MLflow's settings and credentials, as environment variables; empty there, too.
    """

    run_id: str
    experiment_id: str
    tracking_uri: str
    variables: Mapping[str, str]

    def for_rank(self, rank: int) -> MLflowRun:
        """What a rank needs to know of it."""
        return self if rank == 0 else MLflowRun(self.run_id, self.experiment_id, "", {})


class ImportHook(NamedTuple):
    """A function that changes a module of a framework at the end of its import in a rank.

    Attributes:
        module: its name; two names with a "|" between them where it has another one in an earlier
            version.
        function: called with the module: "package.module:function", or ".module:function" of ours.
        without: what a run is like without it, as a part of a sentence for the user.
        trains: whether the training can be wrong without it.
        only_ranks: whether it is for ranks and not for a fork server, and also for a module that
            was imported before.
        sign: an attribute of the framework's package. Versions without it need no such hook.
    """

    module: str
    function: str
    without: str
    trains: bool = False
    only_ranks: bool = False
    sign: str = ""

    @property
    def modules(self) -> list[str]:
        """The names that its module can have."""
        return self.module.split("|")

    @property
    def framework(self) -> str:
        """The package of its module."""
        return self.module.partition(".")[0]


class WorkerJob(NamedTuple):
    """The job of one worker, read from its job file.

    Attributes:
        main: the pickled function and its keyword arguments, see run/pickling.py.
        warning_filters: see worker/interpreter/warning_filters.py.
        data: the pickled readers of its datasets; empty if there are none.
        pieces: see messages.Assignment.
        attempt: 1-based number of this launch within the run.
        checkpoints: where they go, and which ones to resume from.
        replacements: our modules that replace other packages, as installed on the driver.
        import_hooks: the functions that change what it imports.
        all_values: whether every rank's value is returned, not rank 0's alone.
        sources: source code that is in no file (cells of a notebook), by its name in tracebacks.
        trace: the start of the path of the trace of its framework's profiler; empty for none.
        commits: the folder for commits, in this host's memory; empty unless the run is elastic.
        mlflow_run: the driver's MLflow run; None without one.
    """

    rank: int
    size: int
    options: Options
    main: bytes
    path: list[str]
    argv: list[str]
    data: bytes = b""
    pieces: dict[str, list[bytes]] | None = None
    attempt: int = 1
    checkpoints: CheckpointPlan = NO_CHECKPOINTS
    replacements: tuple[str, ...] = ()
    import_hooks: tuple[ImportHook, ...] = ()
    all_values: bool = False
    sources: dict[str, str] | None = None
    trace: str = ""
    local_rank: int = 0
    commits: str = ""
    logs: LogSettings | None = None
    warning_filters: tuple[tuple[Any, ...], ...] = ()
    mlflow_run: MLflowRun | None = None

    @property
    def limits(self) -> Limits:
        """The time limits of the run."""
        return self.options.cluster_config.limits

    @property
    def reports(self) -> bool:
        """Whether this rank's reports are recorded."""
        return self.options.debug_config.report_ranks in ("all", self.rank)


class WorkerOutcome(NamedTuple):
    """How ``main`` ended on one rank, written to its outcome file.

    Attributes:
        value: rank 0's pickled return value, or the pickled exception; may be empty.
        error_type: the exception's qualified type.
        traceback: the formatted traceback, without this package's stack frames.
        secondary: the error only says that another rank went away.
        imported: the modules that the worker imported, in order; empty unless
            ``preload_frameworks`` asks for them, or the run is elastic.
    """

    ok: bool
    exit_code: int
    value: bytes = b""
    error_type: str = ""
    traceback: str = ""
    secondary: bool = False
    imported: tuple[str, ...] = ()


class Preparation(NamedTuple):
    """What a fork server reads at its start.

    Attributes:
        owner: the process id of the session; the server ends with it.
        parent, name: the folder of its socket.
    """

    owner: int
    path: list[str]
    modules: list[str]
    parent: str
    name: str
    limits: Limits
    import_hooks: tuple[ImportHook, ...]


class Forking(NamedTuple):
    """What a worker that is forked from a fork server replaces in itself.

    Attributes:
        patience: see :func:`horovod_runner.worker.guard.fork`.
    """

    environment: dict[str, str]
    directory: str
    patience: float


def leave_file(commits: str, attempt: int) -> str:
    """The path of the file that tells the ranks of a host to leave at their next commit."""
    return os.path.join(commits, f"leave-{attempt}")


def remove_leave_files(commits: str, attempt: int) -> None:
    """Remove the files of :func:`leave_file` of attempts before this one."""
    for name in os.listdir(commits):
        before, _, number = name.partition("leave-")
        if not before and number.isdecimal() and int(number) < attempt:
            with suppress(FileNotFoundError):  # another task of this host was quicker
                os.unlink(os.path.join(commits, name))


def imported_file(commits: str) -> str:
    """The path of the file that lists, as JSON, the frameworks that ranks of a host imported."""
    return os.path.join(commits, "imported")


def command(module: str, *arguments: str, directory: str | None = None) -> list[str]:
    """The command line that starts one of our modules in a directory; None for this process's.

    Python's ``-P`` keeps files there from hiding libraries, unless this package itself is imported
    from there.
    """
    home = os.path.abspath(f"{os.path.realpath(__file__)}/../../..")
    safe = os.path.realpath(directory or ".") != home
    return [sys.executable, *(["-P"] if safe else []), "-m", module, *arguments]


def write(descriptor: int, content: WorkerJob | WorkerOutcome | Preparation | Forking) -> None:
    """Pickle ``content`` into a file. Raises an OSError if the disk is full."""
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)


def read(descriptor: int) -> Any:
    """Read what :func:`write` wrote; None if it is incomplete."""
    # With offsets: both processes share the descriptor's position, which is at the file's end.
    size = os.fstat(descriptor).st_size
    data = bytearray()
    while len(data) < size:
        piece = os.pread(descriptor, size - len(data), len(data))
        if not piece:
            break
        data += piece
    try:
        return pickle.loads(data)  # noqa: S301 - see above
    except Exception:
        return None
