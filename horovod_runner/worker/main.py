"""The process of one rank: ``python -m horovod_runner.worker.main`` with nine descriptors.

    environment (set by the task) -> forked from its guard -> sys.path and __main__
        -> import hooks -> main(**kwargs), which calls hvd.init() itself -> outcome file

The descriptors are inherited, and their numbers are no secret. This process holds no key of the
channel. What every rank needs is imported here, everything else where it is used: every job waits
for these imports.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.common.options import STALL_CHECK, STALL_WARN_SECONDS
from horovod_runner.errors import is_secondary
from horovod_runner.wire import events, job_file, messages
from horovod_runner.wire.job_file import WorkerJob, WorkerOutcome
from horovod_runner.worker import api, context, guard
from horovod_runner.worker.checks.captured import Captured
from horovod_runner.worker.context import RankContext
from horovod_runner.worker.imports import hooks
from horovod_runner.worker.interpreter import main_module, no_terminal, settings
from horovod_runner.worker.pipe import Pipe
from horovod_runner.worker.reporter import Reporter
from horovod_runner.worker.startup.rank_environment import memory_variables

if TYPE_CHECKING:
    from horovod_runner.worker.imports_watch import ImportsWatch
    from horovod_runner.worker.profiling.framework_profiler import FrameworkProfiler
    from horovod_runner.worker.profiling.profiler import Profiler

DESCRIPTORS: Final = 9
# Their stack frames are left out at the start of a traceback.
_OWN_FILES = (__file__, main_module.__file__, os.path.join(os.path.dirname(__file__), "script.py"))


def run_worker(descriptors: list[int], patience: float, *, forked: bool = False) -> int:
    """Run the rank; returns the exit code.

    Args:
        descriptors: of the job file, the outcome file, the pipes for messages, reports, checkpoints
            and stacks, and the guard's three (:func:`guard.fork`).
        patience: see :func:`guard.fork`.
        forked: whether a fork server forked this process.
    """
    job_input, outcome_file, *pipes, stacks = _fork_from_guard(descriptors, patience)
    _set_up_streams(stacks)
    job: WorkerJob = job_file.read(job_input)
    os.close(job_input)
    rank = _enter_rank(job, outcome_file, pipes)
    _set_up_python(job)
    imports = rank.imports = _watch_imports(job, forked=forked)
    profiler = _start_profiler(job, rank)
    framework_profiler = _start_framework_profiler(job, rank)
    outcome = _call_main(job, rank)
    if framework_profiler is not None:
        framework_profiler.finish(ok=outcome.ok)
    if profiler is not None and (problem := profiler.finish()):
        api.log_to_driver(f"HorovodRunner: this rank's profile is not complete: {problem}")
    if imports is not None:
        quiet = job.options.cluster_config.preload_frameworks is not True  # main's names, or none
        outcome = outcome._replace(imported=imports.preloadable(quiet=quiet))
    # On a failed rank too: the next attempt resumes from what it has saved.
    rank.finish()
    _end_timeline()
    outcome = _write_outcome(outcome_file, outcome)
    if not outcome.ok:
        # At once, before the errors that follow on other ranks: this process takes time to exit.
        rank.pipe.send(
            messages.Failed(job.rank, outcome.exit_code, outcome.error_type, outcome.secondary)
        )
    return outcome.exit_code


def _fork_from_guard(descriptors: list[int], patience: float) -> list[int]:
    """Return in the worker, with its six descriptors; this process becomes its guard."""
    *worker, lifeline, pid_pipe, report_pipe = descriptors
    pmi = os.environ.get(job_file.PMI_VARIABLE)
    inherited = worker if pmi is None else [*worker, int(pmi)]
    leftovers = filter(None, os.environ.pop(job_file.LEFT_VARIABLE, "").split(os.pathsep))
    guards = lifeline, pid_pipe, report_pipe
    guard.fork(*guards, (0, 1, 2, *inherited), leftovers=list(leftovers), patience=patience)
    for descriptor in inherited:
        os.set_inheritable(descriptor, False)
    return worker


def _set_up_streams(stacks: int) -> None:
    """Have stacks written on request and after a crash, and printed lines written at once."""
    faulthandler.enable()  # a crash in native code still shows Python's stack
    os.set_blocking(stacks, False)  # half a stack is better than a worker that waits
    faulthandler.register(guard.STACKS_SIGNAL, file=stacks)
    # By lines as on a terminal: what a rank printed before it died has left its buffers.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The task reads UTF-8, whatever the locale is.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _enter_rank(job: WorkerJob, outcome_file: int, pipes: list[int]) -> RankContext:
    """Make the job's rank the one of this process. The outcome file also serves as two locks."""
    message_pipe, report_pipe, file_parts = pipes
    if job_file.PMI_VARIABLE in os.environ:
        os.environ.update({**memory_variables(), **os.environ})  # the user's own value counts
    rank = RankContext(
        rank=job.rank,
        size=job.size,
        attempt=job.attempt,
        pipe=Pipe(message_pipe, lock_file=outcome_file),
        reporter=Reporter(job.rank, report_pipe, job.reports),
        checkpoints=job.checkpoints,
        file_parts=file_parts,
        outcome_file=outcome_file,
        weight_check=job.options.debug_config.weight_check == "epoch",
        start_check=job.options.debug_config.weight_check is not None,
        readers=job.data,
        pieces=job.pieces or {},
        local_rank=job.local_rank,
        commits=job.commits,
        limits=job.limits,
        mlflow_run=job.mlflow_run,
    )
    context.enter(rank)
    return rank


def _set_up_python(job: WorkerJob) -> None:
    """Make this interpreter look to ``main`` like one that runs the user's script."""
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    main_module.make_main()  # in place of this module
    no_terminal.explain_input()
    hooks.install(job.import_hooks)
    if job.mlflow_run is not None:
        from horovod_runner.worker import mlflow_run

        mlflow_run.enter(job.mlflow_run)
    settings.apply(job.logs, job.warning_filters)
    if job.replacements:
        from horovod_runner.worker.imports import replacements

        replacements.install_where_missing(job.replacements)


def _watch_imports(job: WorkerJob, *, forked: bool) -> ImportsWatch | None:
    """Record which frameworks ``main`` imports, if the next run or attempt is to preload them."""
    wanted = job.options.cluster_config.preload_frameworks
    if not wanted and not job.commits:
        return None
    from horovod_runner.worker.imports_watch import ImportsWatch

    def notify(text: str) -> None:
        if wanted and job.rank == 0:  # the text is the same on all ranks
            api.log_to_driver(text)

    return ImportsWatch(forked=forked, notify=notify)


def _start_profiler(job: WorkerJob, rank: RankContext) -> Profiler | None:
    if not job.options.debug_config.profile:
        return None
    from horovod_runner.worker.profiling.profiler import Profiler

    return Profiler(
        job.rank,
        job.size,
        rank.reporter.send_profile,
        rank.pipe.send,
        _call_main.__code__,
        # Horovod's stall inspector has the same setting.
        stall_seconds=float(os.environ.get(STALL_CHECK) or STALL_WARN_SECONDS),
    )


def _start_framework_profiler(job: WorkerJob, rank: RankContext) -> FrameworkProfiler | None:
    if not job.trace:
        return None
    from horovod_runner.worker.profiling.framework_profiler import FrameworkProfiler

    def fail(reason: str) -> None:
        rank.pipe.send(events.Untraced(job.rank, reason))

    return FrameworkProfiler(job.trace, fail)


def _call_main(job: WorkerJob, rank: RankContext) -> WorkerOutcome:
    try:
        function, kwargs = main_module.load_call(job.main)
        captured = Captured(function) if job.rank == 0 else None
        rank.pipe.send(events.Began(job.rank))
        value = function(**kwargs)
        if (steps := sys.modules.get("horovod_runner.worker.checks.steps")) is not None:
            steps.finish()
        if captured is not None and value is None and not rank.saved:
            captured.warn()
    except BaseException as error:
        _show_sources(job.sources or {})
        return _exited(error) if isinstance(error, SystemExit) else _failed(error, 1)
    try:
        # Elsewhere it need not even be picklable.
        pickled = _pickle(value) if job.rank == 0 or job.all_values else b""
    except Exception as error:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        text = (
            f"main returned a value of type {name} on rank {job.rank}, which cannot be pickled "
            f"({type(error).__name__}: {error}). Return plain values, arrays or a state_dict."
        )
        kind = "horovod_runner.errors.SerializationError"
        return WorkerOutcome(False, 1, error_type=kind, traceback=text)
    return WorkerOutcome(True, 0, pickled)


def _end_timeline() -> None:
    """Have Horovod complete its timeline: at exit it may leave out the last events."""
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is not None and os.environ.get("HOROVOD_TIMELINE"):
            with suppress(Exception):  # already shut down, and its timeline complete
                if horovod.is_initialized():
                    horovod.stop_timeline()


def _write_outcome(descriptor: int, outcome: WorkerOutcome) -> WorkerOutcome:
    """Write the outcome file; returns what was written, which is an error if it has no room."""
    try:
        job_file.write(descriptor, outcome)
    except OSError as error:
        outcome = _no_room(outcome, error)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        job_file.write(descriptor, outcome)
    return outcome


def _no_room(outcome: WorkerOutcome, error: OSError) -> WorkerOutcome:
    """An outcome without a value, for a file without room for what ``main`` returned or raised."""
    # Not tempfile.gettempdir(): it looks for another folder once this one is full.
    folder = os.environ.get("TMPDIR", "the system's folder for temporary files")
    text = (
        f"{outcome.traceback}\nThe {len(outcome.value)} bytes that main returned or raised could "
        f"not be written: {error}. Free memory, raise the limit of a file's size (ulimit -f), or, "
        f"where the system keeps no files in memory, free space in {folder}."
    )
    kind = outcome.error_type or "OSError"
    return WorkerOutcome(False, outcome.exit_code or 1, b"", kind, text.strip())


def _pickle(value: object) -> bytes:
    """Pickle for the driver, which may have no GPU: tensors on one are pickled as on the CPU."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
                moved = obj.detach().cpu()
                if isinstance(obj, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, obj.requires_grad)
                return moved.__reduce_ex__(5)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _show_sources(sources: Mapping[str, str]) -> None:
    """Give tracebacks the source code that is in no file: the cells of a notebook."""
    import linecache

    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _exited(error: SystemExit) -> WorkerOutcome:
    """The outcome of ``sys.exit`` in main: 0 and None are success, as in any script."""
    if error.code is None or error.code == 0:
        return WorkerOutcome(True, 0, _pickle(None))
    code = error.code if isinstance(error.code, int) else 1
    return _failed(error, code)


def _failed(error: BaseException, exit_code: int) -> WorkerOutcome:
    kind = type(error)
    _add_note(error)
    traceback_ = error.__traceback__
    while traceback_ is not None and traceback_.tb_frame.f_code.co_filename in _OWN_FILES:
        traceback_ = traceback_.tb_next
    import traceback

    text = "".join(traceback.format_exception(kind, error, traceback_))
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return WorkerOutcome(False, exit_code, _pickle_error(error), name, text, is_secondary(error))


def _add_note(error: BaseException) -> None:
    """Say what to do if the code was written for Keras 2 or TensorFlow 1."""
    if "keras" in sys.modules or "tensorflow" in sys.modules:
        from horovod_runner.worker import old_keras as notes

        with suppress(Exception):  # the error itself matters more
            notes.add_note(error)


def _pickle_error(error: BaseException) -> bytes:
    """The pickled exception; empty if it cannot be pickled, or must not be raised on the driver."""
    if not isinstance(error, Exception):
        return b""
    try:
        pickled = _pickle(error)
        pickle.loads(pickled)  # noqa: S301 - some exceptions can be pickled but not loaded
    except Exception:
        return b""
    return pickled


if __name__ == "__main__":
    sys.exit(run_worker([*map(int, sys.argv[2:])], float(sys.argv[1])))
