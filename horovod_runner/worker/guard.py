"""The guard: a process between a task and its worker that ends everything the worker started.

    task --lifeline--> guard --> worker --> DataLoader workers, shells, daemons

A task may be killed at any time, and the kernel's death signal reaches a child but no grandchild.
So the worker is forked from a guard, which only waits: for an order, for the task's end (which
closes the lifeline), and for the worker's end. Then it ends the worker's process group and all
orphans, which Linux makes the guard's children, and exits as the worker did.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NoReturn

# The orders on the lifeline; closing the lifeline kills.
TERMINATE: Final = b"T"
SHOW_STACKS: Final = b"S"
# A signal that no program uses: a real-time one, or on macOS the terminal's status request.
STACKS_SIGNAL: Final[int] = getattr(signal, "SIGINFO", None) or signal.SIGRTMAX - 2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def fork(
    lifeline: int,
    pid_pipe: int,
    worker_descriptors: Iterable[int],
    leftovers: Iterable[str] = (),
    status: int | None = None,
) -> None:
    """Return in a forked child, the worker. This process becomes its guard and never returns.

    Args:
        lifeline: the read end of a pipe whose other end only the task holds.
        pid_pipe: the write end of a pipe that receives the worker's process id, as text.
        worker_descriptors: the worker's; the guard closes them, so that they end with the worker.
        leftovers: files to remove after the worker's end.
        status: a pipe that receives the worker's exit code, as text, for a task that is not this
            process's parent; None without.
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
        _guard(worker, lifeline, wake_read, leftovers, status)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    guards_own = [lifeline, pid_pipe, wake_read, wake_write]
    for descriptor in (*guards_own, *([] if status is None else [status])):
        os.close(descriptor)
    _become_leader(0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _guard(
    worker: int, lifeline: int, wake: int, leftovers: Iterable[str], status: int | None
) -> NoReturn:
    """Wait for the worker's end, end what it started, and exit as it did."""
    wait_status = _end_all(worker, _wait(worker, lifeline, wake))
    for path in leftovers:
        with suppress(OSError):
            os.remove(path)
    code = os.waitstatus_to_exitcode(wait_status)
    if status is not None:
        with suppress(OSError):
            os.write(status, str(code).encode())
    _exit_like(code)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument)


def _become_leader(process: int) -> None:
    """Put the worker into a process group. Both sides of the fork do it before they continue."""
    with suppress(OSError):
        os.setpgid(process, process)


def _wait(worker: int, lifeline: int, wake: int) -> int | None:
    """Wait until the worker ends, and carry out the task's orders.

    Args:
        worker: its process id.
        lifeline: where the orders come from.
        wake: a pipe that is readable when a child has ended.

    Returns:
        The worker's wait status; None if the worker is to be killed.
    """
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
        status = _reap(worker)
        if status is not None:
            return status


def _reap(worker: int) -> int | None:
    """Reap the children that have ended; returns the worker's wait status if it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == worker:
            return status
        if pid == 0:
            return None


def _end_all(worker: int, status: int | None) -> int:
    """Kill and reap all children, adopted ones included; returns the worker's wait status."""
    _signal_group(worker, signal.SIGKILL)
    while True:
        children = _children()
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            # Waits only if a child was killed: otherwise perhaps none ever ends.
            pid, wait_status = os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return status or 0
        if pid == worker:
            status = wait_status


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS raises EPERM for an empty group
        os.killpg(leader, number)


def _children() -> list[int]:
    """The process ids of this process's children, ended ones included; empty outside Linux."""
    guard, children = os.getpid(), []
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []  # not Linux: orphans are not adopted there
    for name in names:
        with suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name, in brackets, may hold anything; the parent's id is second after it.
                parent = file.read().rpartition(b")")[2].split()[1]
            if int(parent) == guard:
                children.append(int(name))
    return children


def _exit_like(code: int) -> NoReturn:
    """Exit with an exit code, or by the same signal if it is negative."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's core dump is enough
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
