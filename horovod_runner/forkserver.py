"""What workers are forked off for a warm start: ``python -m horovod_runner.forkserver``.

    frameworks imported, one thread, no device -> asked over its socket -> fork -> worker

It runs nothing of the user's. What a process has that a fork would copy and a new interpreter would
not have, or would have of its own, is seen to here.
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
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from horovod_runner import handover, redirect, warm, worker
from horovod_runner.folder import RunFolder
from horovod_runner.handover import PMI_VARIABLE, RUN_VARIABLE, Forking, Preparation

_LOOK_SECONDS = 5.0  # between two looks at the memory
_MEMORY_SHARE = 0.05  # of the machine's or the container's: less is short
_PATIENCE_SECONDS = 5.0  # for who asks to say what
# Threads of libraries that see to forks themselves (jemalloc's, which comes with Arrow).
_FORKED_WELL = {"jemalloc_bg_thd"}
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def main(arguments: list[str]) -> int:
    """Serve until the end; in a worker's process, be that.

    Args:
        arguments: the descriptors of the :class:`handover.Preparation`, of its folder's lock and
            of the socket in it, and of the other end of what is printed here.
    """
    file, lock, socket_in_it, sink = map(int, arguments)
    plan: Preparation = handover.read(file)
    os.close(file)
    oom_score = _die_first()
    with ExitStack() as held:
        owner = os.pidfd_open(plan.owner)
        held.callback(os.close, owner)
        place = held.enter_context(RunFolder(plan.name, Path(plan.parent)))
        os.close(lock)
        listener = held.enter_context(socket.socket(fileno=socket_in_it))
        sys.path[:] = plan.path
        problem = _import(plan.modules) or _unfit()
        descriptors = _serve(listener, owner, problem, plan.idle_seconds)
        if descriptors is None:
            return 0
        # A worker: what is held belongs to the parent.
        held.pop_all()
        place.leave()
        listener.close()
        for descriptor in (owner, sink):
            os.close(descriptor)
    return _work(descriptors, oom_score)


def _die_first() -> str:
    """Have the kernel take this process first where memory is short; returns what was before."""
    with suppress(OSError):
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text("1000")
        return before
    return ""


def _import(modules: list[str]) -> str:
    redirect.keras_on_import()  # as in a worker, before anything of Horovod is imported
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"the fork server cannot import {name}: {error!r}"
    return ""


def _unfit() -> str:
    """Why this process must not be forked; empty if it may be."""
    probe = os.fork()  # after which libraries that see to forks have ended their threads
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    threads = [Path(each, "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    others = [name for name in threads[1:] if name not in _FORKED_WELL]
    if others:
        return f"the imports left threads that a fork would lose: {', '.join(others)}"
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith(_DEVICES):
                return f"the imports opened {os.readlink(link)}: a device cannot be forked"
    own = os.path.dirname(__file__)
    places = (own, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or not os.path.isabs(file):  # built in, or made up
            continue
        if "-packages" + os.sep not in file and not file.startswith(places):
            return f"the imports took {file}, which is installed nowhere and may change"
    return ""


def _serve(
    listener: socket.socket, owner: int, problem: str, idle_seconds: float
) -> list[int] | None:
    """Answer until the end (None), or be a worker (the descriptors that it is given)."""
    gc.collect()
    gc.freeze()  # what a collection looks at, the child gets a copy of
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for guards
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    poller.register(listener, select.POLLIN)
    asked_at = time.monotonic()
    while True:
        ready = [each for each, _ in poller.poll(min(_LOOK_SECONDS, idle_seconds) * 1000)]
        if owner in ready:
            return None
        if listener.fileno() in ready:
            asked_at = time.monotonic()
            connection, _ = listener.accept()
            with connection, suppress(OSError, ValueError):
                warm.check_peer(connection)
                connection.settimeout(_PATIENCE_SECONDS)
                said, descriptors, _, _ = socket.recv_fds(
                    connection, 64, 32, socket.MSG_CMSG_CLOEXEC
                )
                if said == warm.END:
                    return None
                if problem:
                    connection.send(problem.encode())
                elif said == warm.FORK and _fork(connection):
                    return descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
        elif time.monotonic() - asked_at > idle_seconds or _memory_is_short():
            return None


def _fork(connection: socket.socket) -> bool:
    """Whether this is the child, which may go on."""
    child = os.fork()
    if child:
        descriptor = os.pidfd_open(child)
        with suppress(OSError):  # who asked has gone; so will the child
            socket.send_fds(connection, [str(child).encode()], [descriptor])
        os.close(descriptor)
        return False
    connection.settimeout(None)
    if connection.recv(16) != warm.GO:
        os._exit(0)
    return True


def _memory_is_short() -> bool:
    machine = psutil.virtual_memory()
    if machine.available < _MEMORY_SHARE * machine.total:
        return True
    try:  # the container's (cgroup v2)
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        folder = Path("/sys/fs/cgroup", group.lstrip("/"))
        limit, used = ((folder / f"memory.{name}").read_text() for name in ("max", "current"))
        counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        room = int(limit) - int(used) + int(counters["inactive_file"])
    except (OSError, ValueError, KeyError):  # "max" is no number
        return False
    return room < _MEMORY_SHARE * int(limit)


def _work(descriptors: list[int], oom_score: str) -> int:
    """Be what ``python -m horovod_runner.worker`` is."""
    file, status, stdout, stderr, *given = descriptors
    own, pmi = given[: worker.DESCRIPTORS], given[worker.DESCRIPTORS :]
    forking: Forking = handover.read(file)
    _show_run(forking.environment[RUN_VARIABLE])
    os.environ.clear()
    os.environ.update(forking.environment)
    if pmi:
        os.environ[PMI_VARIABLE] = str(pmi[0])
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in (file, stdout, stderr):
        os.close(descriptor)
    os.chdir(forking.directory)
    os.setsid()
    if oom_score:
        _OOM_SCORE.write_text(oom_score)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    importlib.invalidate_caches()
    _draw_anew()
    return worker.main([*map(str, own)], status)


def _show_run(run_id: str) -> None:
    """Let ``/proc/<pid>/environ`` tell the run: it shows what a process was started with."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place, text = getenv(RUN_VARIABLE.encode()), run_id.encode()
    if place and len(text) == len(warm.NO_RUN):
        ctypes.memmove(place, text, len(text))


def _draw_anew() -> None:
    """Of what a process draws at random when it starts, the child had drawn the same."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
