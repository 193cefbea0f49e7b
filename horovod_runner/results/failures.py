"""Builds the error of a failed run from the outcomes of its ranks; pure functions."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
from collections.abc import Mapping, Sequence

from horovod_runner.common.slots import Slot
from horovod_runner.common.stacks import is_library
from horovod_runner.common.text import ranks_text
from horovod_runner.errors import DataError, HorovodRunnerError, LaunchError, RankFailedError
from horovod_runner.results import memory
from horovod_runner.task.process import describe_exit
from horovod_runner.wire.job import Outcome
from horovod_runner.wire.measurements import Machine

#: A file and a line of a traceback.
FRAME = re.compile(r'File "(.+?)", line (\d+)')
# Horovod's errors about ranks that made different calls begin with it.
_MISMATCH = "Mismatched "
_MOST_PLACES = 4
# Modules whose name differs from the name that pip uses.
_DISTRIBUTIONS = {
    "PIL": "Pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}


def first_failed(outcomes: Sequence[Outcome], reported: Sequence[int]) -> Outcome:
    """Return the outcome that caused the failure of the run; at least one rank has failed.

    Args:
        outcomes: the outcomes of all ranks.
        reported: the ranks that failed before the driver stopped anything, in the order of their
            reports. Ranks that failed only because another rank was gone are not among them.
    """
    failed = [outcome for outcome in outcomes if not outcome.ok]
    by_rank = {outcome.rank: outcome for outcome in failed}
    for rank in reported:
        if rank in by_rank:
            return by_rank[rank]
    not_stopped = [outcome for outcome in failed if not outcome.stopped]
    primary = [o for o in not_stopped if o.worker is None or not o.worker.secondary]
    return min(primary or not_stopped or failed, key=lambda outcome: outcome.rank)


def run_error(outcomes: Sequence[Outcome], reported: Sequence[int]) -> Exception:
    """Return the exception to raise for a failed run.

    If a rank raised an exception that can be unpickled and changed here, that is the result. Its
    ``__cause__`` is a :class:`~horovod_runner.errors.RankFailedError` with the remote traceback and
    the details.
    """
    first = first_failed(outcomes, reported)
    if first.problem:
        host = f" on {first.hostname}" if first.hostname else ""
        kind = DataError if first.in_data else LaunchError
        return kind(f"task {first.task} of {len(outcomes)}{host}: {first.problem}")
    returned = [outcome for outcome in outcomes if outcome.ok]
    if returned and first.worker is not None and first.worker.secondary:
        return _early_return(returned, first, outcomes, reported)
    error = _load(first)
    cause = RankFailedError(
        _describe(first, outcomes, reported) + _advice(error, first, outcomes),
        rank=first.rank,
        host=first.hostname,
        pid=first.pid,
        exit_code=first.exit_code,
    )
    if error is None:
        return cause
    where = _where(first, len(outcomes), first.pid)
    try:
        error.__cause__ = cause
        error.add_note(f"[raised on {where}; its traceback is above]")
    except Exception:  # its attributes cannot be set, as those of a frozen dataclass
        return cause
    return error


def _early_return(
    returned: Sequence[Outcome],
    first: Outcome,
    outcomes: Sequence[Outcome],
    reported: Sequence[int],
) -> RankFailedError:
    """Return the exception for ranks that waited for others whose ``main`` had returned."""
    waiting = ranks_text([outcome.rank for outcome in outcomes if not outcome.ok])
    place = _users_line("" if first.worker is None else first.worker.traceback)
    return RankFailedError(
        f"{ranks_text([outcome.rank for outcome in returned])} returned from main while {waiting} "
        f"still waited in a collective, at {place}: the ranks did not call the same collectives. "
        "Give all ranks the same number of batches (drop_last does not ensure that for shards of "
        "unequal length), or call hvd.join() on the ranks that finish first; let all ranks leave a "
        'loop together, if agree(done, "any"): break; and call no collective, nor the training '
        "step, under a condition such as `if hvd.rank() == 0`.\n\n"
        f"{_describe(first, outcomes, reported)}",
        rank=returned[0].rank,
        host=returned[0].hostname,
        pid=returned[0].pid,
        exit_code=0,
    )


def lost_error(
    tasks: Sequence[int],
    slots: Sequence[Slot],
    pids: Mapping[int, int],
    machines: Mapping[int, Machine],
    said: str = "",
) -> HorovodRunnerError:
    """Return the exception for tasks that the driver lost contact with."""
    lost = [slot for slot in slots if slot.task in tasks]
    silent = "The driver no longer receives messages from it."
    stopped = "" if said else " its process is stopped (SIGSTOP, a paused container),"
    why = (
        f"{said or silent} Either its executor was killed (memory, preemption, a node that went "
        f"down),{stopped} or the network to it is cut. Look at the executor's log in Spark's UI, "
        "or at the host's own log."
    )
    if not lost:
        return LaunchError(f"task {tasks[0]} was lost before its rank could start. {why}")
    first = lost[0]
    rest = [slot.rank for slot in lost[1:]]
    others = f" (with it {ranks_text(rest)})" if rest else ""
    pid = pids.get(first.rank)
    machine = machines.get(first.rank)
    use = None if machine is None else memory.last_use(machine)
    measured = memory.last_words(use, was_killed=True)
    if measured:
        why += f" When it was last measured: {measured[0].lower()}{measured[1:]}"
    return RankFailedError(
        f"{_where(first, first.size, pid)} was lost{others}. {why}",
        rank=first.rank,
        host=first.hostname,
        pid=pid,
    )


def _load(outcome: Outcome) -> Exception | None:
    if outcome.worker is None or not outcome.worker.value:
        return None
    try:
        error = pickle.loads(outcome.worker.value)  # noqa: S301 - from a task of this run
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


def _advice(error: Exception | None, outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Return what to do about an error of a known kind; empty for others."""
    if str(error).startswith(_MISMATCH):
        return _advice_on_mismatch(outcomes)
    if isinstance(error, FileNotFoundError):
        return _advice_on_file(error.filename, outcome)
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    if package == "horovod":
        remedy = "Build it there: horovod-runner install"
    else:
        remedy = (
            f"Install it there: pip install {_DISTRIBUTIONS.get(package, package)}. If it is your "
            f"own module, send it with the run: ClusterConfig(ship_modules=[{package}]), "
            f"horovod-runner run --ship-modules {package}"
        )
    return f"\n\nThe Python of {outcome.hostname} has no module {error.name}. {remedy}."


def _advice_on_mismatch(outcomes: Sequence[Outcome]) -> str:
    """Return where the ranks made calls that do not match, and what to do."""
    places: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.worker is not None and _MISMATCH in outcome.worker.traceback:
            places.setdefault(_users_line(outcome.worker.traceback), []).append(outcome.rank)
    some = [f"{ranks_text(ranks)} at {place}" for place, ranks in places.items()][:_MOST_PLACES]
    return (
        f"\n\nThe ranks gave one collective different tensors: {', '.join(some)}. All ranks must "
        "call the same collectives in the same order, with tensors of the same type and shape. If "
        "a rank chooses something by a random number or by its own data, such as a width or a "
        "batch to leave out, let all ranks choose alike: width = agree(width)."
    )


def _users_line(traceback: str) -> str:
    """The last line of code outside of packages in a traceback."""
    frames = FRAME.findall(traceback) or [("unknown", "?")]
    own = [(path, line) for path, line in frames if not is_library(path)]
    return ":".join((own or frames)[-1])


def _advice_on_file(path: object, outcome: Outcome) -> str:
    """Return what to do about a file that exists here, on the driver's machine; otherwise empty."""
    if not isinstance(path, str) or not os.path.exists(path):
        return ""
    later = (
        "another rank may have written it after this one looked for it. Call hvd.barrier() on "
        "every rank after the one that writes."
    )
    is_here = outcome.hostname == socket.gethostname()
    if is_here and os.path.isabs(path):
        return f"\n\n{path} exists now: {later}"
    missing = (
        f"\n\n{path} exists on the driver's machine, but not for the rank on {outcome.hostname}: "
    )
    if is_here:
        return (
            f"{missing}{later} Or the rank works in another folder than the driver, as Spark's "
            "executors do: name the full path."
        )
    return (
        f"{missing}a rank reads its own host's files, and a relative path begins at the folder in "
        "which its executor works. Name the full path of a file that all hosts share, or pass the "
        "data to the run: run(main, train=df)."
    )


def _where(rank: Outcome | Slot, size: int, pid: int | None) -> str:
    gpu = f", GPU {','.join(rank.gpus)}" if rank.gpus else ""
    return f"rank {rank.rank} of {size} on {rank.hostname} (pid {pid}{gpu})"


def _describe(first: Outcome, outcomes: Sequence[Outcome], reported: Sequence[int]) -> str:
    parts = [f"{_where(first, len(outcomes), first.pid)} failed: {_reason(first)}"]
    others = _same_failures(first, outcomes, reported)
    if others:
        parts[0] += f"\n{others}"
    killed = first.worker is None and first.exit_code == -signal.SIGKILL
    if measured := memory.last_words(first.memory, was_killed=killed):
        parts.append(measured)
    if first.worker is not None and first.worker.traceback:
        parts.append(f"Traceback on rank {first.rank}:\n{_indent(first.worker.traceback)}")
    if first.tail:
        lines = "\n".join(first.tail)
        parts.append(f"The last lines that rank {first.rank} printed:\n{_indent(lines)}")
    return "\n\n".join(parts)


def _reason(outcome: Outcome) -> str:
    worker, code = outcome.worker, outcome.exit_code
    if worker is None:
        # Also a clean exit: os._exit(0) before main returned leaves no outcome.
        ended = describe_exit(code) if code is not None else "no exit code"
        if code == -signal.SIGKILL and outcome.memory is not None:
            ended = f"killed by SIGKILL ({memory.killer(outcome.memory)})"
        verb = "was" if ended.startswith("killed") else "ended with"
        return f"its process {verb} {ended} before main returned"
    if worker.error_type == "SystemExit":
        return f"main called sys.exit, exit code {code}"
    return _first_line(worker.traceback, worker.error_type)


def _first_line(traceback: str, error_type: str) -> str:
    """Return the first line of an exception: more lines of its text and its notes may follow."""
    name = re.escape(error_type.rpartition(".")[2])
    begin = rf"^(?:  \| )?((?:[\w.<>]+\.)?{name}(?::.*)?)$"  # "|" is of the tree of a group
    lines = re.findall(begin, traceback, re.MULTILINE) or traceback.strip().splitlines()
    return lines[-1].strip() if lines else error_type


def _same_failures(first: Outcome, outcomes: Sequence[Outcome], reported: Sequence[int]) -> str:
    """Return a line that lists the ranks with the same failure; empty if there are none."""
    # A rank that ended by a signal without a report may have been stopped by its task.
    same = [
        outcome.rank
        for outcome in outcomes
        if outcome is not first
        and (outcome.rank in reported or outcome.worker is not None)
        and _reason(outcome) == _reason(first)
    ]
    return f"The same failure: {ranks_text(same)}." if same else ""


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
