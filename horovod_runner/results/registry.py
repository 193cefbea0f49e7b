"""Lists the runs of this user on this machine, and stops them: ``horovod-runner ps`` and ``stop``.

    <state>/horovod_runner/runs/<run id>.json    the run's entry; deleted when the run ends
                                <run id>.stop    a FIFO: "x" cancels the run, "w" writes its log

<state> is ``$XDG_STATE_HOME`` or ~/.local/state. An environment variable marks the processes of a
run, so processes that a killed driver left behind are listed as well.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from horovod_runner.common.text import align_columns, spans
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.host.processes import wait_for_end
from horovod_runner.results import saved_run
from horovod_runner.results.private_files import state_folder
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunState
from horovod_runner.task.warm.protocol import NO_RUN
from horovod_runner.wire.job_file import RUN_VARIABLE

_GRACE_SECONDS = 5.0
#: What is written to a run's FIFO.
STOP, WRITE = b"x", b"w"


class Entry(msgspec.Struct):
    """The file that a driver writes about its run.

    Attributes:
        where: "local", a Spark master, or "slurm job 12".
        born: tells the driver from a later process with its id, see :func:`born`.
        ranks: (rank, host, process id) of all ranks, once they have started.
    """

    run_id: str
    main: str
    np: int | tuple[int, int]
    where: str
    host: str
    pid: int
    born: str
    began: float
    ranks: list[tuple[int, str, int | None]] = []

    @property
    def alive(self) -> bool | None:
        """Whether the driver runs; None if it is on another host."""
        if self.host != socket.gethostname():
            return None
        return self.born != "" and self.born == born(self.pid)


def born(pid: int) -> str:
    """The boot in which a process was created, and the ticks since it; empty without a process."""
    with suppress(OSError, IndexError):
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {ticks}"
    return ""


_decode_entry: Final = msgspec.json.Decoder(Entry).decode


def folder() -> Path:
    """Return the folder of the entries."""
    return state_folder() / "runs"


class ListedRun(msgspec.Struct):
    """A run, or the remains of one.

    Attributes:
        entry: the file that its driver wrote; None if only processes are left.
        alive: whether its driver runs; None if the driver is on another host.
        processes: ids of the run's processes on this machine, without its driver.
    """

    run_id: str
    entry: Entry | None
    alive: bool | None
    processes: list[int]


def find(
    listed: Callable[[], Mapping[str, Sequence[psutil.Process]]] | None = None,
) -> list[ListedRun]:
    """Return all runs of this user, oldest first."""
    entries = {entry.run_id: entry for entry in _entries()}
    processes = (listed or _processes)()
    runs = []
    for run_id in sorted(entries.keys() | processes.keys()):
        entry = entries.get(run_id)
        alive = False if entry is None else entry.alive
        pids = sorted(process.pid for process in processes.get(run_id, ()))
        if entry is not None and alive is False and not pids:
            forget(run_id)  # its driver was killed, and no process is left
            continue
        runs.append(ListedRun(run_id, entry, alive, pids))
    return sorted(runs, key=lambda run: run.entry.began if run.entry else 0.0)


def running(start: str = "") -> list[str]:
    """Return the ids of this user's runs whose driver runs on this machine, the latest first."""
    entries = [entry for entry in _entries() if entry.run_id.startswith(start) and entry.alive]
    return [entry.run_id for entry in sorted(entries, key=lambda entry: -entry.began)]


def status_now(run: Run | RunState) -> str:
    """Return the status of a run whose record may be older than its end.

    Returns:
        The status of the record; "lost" if that is "running", but no driver of the run is on this
        machine, or on another one with the same home folder.
    """
    if run.status != "running" or (isinstance(run, Run) and run.recorded is None):
        return run.status
    with suppress(OSError, HorovodRunnerError, msgspec.MsgspecError):
        entry = _decode_entry((folder() / f"{run.run_id}.json").read_bytes())
        return "lost" if entry.alive is False else "running"
    return "lost"  # its entry was removed, or is not on this machine


def write_log(run_id: str, seconds: float = 10.0) -> bool:
    """Have the driver of a run write its log; returns whether it has, or has ended, in time."""
    path = saved_run.path_of(run_id)
    before = version(path)
    if not ask_to_write(run_id):
        return path.exists()
    deadline = time.monotonic() + seconds
    while version(path) == before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ask_to_write(run_id: str) -> bool:
    """Ask the driver of a run to write its log, without waiting; returns whether there is one."""
    return _tell_driver(run_id, WRITE)


def version(path: Path) -> tuple[int, int] | None:
    """Differs before and after a file was written; None if there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_ino
    return None


def _entries() -> Iterable[Entry]:
    for path in folder().glob("*.json"):
        with suppress(OSError, msgspec.MsgspecError):
            yield _decode_entry(path.read_bytes())


def _processes() -> dict[str, list[psutil.Process]]:
    """Return this user's processes that belong to a run, by run id."""
    by_run: dict[str, list[psutil.Process]] = {}
    callers = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid in callers or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.uids().real != os.getuid():  # root could read the processes of others
                continue
            run_id = process.environ().get(RUN_VARIABLE)
            if run_id and run_id != NO_RUN:
                by_run.setdefault(run_id, []).append(process)
    return by_run


def forget(run_id: str) -> None:
    """Delete a run's files here, except its record."""
    unfinished = folder().glob(f".{run_id}.json.*")
    for path in (folder() / f"{run_id}.json", folder() / f"{run_id}.stop", *unfinished):
        path.unlink(missing_ok=True)


def find_one(runs: Iterable[ListedRun], start: str) -> ListedRun:
    """The run whose id begins so.

    Raises:
        HorovodRunnerError: there is none, or there are several.
    """
    runs = list(runs)
    chosen = [run for run in runs if start and run.run_id.startswith(start)]
    if not chosen:
        there = ", ".join(run.run_id for run in runs) or "none"
        raise HorovodRunnerError(f"no run {start or saved_run.NO_ID} here; there are: {there}")
    if len(chosen) > 1:
        raise HorovodRunnerError(f"{start} may be {', '.join(run.run_id for run in chosen)}")
    return chosen[0]


def table(runs: Iterable[ListedRun]) -> str:
    """Format runs as a table for people, one line per run; "no runs" if there are none."""
    rows = [["run", "main", "np", "where", "driver", "since", "processes here"]]
    for run in runs:
        entry = run.entry
        pids = spans(run.processes) or "-"
        if entry is None:
            rows.append([run.run_id, "?", "?", "?", "gone or elsewhere", "?", pids])
            continue
        gone = " (gone)" if run.alive is False else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.began))
        driver = f"{entry.host}:{entry.pid}{gone}"
        rows.append([run.run_id, entry.main, str(entry.np), entry.where, driver, since, pids])
    return align_columns(rows) if len(rows) > 1 else "no runs"


def as_json(runs: Iterable[ListedRun]) -> str:
    """Format runs as JSON."""
    return msgspec.json.format(msgspec.json.encode(list(runs))).decode()


def stop(run: ListedRun, seconds: float) -> str:
    """End a run: first through its driver if that runs, then by signals to what is left here.

    Returns:
        Why the run has not ended; empty if it has.
    """
    entry = run.entry
    if entry is not None and run.alive is None and not run.processes:
        return f"its driver is on {entry.host}: run this command there"
    if run.alive and _tell_driver(run.run_id, STOP):
        deadline = time.monotonic() + seconds
        path = folder() / f"{run.run_id}.json"
        while path.exists():
            if time.monotonic() > deadline:
                assert entry is not None  # noqa: S101 - a driver that runs has written an entry
                return (
                    f"its driver (process {entry.pid}) did not end it within {seconds:g} s: set "
                    "--timeout to wait longer"
                )
            time.sleep(0.05)
    _end(_processes().get(run.run_id, []))
    if entry is None or not run.alive:
        forget(run.run_id)
    remaining = [str(process.pid) for process in _processes().get(run.run_id, [])]
    return f"processes that do not end: {', '.join(remaining)}" if remaining else ""


def _tell_driver(run_id: str, command: bytes) -> bool:
    try:
        fifo = os.open(folder() / f"{run_id}.stop", os.O_WRONLY | os.O_NONBLOCK)
        with open(fifo, "wb", buffering=0) as file:
            file.write(command)
    except OSError:  # the run is ending right now
        return False
    return True


def _end(processes: list[psutil.Process]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)  # a stopped process does not act on SIGTERM
                process.send_signal(number)
        processes = wait_for_end(processes, _GRACE_SECONDS)
        if not processes:
            return
