"""The process between a task and its worker, which ends all that the worker started.

    task --lifeline--> guard --> worker --> DataLoader workers, shells, daemons

A task may be killed at any time, and the kernel's death signal reaches its child, never a
grandchild. So the worker is forked off a guard, which only waits: for an order, for the task's end
(the lifeline closes by itself), for the worker's. Then it ends the worker's process group and all
orphans, which Linux makes its own children, and ends as the worker did.
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

# The orders on the lifeline; closing it means: kill.
TERMINATE: Final = b"T"
SHOW_STACKS: Final = b"S"
# One that no program uses: a real-time one, or on macOS the terminal's own "status, please".
STACKS_SIGNAL: Final[int] = getattr(signal, "SIGINFO", None) or signal.SIGRTMAX - 2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def fork(
    lifeline: int,
    born: int,
    others: Iterable[int],
    left: Iterable[str] = (),
    status: int | None = None,
) -> None:
    """Return in a forked child, the worker; this process becomes its guard and never returns.

    Args:
        lifeline: the reading end of a pipe whose other end the task alone holds.
        born: the writing end of a pipe that takes the worker's process id, as text.
        others: the worker's descriptors, which the guard closes: they end with the worker.
        left: files to remove after the worker's end.
        status: a pipe that takes the worker's exit code, as text, for who is not this process's
            parent.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken by it
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until the worker can answer it
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    guard, worker = os.getpid(), os.fork()
    if worker:
        _become_leader(worker)
        with suppress(OSError):
            os.write(born, str(worker).encode())
        for descriptor in (born, *others):
            os.close(descriptor)
        ended = _end_all(worker, _wait(worker, lifeline, wake_read))
        for path in left:
            with suppress(OSError):
                os.remove(path)
        code = os.waitstatus_to_exitcode(ended)
        if status is not None:
            with suppress(OSError):
                os.write(status, str(code).encode())
        _mirror(code)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for held in (lifeline, born, wake_read, wake_write, *([] if status is None else [status])):
        os.close(held)
    _become_leader(0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument)


def _become_leader(process: int) -> None:
    """Both sides of the fork do it: neither may go on before it is done."""
    with suppress(OSError):
        os.setpgid(process, process)


def _wait(worker: int, lifeline: int, wake: int) -> int | None:
    """Wait until the worker ends, and return its status; None: end it."""
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
    """Bury who has ended; returns the worker's status if it is among them."""
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
    """Kill and bury everybody that is left; returns the worker's status."""
    _signal_group(worker, signal.SIGKILL)
    while True:
        children = _children()
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            # Without one that was killed there may be none that ends.
            pid, found = os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return status or 0
        if pid == worker:
            status = found


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of an empty group
        os.killpg(leader, number)


def _children() -> list[int]:
    """This process's children, ended ones included; those of the worker's group elsewhere."""
    own, found = os.getpid(), []
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []  # not Linux: there are no adopted ones
    for name in names:
        with suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name, in brackets, may hold anything; the parent's id is second after it.
                parent = file.read().rpartition(b")")[2].split()[1]
            if int(parent) == own:
                found.append(int(name))
    return found


def _mirror(code: int) -> NoReturn:
    """End as the worker did."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's own is enough
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
