"""The guard: a process between a task and its worker that ends everything the worker started.

    task --lifeline--> guard --> worker --> DataLoader workers, shells, daemons

A task may be killed at any time, and the kernel's death signal reaches a child but no grandchild.
So the worker is forked from a guard, which only waits: for an order, for the task's end (which
closes the lifeline), and for the worker's end. Then it ends the worker's process group and all
orphans, which Linux makes the guard's children, and reports how the worker ended.

A process that SIGKILL does not end (it waits in the kernel for a file system, or belongs to another
user) is left behind after a while: it must not keep the run.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

# The orders on the lifeline; closing the lifeline kills.
TERMINATE: Final = b"T"
SHOW_STACKS: Final = b"S"
# A signal that no program uses.
STACKS_SIGNAL: Final[int] = signal.SIGRTMAX - 2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class GuardReport(NamedTuple):
    """What a guard reports at its end. Without it, the guard itself was killed.

    Attributes:
        exit_code: the worker's, negative for a signal; that of SIGKILL if it has not ended.
        left: the ids of the processes that SIGKILL has not ended.
    """

    exit_code: int
    left: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """As it is written to the pipe."""
        return " ".join(map(str, (self.exit_code, *self.left))).encode()

    @classmethod
    def decode(cls, data: bytes) -> GuardReport:
        """From what was read of the pipe."""
        exit_code, *left = map(int, data.split())
        return cls(exit_code, tuple(left))


def fork(
    lifeline: int,
    pid_pipe: int,
    report_pipe: int,
    worker_descriptors: Iterable[int],
    *,
    leftovers: Iterable[str],
    patience: float,
) -> None:
    """Return in a forked child, the worker. This process becomes its guard and never returns.

    Args:
        lifeline: the read end of a pipe whose other end only the task holds.
        pid_pipe: the write end of a pipe that receives the worker's process id, as text.
        report_pipe: the write end of a pipe that receives a :class:`GuardReport` at the end.
        worker_descriptors: the worker's; the guard closes them, so that they end with the worker.
        leftovers: files to remove after the worker's end.
        patience: seconds to wait for processes to end after SIGKILL.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed to be woken by it
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until the worker can answer it
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    guard, worker = os.getpid(), os.fork()
    if worker:
        _become_leader(worker)
        with suppress(OSError):
            os.write(pid_pipe, str(worker).encode())
        for descriptor in (pid_pipe, *worker_descriptors):
            os.close(descriptor)
        report = _end_all(worker, _wait(worker, lifeline, wake_read), wake_read, patience)
        for path in leftovers:
            with suppress(OSError):
                os.remove(path)
        with suppress(OSError):  # the task has gone
            os.write(report_pipe, report.encode())
        os._exit(0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (lifeline, pid_pipe, report_pipe, wake_read, wake_write):
        os.close(descriptor)
    _become_leader(0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    ctypes.CDLL(None).prctl(option, argument)


def _become_leader(process: int) -> None:
    """Put the worker into a process group. Both sides of the fork do it before they continue."""
    with suppress(OSError):
        os.setpgid(process, process)


def _wait(worker: int, lifeline: int, wake: int) -> int | None:
    """Carry out the task's orders; returns the worker's wait status, None if it is to be killed."""
    poller = select.poll()
    for descriptor in (lifeline, wake):
        poller.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if wake in ready:
            os.read(wake, 4096)
        if lifeline in ready:
            order = os.read(lifeline, 1)
            if order == TERMINATE:
                _signal_group(worker, signal.SIGTERM)
            elif order == SHOW_STACKS:
                os.kill(worker, STACKS_SIGNAL)
            else:
                return None
        status, _ = _reap(worker)
        if status is not None:
            return status


def _reap(worker: int) -> tuple[int | None, bool]:
    """Reap children that have ended; returns the worker's wait status, and whether others live."""
    status = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == worker:
            status = wait_status


def _end_all(worker: int, status: int | None, wake: int, patience: float) -> GuardReport:
    """Kill and reap all that the worker has started, orphans included, within some seconds."""
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    until = time.monotonic() + patience
    _signal_group(worker, signal.SIGKILL)
    while True:
        living = _descendants()
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended, others = _reap(worker)
        status = status if ended is None else ended
        seconds = until - time.monotonic()
        if not others or seconds <= 0:
            code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            return GuardReport(int(code), tuple(living) if others else ())
        if poller.poll(seconds * 1000):
            os.read(wake, 4096)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _descendants() -> list[int]:
    """The ids of the processes below this one, without ended ones."""
    names = [name for name in os.listdir("/proc") if name.isdigit()]
    children: dict[int, list[int]] = {}
    ended = set()
    for name in names:
        with suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name, in brackets, may hold anything; state and parent's id come after it.
                state, parent, *_ = file.read().rpartition(b")")[2].split()
            children.setdefault(int(parent), []).append(int(name))
            if state == b"Z":
                ended.add(int(name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return [pid for pid in found[1:] if pid not in ended]
