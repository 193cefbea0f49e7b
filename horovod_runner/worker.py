"""The process of one rank: ``python -m horovod_runner.worker`` and eight descriptors.

    environment (set by the task) -> forked off its guard -> sys.path and __main__
        -> GPU pinned on import -> main(**kwargs), which calls hvd.init() itself -> outcome file

The descriptors are inherited, their numbers nothing secret. This process holds no key of the
channel. It imports what every rank needs and the rest where it is needed: each module here is
waited for by every job.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from horovod_runner import context, gpu, guard, handover, messages, pipe, redirect
from horovod_runner.context import Rank
from horovod_runner.errors import is_secondary
from horovod_runner.frames import frame
from horovod_runner.handover import WorkerJob, WorkerOutcome
from horovod_runner.reports import Reporter

if TYPE_CHECKING:
    from horovod_runner.warm import Imports

DESCRIPTORS: Final = 8
# Whose frames stand before the user's own in each traceback.
_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "script.py"))


def main(arguments: list[str], status: int | None = None) -> int:
    """Run the rank; returns the exit code.

    Args:
        arguments: the descriptors of the job file, the outcome file, the pipes for messages,
            reports, checkpoints and stacks, and the guard's two (:func:`guard.fork`).
        status: see there.
    """
    *own, lifeline, born = map(int, arguments)
    its_pmi = os.environ.get(handover.PMI_VARIABLE)
    pmi = [] if its_pmi is None else [int(its_pmi)]
    left = list(filter(None, os.environ.pop(handover.LEFT_VARIABLE, "").split(os.pathsep)))
    guard.fork(lifeline, born, (0, 1, 2, *own, *pmi), left, status)
    for descriptor in (*own, *pmi):
        os.set_inheritable(descriptor, False)
    job_file, outcome_file, frames, reports, bulk, stacks = own
    faulthandler.enable()  # a crash in native code still shows Python's stack
    os.set_blocking(stacks, False)  # better half a stack than a worker that waits
    faulthandler.register(guard.STACKS_SIGNAL, file=stacks)
    _print_lines_at_once()
    job: WorkerJob = handover.read(job_file)
    os.close(job_file)
    way_out = pipe.Pipe(job.rank, frames, outcome_file)
    pipe.enter(way_out)
    context.data.readers, context.data.pieces = job.data, job.pieces or {}
    reporter = Reporter(job.rank, reports, job.reports)
    rank = Rank(
        job.rank,
        job.size,
        job.attempt,
        reporter,
        job.checkpoints,
        bulk,
        check_sync=job.check_sync,
    )
    context.enter(rank)
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    _make_user_main()
    gpu.pin_on_import()
    redirect.keras_on_import()
    if job.sparkdl:
        from horovod_runner import sparkdl

        sparkdl.install_where_missing()
    imports = _watch_imports(job, forked=status is not None) if job.warm else None
    outcome = _run(job, way_out)
    if imports is not None:
        outcome = outcome._replace(imported=imports.of_use())
    # A failed rank too: what it has saved is what the next attempt goes on from.
    rank.finish()
    _end_timeline()
    try:
        handover.write(outcome_file, outcome)
    except OSError as error:
        outcome = _no_room(outcome, error)
        os.ftruncate(outcome_file, 0)
        os.lseek(outcome_file, 0, os.SEEK_SET)
        handover.write(outcome_file, outcome)
    if not outcome.ok:
        # At once, ahead of the survivors' errors: the rest of this process's end takes time.
        failed = messages.Failed(job.rank, outcome.exit_code, outcome.error_type, outcome.secondary)
        way_out.send(frame(messages.encode(failed)))
    return outcome.exit_code


def _watch_imports(job: WorkerJob, *, forked: bool) -> Imports:
    from horovod_runner.warm import Imports

    def tell(text: str) -> None:
        if job.rank == 0:  # it is the same on all
            context.log_to_driver(text)

    return Imports(forked=forked, tell=tell)


def _print_lines_at_once() -> None:
    """As on a terminal: what a rank printed before it died has left it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The watcher reads UTF-8, whatever the locale is here.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _make_user_main() -> None:
    """Put an empty ``__main__`` in this module's place, for what comes from the user's."""
    sys.modules["__main__"] = types.ModuleType("__main__")


def _run(job: WorkerJob, way_out: pipe.Pipe) -> WorkerOutcome:
    try:
        function, kwargs = pickle.loads(job.main)  # noqa: S301 - from our own driver
        _share_globals(function)
        way_out.send(frame(messages.encode(messages.Began(job.rank))))
        value = function(**kwargs)
    except BaseException as error:
        _show_sources(job.sources or {})
        return _exited(error) if isinstance(error, SystemExit) else _failed(error, 1)
    try:
        # Only rank 0's value is returned: the others' need not even be picklable.
        pickled = _pickle(value) if job.rank == 0 else b""
    except Exception as error:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        text = (
            f"main returned a value of type {name} on rank 0, which cannot be pickled "
            f"({type(error).__name__}: {error}). Return plain values, arrays or a state_dict."
        )
        kind = "horovod_runner.errors.SerializationError"
        return WorkerOutcome(False, 1, error_type=kind, traceback=text)
    return WorkerOutcome(True, 0, pickled)


def _end_timeline() -> None:
    """Have Horovod write its timeline to the end; what it has at the exit it may leave out."""
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is not None and os.environ.get("HOROVOD_TIMELINE"):
            with suppress(Exception):  # it is shut down already, and with it the timeline
                if horovod.is_initialized():
                    horovod.stop_timeline()


def _no_room(outcome: WorkerOutcome, error: OSError) -> WorkerOutcome:
    """What is left to say where the disk has no room for what ``main`` returned or raised."""
    # Not tempfile's word: it looks for another folder once this one is full.
    folder = os.environ.get("TMPDIR", "the system's folder for temporary files")
    text = (
        f"{outcome.traceback}\nThe {len(outcome.value)} bytes that main returned or raised could "
        f"not be written to {folder}: {error}. Free space there, or set TMPDIR to another folder."
    )
    kind = outcome.error_type or "OSError"
    return WorkerOutcome(False, outcome.exit_code or 1, b"", kind, text.strip())


def _pickle(value: object) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


def _share_globals(function: Any) -> None:
    """Make what ``main`` uses of the user's ``__main__`` importable from it.

    So that ``pickle`` and ``torch.save`` find classes defined in a notebook or script.
    """
    own = getattr(function, "__globals__", {})
    if getattr(function, "__module__", None) == "__main__":
        for name, value in own.items():
            if not name.startswith("__"):
                setattr(sys.modules["__main__"], name, value)


def _show_sources(sources: Mapping[str, str]) -> None:
    """For tracebacks through what has no file."""
    import linecache

    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _exited(error: SystemExit) -> WorkerOutcome:
    """``sys.exit`` in main: 0 and None end well, as in any script."""
    if error.code is None or error.code == 0:
        return WorkerOutcome(True, 0, _pickle(None))
    code = error.code if isinstance(error.code, int) else 1
    return _failed(error, code)


def _failed(error: BaseException, exit_code: int) -> WorkerOutcome:
    kind = type(error)
    own_frames = error.__traceback__
    while own_frames is not None and own_frames.tb_frame.f_code.co_filename in _OWN_FILES:
        own_frames = own_frames.tb_next
    import traceback

    text = "".join(traceback.format_exception(kind, error, own_frames))
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return WorkerOutcome(False, exit_code, _pickle_error(error), name, text, is_secondary(error))


def _pickle_error(error: BaseException) -> bytes:
    """Empty for what must not be raised on the driver (SystemExit) or does not come through."""
    if not isinstance(error, Exception):
        return b""
    try:
        pickled = _pickle(error)
        pickle.loads(pickled)  # noqa: S301 - some exceptions pickle and then do not load
    except Exception:
        return b""
    return pickled


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
