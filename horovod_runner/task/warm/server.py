"""The fork server: imports frameworks once, and forks workers. ``python -m ...warm.server``.

    frameworks imported, one thread, no device -> request over its socket -> fork -> worker

It runs none of the user's code. After a fork it resets inherited state that a new interpreter would
not have, or would create itself.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from horovod_runner.common.limits import Limits
from horovod_runner.common.options import FRAMEWORKS
from horovod_runner.host.control_groups import memory_is_short
from horovod_runner.host.scratch import RunFolder
from horovod_runner.task.warm import protocol
from horovod_runner.wire import job_file
from horovod_runner.wire.job_file import (
    PMI_VARIABLE,
    RUN_VARIABLE,
    Forking,
    ImportHook,
    Preparation,
)
from horovod_runner.worker import environ_watch, guard
from horovod_runner.worker.imports import hooks
from horovod_runner.worker.main import DESCRIPTORS, run_worker

_CHECK_SECONDS = 5.0  # between two checks of the memory
# Threads of libraries that handle forks themselves (jemalloc's, which comes with Arrow).
_FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class Request(NamedTuple):
    """The result of a task's request.

    Attributes:
        ends: whether the fork server ends.
        worker: in a forked child, the descriptors that it received; None in the fork server.
    """

    ends: bool = False
    worker: list[int] | None = None


def main(arguments: list[str]) -> int:
    """Serve requests until the end; a forked child returns its worker's exit code.

    Args:
        arguments: four descriptors: the file with the :class:`job_file.Preparation`, its folder's
            lock, the listening socket, and the read end of the pipe that output goes to. A fifth
            argument says why no process can be forked, once that is known.
    """
    file, lock, listening, unread = map(int, arguments[:4])
    problem = "".join(arguments[4:])
    plan: Preparation = job_file.read(file)
    oom_score = _end_first_when_memory_is_short()
    with ExitStack() as stack:
        owner = os.pidfd_open(plan.owner)
        stack.callback(os.close, owner)
        folder = stack.enter_context(RunFolder(plan.name, Path(plan.parent), lock=lock))
        listener = stack.enter_context(socket.socket(fileno=listening))
        listener.listen()  # again: the peer credentials of the socket become this process's
        changes: dict[str, str] = {}
        if not problem:
            sys.path[:] = plan.path
            with _ending_with(owner, plan.limits.fork_server_imports):
                changes, problem = _import(plan.modules, plan.import_hooks)
            # One framework brings others: the next run may import any of them.
            known = {*plan.modules, *(name for name in FRAMEWORKS if name in sys.modules)}
            protocol.write_modules(folder.path, sorted(known))
            problem = problem or _unfit()
            if problem:  # restart without the frameworks, to answer all requests with the problem
                again = job_file.command("horovod_runner.task.warm.server", *arguments, problem)
                os.execv(sys.executable, again)  # noqa: S606
        descriptors = _serve(listener, owner, problem, plan.limits)
        if descriptors is None:
            stack.close()
            os._exit(0)  # the end of an interpreter with frameworks takes long
        # In a forked child: the folder and the socket belong to the fork server.
        stack.pop_all()
        folder.release()
        listener.close()
        for descriptor in (file, owner, unread):
            os.close(descriptor)
    return _run_worker(descriptors, oom_score, changes)


def _end_first_when_memory_is_short() -> str:
    """Have the kernel kill this process first when memory runs out; returns the former setting."""
    with suppress(OSError):
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text("1000")
        return before
    return ""


@contextmanager
def _ending_with(owner: int, patience: float) -> Iterator[None]:
    """During the imports: end this process if they take too long, or if the owner has ended."""
    until = time.monotonic() + patience
    poller = select.poll()
    poller.register(owner, select.POLLIN)

    def check(*_: object) -> None:
        if poller.poll(0) or time.monotonic() > until:
            os._exit(1)  # the next run removes the folder

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _import(
    modules: list[str], import_hooks: tuple[ImportHook, ...] = ()
) -> tuple[dict[str, str], str]:
    """Import modules, which hooks change as in a rank.

    Returns the environment variables that the imports set, and why no process can be forked after
    them; empty if one can.
    """
    hooks.install(import_hooks, in_rank=False)
    gc.disable()  # until _serve: imports leave little garbage, and a tenth of their time goes to it
    before = dict(os.environ)
    environ_watch.watch()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            return {}, f"the fork server cannot import {name}: {error!r}"
        asked = sorted(environ_watch.missed & protocol.RANK_VARIABLES)
        if asked:
            return {}, f"the import of {name} reads {', '.join(asked)}, which only a rank has"
    changes = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return changes, ""


def _unfit() -> str:
    """Why this process must not be forked; empty if it may be."""
    probe = os.fork()  # libraries that handle forks end their threads before it
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    tasks = Path("/proc/self/task").iterdir()
    threads = [Path(task, "comm").read_text().strip() for task in tasks]
    lost = [name for name in threads[1:] if name not in _FORK_SAFE_THREADS]
    if lost:
        return f"the imports started threads that a fork would lose: {', '.join(lost)}"
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith(_DEVICES):
                return f"the imports opened {os.readlink(link)}: an open device cannot be forked"
    package = str(Path(__file__).parents[2])
    installed = (package, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or not os.path.isabs(file):  # built in, or made at run time
            continue
        if "-packages" + os.sep not in file and not file.startswith(installed):
            return f"the imports include {file}, which is not an installed package and may change"
    return ""


def _serve(listener: socket.socket, owner: int, problem: str, limits: Limits) -> list[int] | None:
    """Answer requests. Returns None at the end; in a forked child, the worker's descriptors."""
    gc.freeze()  # the garbage collector writes to what it visits, and a child would copy it
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the guards
    listener.setblocking(False)
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    poller.register(listener, select.POLLIN)
    requested_at = time.monotonic()
    while True:
        timeout = min(_CHECK_SECONDS, limits.fork_server_idle)
        ready = [descriptor for descriptor, _ in poller.poll(timeout * 1000)]
        if owner in ready:
            return None
        if listener.fileno() in ready:
            requested_at = time.monotonic()
            with suppress(OSError, ValueError):  # the client has gone, or sent nonsense
                connection, _ = listener.accept()
                with connection:
                    request = _answer(connection, problem, limits.fork_request)
                if request.ends or request.worker is not None:
                    return request.worker
        elif time.monotonic() - requested_at > limits.fork_server_idle or memory_is_short():
            return None


def _answer(connection: socket.socket, problem: str, patience: float) -> Request:
    """Read a request within some seconds, and answer it: with the problem if there is one."""
    protocol.check_peer(connection)
    connection.settimeout(patience)
    message, descriptors, _, _ = socket.recv_fds(connection, 64, 32, socket.MSG_CMSG_CLOEXEC)
    child = None
    try:
        if message == protocol.END:
            return Request(ends=True)
        if problem:
            connection.send(problem.encode()[:4000])
        elif message == protocol.FORK:
            child = os.fork()
            if child == 0:
                _await_go(connection)
                return Request(worker=descriptors)
            pidfd = os.pidfd_open(child)
            try:
                socket.send_fds(connection, [str(child).encode()], [pidfd])
            finally:
                os.close(pidfd)
            child = None  # the client knows it: it waits for the client's GO, or ends
        return Request()
    finally:
        if child:  # the client does not know it
            os.kill(child, signal.SIGKILL)
        if child != 0:
            for descriptor in descriptors:
                os.close(descriptor)


def _await_go(connection: socket.socket) -> None:
    """In a forked child: return if the client still waits for it, otherwise end."""
    try:
        connection.settimeout(None)
        if connection.recv(16) == protocol.GO:
            return
    except BaseException:  # noqa: S110 - the child must never continue as a second server
        pass
    os._exit(0)


def _run_worker(descriptors: list[int], oom_score: str, changes: dict[str, str]) -> int:
    """In a forked child: do what ``python -m horovod_runner.worker.main`` does.

    Args:
        descriptors: those that came with the request.
        oom_score: this process's setting from before the fork server changed it; may be empty.
        changes: the environment variables that the imports set.
    """
    file, stdout, stderr, *given = descriptors
    workers, pmi = given[:DESCRIPTORS], given[DESCRIPTORS:]
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        forking: Forking = job_file.read(file)
        for descriptor in (file, stdout, stderr):
            os.close(descriptor)
        _reset(forking, {PMI_VARIABLE: str(pmi[0])} if pmi else {}, changes)
        if oom_score:
            _OOM_SCORE.write_text(oom_score)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os.write(workers[-1], guard.GuardReport(1).encode())
        os._exit(1)
    return run_worker(workers, forking.patience, forked=True)


def _reset(forking: Forking, pmi: dict[str, str], changes: dict[str, str]) -> None:
    """Replace inherited state with what a new interpreter would have."""
    _show_run(forking.environment[RUN_VARIABLE])
    os.environ.clear()
    os.environ.update({**forking.environment, **pmi, **changes})
    os.chdir(forking.directory)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    importlib.invalidate_caches()
    _reseed()


def _show_run(run_id: str) -> None:
    """Write the run's id to ``/proc/<pid>/environ``, which shows the variables at process start."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address, text = getenv(RUN_VARIABLE.encode()), run_id.encode()
    if address and len(text) == len(protocol.NO_RUN):
        ctypes.memmove(address, text, len(text))


def _reseed() -> None:
    """Draw new random seeds: all forked workers have inherited the same ones."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
