"""What a task, its worker and its fork server hand each other: the job file, the outcome file.

Pickles, in files without a name, between a process and its own child: whoever writes them runs as
the user already. A worker has pickle loaded in any case, and another codec would take it as long to
import as the rest of its start.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, Final, NamedTuple

from horovod_runner.marker import Marker, Mode

# Where a worker's MPICH finds the socket to who answers it (pmi.py).
PMI_VARIABLE: Final = "PMI_FD"
# The files that a worker's guard removes after it.
LEFT_VARIABLE: Final = "HOROVOD_RUNNER_LEFT"
# Which run a process belongs to: for runs.py, and for people who look.
RUN_VARIABLE: Final = "HOROVOD_RUNNER_RUN"


class CheckpointPlan(NamedTuple):
    """Where a run's checkpoints go, and what it goes on from.

    Attributes:
        folder: the path or URL.
        token: the run's id; also the sign by which a host tells that it sees that folder.
        attempt: of the run, from 1 on.
        next_number: of the next checkpoint in the folder.
        keep, best, mode: as given to HorovodRunner.
        lineage: whether all checkpoints of the folder are this training's, not its own run's only.
        resume: what to go on from, the latest first; empty for a start.
        fetched: the path of the first of them that is whole, where it came over the channel.
    """

    folder: str
    token: str
    attempt: int = 1
    next_number: int = 1
    keep: int | None = None
    best: str | None = None
    mode: Mode = "min"
    lineage: bool = False
    resume: tuple[Marker, ...] = ()
    fetched: str = ""


NO_CHECKPOINTS = CheckpointPlan("", "")


class WorkerJob(NamedTuple):
    """What a worker is told through its job file.

    Attributes:
        main: the pickled function and its keyword arguments.
        path: its ``sys.path``.
        argv: its ``sys.argv``.
        data: the pickled readers of its datasets; empty where there are none.
        pieces: see messages.Assignment.
        size: the number of ranks.
        attempt: of the run, from 1 on.
        reports: whether this rank's reports are wanted.
        checkpoints: where they go.
        check_sync: whether its weights are compared with the other ranks'.
        sparkdl: whether sparkdl's names are this package's.
        sources: the text of what has no file, by its name in tracebacks: a notebook's cells.
        warm: whether what it imports is of use to the next run.
    """

    rank: int
    main: bytes
    path: list[str]
    argv: list[str]
    data: bytes = b""
    pieces: dict[str, list[bytes]] | None = None
    size: int = 1
    attempt: int = 1
    reports: bool = True
    checkpoints: CheckpointPlan = NO_CHECKPOINTS
    check_sync: bool = False
    sparkdl: bool = False
    sources: dict[str, str] | None = None
    warm: bool = False


class WorkerOutcome(NamedTuple):
    """What a worker leaves in its outcome file.

    Attributes:
        ok: ``main`` returned.
        exit_code: the code that the worker means to exit with.
        value: rank 0's pickled return value, or the pickled exception; may be empty.
        error_type: the exception's type, qualified.
        traceback: the formatted traceback, without this package's own frames.
        secondary: the error says only that another rank went away.
        imported: all modules that it has imported, in that order; where they are asked for.
    """

    ok: bool
    exit_code: int
    value: bytes = b""
    error_type: str = ""
    traceback: str = ""
    secondary: bool = False
    imported: tuple[str, ...] = ()


class Preparation(NamedTuple):
    """What a fork server is told at its start.

    Attributes:
        owner: the process that it ends with.
        path: its ``sys.path``.
        modules: what it is to import.
        parent, name: of the folder that it is asked in.
        idle_seconds: after which it ends.
    """

    owner: int
    path: list[str]
    modules: list[str]
    parent: str
    name: str
    idle_seconds: float


class Forking(NamedTuple):
    """What a worker finds that is forked off a fork server.

    Attributes:
        environment: whole.
        directory: the one that it works in.
    """

    environment: dict[str, str]
    directory: str


def command(module: str, *arguments: str, directory: str | None = None) -> list[str]:
    """The command that starts one of our modules in a folder; by default in this process's.

    What lies in that folder must not hide the libraries that we need, unless this package itself is
    found there.
    """
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    safe = os.path.realpath(directory or ".") != home
    return [sys.executable, *(["-P"] if safe else []), "-m", module, *arguments]


def write(descriptor: int, handed: WorkerJob | WorkerOutcome | Preparation | Forking) -> None:
    """Write to the end of a file.

    Raises:
        OSError: the disk is full.
    """
    view = memoryview(pickle.dumps(handed, pickle.HIGHEST_PROTOCOL))
    while view:
        view = view[os.write(descriptor, view) :]


def read(descriptor: int) -> Any:
    """What was written to a file; None if that is not whole."""
    # By position: the descriptor's own, which both processes share, is where the writing ended.
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
