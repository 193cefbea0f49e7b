"""What a failed run says: pure functions from the ranks' outcomes to one error."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

from horovod_runner.errors import DataError, HorovodRunnerError, LaunchError, RankFailedError
from horovod_runner.job import Outcome
from horovod_runner.process import describe_exit
from horovod_runner.topology import Slot, ranks_text


def first_failed(outcomes: Sequence[Outcome], reported: Sequence[int]) -> Outcome:
    """The outcome that caused the others, of a run in which some rank failed.

    Args:
        outcomes: all ranks'.
        reported: the ranks that failed before anything was stopped, in order of their reports,
            those that only felt another rank's end left out.
    """
    failed = [outcome for outcome in outcomes if not outcome.ok]
    by_rank = {outcome.rank: outcome for outcome in failed}
    for rank in reported:
        if rank in by_rank:
            return by_rank[rank]
    themselves = [outcome for outcome in failed if not outcome.stopped]
    primary = [o for o in themselves if o.worker is None or not o.worker.secondary]
    return min(primary or themselves or failed, key=lambda outcome: outcome.rank)


def run_error(outcomes: Sequence[Outcome], reported: Sequence[int]) -> Exception:
    """The exception to raise for a failed run.

    The user's own where a rank raised one and it can be loaded here; its ``__cause__`` is a
    :class:`~horovod_runner.errors.RankFailedError` with the remote traceback and all the rest.
    """
    first = first_failed(outcomes, reported)
    if first.problem:
        host = f" on {first.hostname}" if first.hostname else ""
        kind = DataError if first.in_data else LaunchError
        return kind(f"task {first.task} of {len(outcomes)}{host}: {first.problem}")
    early = [outcome for outcome in outcomes if outcome.ok]
    if early and first.worker is not None and first.worker.secondary:
        return _early_return(early, first, outcomes, reported)
    error = _load(first)
    cause = RankFailedError(
        _describe(first, outcomes, reported) + _advice(error, first),
        rank=first.rank,
        host=first.hostname,
        pid=first.pid,
        exit_code=first.exit_code,
    )
    if error is None:
        return cause
    error.__cause__ = cause
    error.add_note(f"[raised on {_where(first, len(outcomes))}; its traceback is above]")
    return error


def _early_return(
    early: Sequence[Outcome], first: Outcome, outcomes: Sequence[Outcome], reported: Sequence[int]
) -> RankFailedError:
    """The exception for ranks that waited for others which had returned already."""
    waiting = ranks_text([outcome.rank for outcome in outcomes if not outcome.ok])
    return RankFailedError(
        f"{ranks_text([outcome.rank for outcome in early])} returned from main while {waiting} "
        "still waited in a collective: the ranks did not do the same number of steps. Give each "
        "rank as many batches as the others (drop_last does not do that for shards of unequal "
        "length), or let those that are done call hvd.join().\n\n"
        f"{_describe(first, outcomes, reported)}",
        rank=early[0].rank,
        host=early[0].hostname,
        pid=early[0].pid,
        exit_code=0,
    )


def lost_error(
    tasks: Sequence[int], slots: Sequence[Slot], pids: Mapping[int, int], said: str = ""
) -> HorovodRunnerError:
    """The exception for tasks that fell silent.

    Args:
        tasks: their numbers.
        slots: all ranks' slots; empty where they were not assigned yet.
        pids: the workers' process ids by rank.
        said: what the launcher has to say of it.
    """
    lost = [slot for slot in slots if slot.task in tasks]
    why = (
        f"{said or 'Nothing is heard of it any more.'} Either its executor was killed (memory, "
        "preemption, a node that went down) or the network to it is cut: the executor's log in "
        "Spark's UI says more."
    )
    if not lost:
        return LaunchError(f"task {tasks[0]} was lost before its rank could start. {why}")
    first = lost[0]
    rest = [slot.rank for slot in lost[1:]]
    others = f" (with it {ranks_text(rest)})" if rest else ""
    pid = pids.get(first.rank)
    gpus = f", GPU {','.join(first.gpus)}" if first.gpus else ""
    return RankFailedError(
        f"rank {first.rank} of {first.size} on {first.hostname} (pid {pid}{gpus}) was lost{others}."
        f" {why}",
        rank=first.rank,
        host=first.hostname,
        pid=pid,
    )


# Where a module's name is not what pip calls it.
_DISTRIBUTIONS = {
    "PIL": "Pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}


def _load(outcome: Outcome) -> Exception | None:
    if outcome.worker is None or not outcome.worker.value:
        return None
    try:
        error = pickle.loads(outcome.worker.value)  # noqa: S301 - came over Spark's own connection
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


def _advice(error: Exception | None, outcome: Outcome) -> str:
    """What to do about an error whose remedy is this package's business."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    if package == "horovod":
        remedy = "build it there: horovod-runner install"
    else:
        remedy = (
            f"install it there: pip install {_DISTRIBUTIONS.get(package, package)}; or, if it is "
            f"your own, let it go along: HorovodRunner(..., ship_modules=[{package}]), "
            f"horovod-runner run --ship-modules {package}"
        )
    return f"\n\nThe Python of {outcome.hostname} has no {error.name}: {remedy}."


def _where(outcome: Outcome, size: int) -> str:
    gpu = f", GPU {','.join(outcome.gpus)}" if outcome.gpus else ""
    return f"rank {outcome.rank} of {size} on {outcome.hostname} (pid {outcome.pid}{gpu})"


def _describe(first: Outcome, outcomes: Sequence[Outcome], reported: Sequence[int]) -> str:
    parts = [f"{_where(first, len(outcomes))} failed: {_what(first)}"]
    others = _others(first, outcomes, reported)
    if others:
        parts[0] += f"\n{others}"
    if first.worker is not None and first.worker.traceback:
        parts.append(f"Traceback on rank {first.rank}:\n{_indent(first.worker.traceback)}")
    if first.tail:
        lines = "\n".join(first.tail)
        parts.append(f"The last lines that rank {first.rank} printed:\n{_indent(lines)}")
    return "\n\n".join(parts)


def _what(outcome: Outcome) -> str:
    said, code = outcome.worker, outcome.exit_code
    if said is None:
        # A clean exit without an outcome: os._exit(0), which nothing can tell from success.
        ended = describe_exit(code) if code is not None else "no exit code"
        verb = "was" if ended.startswith("killed") else "ended with"
        return f"its process {verb} {ended} before main returned"
    if said.error_type == "SystemExit":
        return f"main called sys.exit, exit code {code}"
    lines = said.traceback.strip().splitlines()
    return lines[-1] if lines else said.error_type


def _others(first: Outcome, outcomes: Sequence[Outcome], reported: Sequence[int]) -> str:
    """One line on the ranks that failed in the same way."""
    # A rank that ended by a signal unreported may have been stopped by us.
    same = [
        outcome.rank
        for outcome in outcomes
        if outcome is not first
        and (outcome.rank in reported or outcome.worker is not None)
        and _what(outcome) == _what(first)
    ]
    return f"In the same way: {ranks_text(same)}." if same else ""


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
