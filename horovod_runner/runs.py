"""Which runs there are on this machine, for ``horovod-runner ps`` and ``stop``.

    <state>/horovod_runner/runs/<run id>.json    what there is to tell; goes with the run
                                <run id>.stop    a FIFO: whoever writes to it cancels the run

<state> is ``$XDG_STATE_HOME`` or ~/.local/state. Processes of a run are known by a variable in
their environment, so what a driver that was killed has left behind is found as well.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from horovod_runner.handover import RUN_VARIABLE
from horovod_runner.result import Run
from horovod_runner.sinks import Sink
from horovod_runner.topology import RankInfo, columns
from horovod_runner.warm import NO_RUN

_GRACE_SECONDS = 5.0
_STOP, _CLOSE = b"x", b"."


class Entry(msgspec.Struct):
    """A run, as its driver tells of it.

    Attributes:
        main: the name of the function.
        where: "local", a Spark master, "slurm job 12".
        host, pid: the driver's.
        created: when the driver's process was, in seconds since the epoch: ids are used again.
        began: when the run was.
        ranks: rank, host and process id of each, once they have started.
    """

    run_id: str
    main: str
    np: int
    where: str
    host: str
    pid: int
    created: float
    began: float
    ranks: list[tuple[int, str, int | None]] = []

    @property
    def alive(self) -> bool | None:
        """Whether its driver is there; None where that is on another host."""
        if self.host != socket.gethostname():
            return None
        with suppress(psutil.Error):
            return abs(psutil.Process(self.pid).create_time() - self.created) < 1.0
        return False


def folder() -> Path:
    """Where the entries are."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "horovod_runner", "runs")


class Registration(Sink):
    """Lists a run while it lasts; use it as a context.

    Where it cannot be listed (a home that cannot be written) the run goes on without.

    Args:
        run: the run.
        main: the name of its function.
        where: see :class:`Entry`.
        cancel: ends the run; called in a thread of its own.
    """

    def __init__(self, run: Run, main: str, where: str, cancel: Callable[[], None]) -> None:
        self._entry = Entry(
            run.run_id,
            main,
            run.np,
            where,
            socket.gethostname(),
            os.getpid(),
            psutil.Process().create_time(),
            run.timings.queued,
        )
        self._cancel = cancel
        self._path: Path | None = None

    def __enter__(self) -> Registration:
        path = None
        try:
            place = folder()
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = place / f"{self._entry.run_id}.json"
            self._write(path)
            fifo = path.with_suffix(".stop")
            os.mkfifo(fifo, 0o600)
            # Also to write: so it never ends, and this end can wake itself.
            self._orders = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, RuntimeError):  # Path.home() where there is none
            if path is not None:
                _forget(self._entry.run_id)
            return self
        self._path = path
        self._thread = threading.Thread(
            target=self._listen, name="horovod_runner-orders", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._path is None:
            return
        os.write(self._orders, _CLOSE)
        self._thread.join()
        os.close(self._orders)
        with suppress(OSError):
            _forget(self._entry.run_id)

    def _listen(self) -> None:
        poller = select.poll()  # select knows no descriptor above 1023
        poller.register(self._orders, select.POLLIN)
        while True:
            poller.poll()
            order = os.read(self._orders, 1)
            if order == _CLOSE:
                return
            if order == _STOP:
                self._cancel()

    def _write(self, path: Path) -> None:
        partial = path.with_suffix(".part")
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(msgspec.json.encode(self._entry))
        partial.replace(path)

    def ranks(self, ranks: list[RankInfo]) -> None:
        """As :class:`~horovod_runner.sinks.Sink`."""
        if self._path is not None:
            self._entry.ranks = [(each.rank, each.host, each.pid) for each in ranks]
            with suppress(OSError):
                self._write(self._path)


class Found(msgspec.Struct):
    """A run that there is, or what is left of one.

    Attributes:
        entry: what its driver told; None where nothing is known but its processes.
        alive: whether its driver is there; None where it is on another host.
        processes: those of the run on this machine, its driver apart.
    """

    run_id: str
    entry: Entry | None
    alive: bool | None
    processes: list[int]


def find() -> list[Found]:
    """All runs of this user, the oldest first."""
    entries = {entry.run_id: entry for entry in _entries()}
    processes = _processes()
    found = []
    for run_id in sorted(entries.keys() | processes.keys()):
        entry = entries.get(run_id)
        alive = False if entry is None else entry.alive
        own = sorted(process.pid for process in processes.get(run_id, ()))
        if entry is not None and alive is False and not own:
            _forget(run_id)  # its driver was killed, and nothing is left
            continue
        found.append(Found(run_id, entry, alive, own))
    return sorted(found, key=lambda each: each.entry.began if each.entry else 0.0)


def _entries() -> Iterable[Entry]:
    for path in folder().glob("*.json"):
        with suppress(OSError, msgspec.MsgspecError):
            yield msgspec.json.decode(path.read_bytes(), type=Entry)


def _processes() -> dict[str, list[psutil.Process]]:
    """This user's processes that belong to a run, by its id."""
    found: dict[str, list[psutil.Process]] = {}
    own = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.uids().real != os.getuid():  # root could read those of others
                continue
            run_id = process.environ().get(RUN_VARIABLE)
            if run_id and run_id != NO_RUN:
                found.setdefault(run_id, []).append(process)
    return found


def _forget(run_id: str) -> None:
    for suffix in ("json", "stop", "part"):
        (folder() / f"{run_id}.{suffix}").unlink(missing_ok=True)


def table(found: Iterable[Found]) -> str:
    """Runs for people, a line each."""
    rows = [["run", "main", "np", "where", "driver", "since", "processes here"]]
    for each in found:
        entry = each.entry
        here = ", ".join(map(str, each.processes)) or "-"
        if entry is None:
            rows.append([each.run_id, "?", "?", "?", "gone or elsewhere", "?", here])
            continue
        gone = " (gone)" if each.alive is False else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.began))
        driver = f"{entry.host}:{entry.pid}{gone}"
        rows.append([each.run_id, entry.main, str(entry.np), entry.where, driver, since, here])
    return columns(rows)


def as_json(found: Iterable[Found]) -> str:
    """Runs for machines."""
    return msgspec.json.format(msgspec.json.encode(list(found))).decode()


def stop(found: Found, seconds: float) -> str:
    """End a run: by its driver if that is there, and then all that is left of it here.

    Args:
        found: which.
        seconds: how long the driver may take.

    Returns:
        What keeps it from having ended; empty if nothing does.
    """
    entry = found.entry
    if entry is not None and found.alive is None and not found.processes:
        return f"its driver is on {entry.host}: run this there"
    if found.alive and _order(found.run_id):
        deadline = time.monotonic() + seconds
        path = folder() / f"{found.run_id}.json"
        while path.exists():
            if time.monotonic() > deadline:
                assert entry is not None  # noqa: S101 - a driver that is there has told of itself
                return (
                    f"its driver (process {entry.pid}) has not ended it within {seconds:g} s; "
                    "--timeout waits longer"
                )
            time.sleep(0.05)
    _end(_processes().get(found.run_id, []))
    if entry is None or not found.alive:
        _forget(found.run_id)
    left = [str(process.pid) for process in _processes().get(found.run_id, [])]
    return f"processes that do not end: {', '.join(left)}" if left else ""


def _order(run_id: str) -> bool:
    try:
        fifo = os.open(folder() / f"{run_id}.stop", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # it ends just now
        return False
    with open(fifo, "wb", buffering=0) as file:
        file.write(_STOP)
    return True


def _end(processes: list[psutil.Process]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)  # one that is stopped hears nothing
                process.send_signal(number)
        _, processes = psutil.wait_procs(processes, timeout=_GRACE_SECONDS)
        if not processes:
            return
