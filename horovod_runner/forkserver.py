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
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from horovod_runner import handover, redirect, variables, warm, worker
from horovod_runner.folder import RunFolder
from horovod_runner.handover import PMI_VARIABLE, RUN_VARIABLE, Forking, Preparation

_LOOK_SECONDS = 5.0  # between two looks at the memory
_MEMORY_SHARE = 0.05  # of the machine's or the container's: less is short
_PATIENCE_SECONDS = 5.0  # for who asks to say what
_IMPORT_SECONDS = 120.0
_GO_ON: list[int] = []
# Threads of libraries that see to forks themselves (jemalloc's, which comes with Arrow).
_FORKED_WELL = {"jemalloc_bg_thd"}
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def main(arguments: list[str]) -> int:
    """Serve until the end; in a worker's process, be that.

    Args:
        arguments: the descriptors of the :class:`handover.Preparation`, of its folder's lock, of
            the socket in that, and of the other end of what is printed here; then, where that is
            known already, why nothing can be forked.
    """
    file, lock, listening, sink = map(int, arguments[:4])
    problem = "".join(arguments[4:])
    plan: Preparation = handover.read(file)
    oom_score = _die_first()
    with ExitStack() as held:
        owner = os.pidfd_open(plan.owner)
        held.callback(os.close, owner)
        place = held.enter_context(RunFolder(plan.name, Path(plan.parent), lock=lock))
        listener = held.enter_context(socket.socket(fileno=listening))
        listener.listen()  # again: so that who asks knows that this process answers
        changes: dict[str, str] = {}
        if not problem:
            sys.path[:] = plan.path
            with _ending_with(owner):
                changes, problem = _import(plan.modules)
            problem = problem or _unfit()
            if problem:  # to say so takes no frameworks
                again = handover.command("horovod_runner.forkserver", *arguments, problem)
                os.execv(sys.executable, again)  # noqa: S606
        descriptors = _serve(listener, owner, problem, plan.idle_seconds)
        if descriptors is None:
            return 0
        # A worker: what is held belongs to the parent.
        held.pop_all()
        place.leave()
        listener.close()
        for descriptor in (file, owner, sink):
            os.close(descriptor)
    return _work(descriptors, oom_score, changes)


def _die_first() -> str:
    """Have the kernel take this process first where memory is short; returns what was before."""
    with suppress(OSError):
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text("1000")
        return before
    return ""


@contextmanager
def _ending_with(owner: int) -> Iterator[None]:
    """End this process while it imports if that takes too long, or if its owner has ended."""
    until = time.monotonic() + _IMPORT_SECONDS
    poller = select.poll()
    poller.register(owner, select.POLLIN)

    def look(*_: object) -> None:
        if poller.poll(0) or time.monotonic() > until:
            os._exit(1)  # the next run sweeps its folder

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _import(modules: list[str]) -> tuple[dict[str, str], str]:
    """What the imports change of the environment, and why nothing can be forked after them."""
    redirect.keras_on_import()  # as in a worker, before anything of Horovod is imported
    before = dict(os.environ)
    variables.watch()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            return {}, f"the fork server cannot import {name}: {error!r}"
        asked = sorted(variables.missed & warm.OF_A_RUN)
        if asked:
            return {}, f"the import of {name} asks for {', '.join(asked)}, which only a rank has"
    changes = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return changes, ""


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
    listener.setblocking(False)
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
            with suppress(OSError, ValueError):  # who asks has gone, or asks for nonsense
                connection, _ = listener.accept()
                with connection:
                    descriptors = _answer(connection, problem)
                if descriptors is not _GO_ON:
                    return descriptors
        elif time.monotonic() - asked_at > idle_seconds or _memory_is_short():
            return None


def _answer(connection: socket.socket, problem: str) -> list[int] | None:
    """Do what is asked; returns what :func:`_serve` is to return, or _GO_ON."""
    warm.check_peer(connection)
    connection.settimeout(_PATIENCE_SECONDS)
    said, descriptors, _, _ = socket.recv_fds(connection, 64, 32, socket.MSG_CMSG_CLOEXEC)
    child = None
    try:
        if said == warm.END:
            return None
        if problem:
            connection.send(problem.encode()[:4000])
        elif said == warm.FORK:
            child = os.fork()
            if child == 0:
                _await_go(connection)
                return descriptors
            pidfd = os.pidfd_open(child)
            try:
                socket.send_fds(connection, [str(child).encode()], [pidfd])
            finally:
                os.close(pidfd)
            child = None  # it goes on, or ends, by itself
        return _GO_ON
    finally:
        if child is None:
            for descriptor in descriptors:
                os.close(descriptor)
        elif child:  # nobody has heard of it
            os.kill(child, signal.SIGKILL)
            for descriptor in descriptors:
                os.close(descriptor)


def _await_go(connection: socket.socket) -> None:
    """In a child: go on if who asked still wants it, else end."""
    try:
        connection.settimeout(None)
        if connection.recv(16) == warm.GO:
            return
    except BaseException:  # noqa: S110 - it must not go on as another server
        pass
    os._exit(0)


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


def _work(descriptors: list[int], oom_score: str, changes: dict[str, str]) -> int:
    """Be what ``python -m horovod_runner.worker`` is."""
    file, status, stdout, stderr, *given = descriptors
    own, pmi = given[: worker.DESCRIPTORS], given[worker.DESCRIPTORS :]
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        forking: Forking = handover.read(file)
        for descriptor in (file, stdout, stderr):
            os.close(descriptor)
        _become(forking, {PMI_VARIABLE: str(pmi[0])} if pmi else {}, changes)
        if oom_score:
            _OOM_SCORE.write_text(oom_score)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os.write(status, b"1")
        os._exit(1)
    return worker.main([*map(str, own)], status)


def _become(forking: Forking, pmi: dict[str, str], changes: dict[str, str]) -> None:
    """Leave nothing of this process that a new one would not have."""
    _show_run(forking.environment[RUN_VARIABLE])
    os.environ.clear()
    os.environ.update({**forking.environment, **pmi, **changes})
    os.chdir(forking.directory)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    importlib.invalidate_caches()
    _draw_anew()


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
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
