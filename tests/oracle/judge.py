"""Runs programs and judges them: the ranks alike, equal to one process, or told why not."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import re
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from horovod_runner import ClusterConfig, DebugConfig, HorovodRunner
from horovod_runner.errors import CancelledError, HangError
from tests.oracle.programs import Program

#: Of weights of float64 after a few steps; a wrong training differs by far more.
TOLERANCE = 1e-5
#: A training whose weights grow so large multiplies rounding errors, too; ranks stay alike.
_DIVERGED = 100.0
_HANG_SECONDS = 12.0
_DEADLINE = 240.0
# Lines for the user, but for those that each run has.
_TOLD = re.compile(r"^HorovodRunner:(?! *(rank +host|\d+ |controller:|start:|$))|lr_scheduler")
# A busy machine starts some ranks late.
_SLOW = re.compile(
    r"^HorovodRunner: no progress for .*\n(HorovodRunner: ranks? [\d, -]+: .*\n)*", re.MULTILINE
)
_PRELOADED = {
    "torch": ["horovod.torch"],
    "ddp": ["horovod.torch"],
    "lightning": ["horovod.torch"],
    "trainer": ["horovod.torch", "transformers"],
    "keras_torch": ["horovod.torch", "keras"],
    "keras_tensorflow": ["horovod.tensorflow", "keras"],
    "tape": ["horovod.tensorflow"],
}


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: "right"; "told", of a training that has no counterpart in one process; or what is
            wrong.
        details: numbers, or what the user was shown.
    """

    kind: str
    details: str = ""

    @property
    def is_right(self) -> bool:
        return self.kind in ("right", "told")


def judge(program: Program) -> Verdict:
    """Run a program alone, and judge it."""
    (verdict,) = judge_all([program])
    return verdict


def judge_all(programs: Sequence[Program]) -> list[Verdict]:
    """Judge programs of one framework and number of ranks, that are run one after another.

    A program that is not right beside others is run again alone, and that counts.
    """
    expected = [_one_process(program) for program in programs]
    found: dict[int, list[Any] | None] = {}
    if len(programs) > 1:
        together = {
            number: each
            for number, each in enumerate(programs)
            if len(each.phases) == 1 and not each.reads_feed
        }
        found = dict(zip(together, _run_together([*together.values()]), strict=True))
    verdicts = []
    for number, (program, future) in enumerate(zip(programs, expected, strict=True)):
        right, weights = future.result(timeout=_DEADLINE), found.get(number)
        verdict = None if weights is None else _compare(program, weights, right, "")
        if verdict is None or verdict.kind != "right":
            verdict = _judge_alone(program, right)
        verdicts.append(verdict)
    return verdicts


def _judge_alone(program: Program, right: Any) -> Verdict:
    state, weights, shown = None, None, io.StringIO()
    for ranks, begin, end in program.phases:
        runner = _runner(program, ranks)
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            handle = runner.start(
                _run_one, source=program.source, begin=begin, end=end, state=state, **_data(program)
            )
            try:
                weights, state = handle.result(timeout=_DEADLINE)
            except TimeoutError:
                handle.cancel()
                with contextlib.suppress(CancelledError):
                    handle.exception(timeout=30)
                return Verdict("unnamed hang", shown.getvalue()[-1500:])
            except Exception as error:
                return _of_error(program, error, right)
    assert weights is not None
    return _compare(program, weights, right, shown.getvalue())


def _of_error(program: Program, error: Exception, right: Any) -> Verdict:
    told = f"{type(error).__name__}: {error}"
    if program.undefined:
        return Verdict("told", told)
    if isinstance(right, Exception):
        return Verdict("fails in one process, too", f"{right!r}\n\n{told}")
    return Verdict("hang of a right program" if isinstance(error, HangError) else "refused", told)


def _compare(program: Program, weights: list[Any], right: Any, shown: str) -> Verdict:
    shown = "\n".join(line for line in _SLOW.sub("", shown).splitlines() if _TOLD.search(line))
    by_rank = max((_difference(weights[0], other) for other in weights[1:]), default=0.0)
    if by_rank > 0:
        wrong = "accused" if shown else "ranks differ silently"
        return Verdict(
            "told" if shown and program.undefined else wrong, f"by {by_rank:.3g}\n{shown}"
        )
    if isinstance(right, Exception):
        return Verdict("fails in one process, too", str(right))
    settles = bool(numpy.max(numpy.abs(_flat(right))) < _DIVERGED)  # False with NaN, too
    off = _difference(weights[0], right) if settles else 0.0
    if off > TOLERANCE and not program.only_alike:
        wrong = "differs, told" if shown else "differs silently"
        return Verdict("told" if shown and program.undefined else wrong, f"by {off:.3g}\n{shown}")
    if shown and not program.undefined:
        return Verdict("false warning", shown)
    return Verdict("right")


def _difference(one: list[Any], other: list[Any]) -> float:
    a, b = _flat(one), _flat(other)
    if a.shape != b.shape:
        return float("inf")
    both = numpy.isnan(a) & numpy.isnan(b)
    return float(numpy.max(numpy.where(both, 0.0, numpy.abs(a - b)), initial=0.0))


def _flat(weights: list[Any]) -> Any:
    return numpy.concatenate([numpy.ravel(each) for each in weights])


def _runner(program: Program, ranks: int) -> HorovodRunner:
    return HorovodRunner(
        np=-ranks,
        env={"KERAS_BACKEND": backend_of(program.framework)},
        progress=False,
        cluster_config=ClusterConfig(preload_frameworks=_PRELOADED[program.framework]),
        debug_config=DebugConfig(hang_timeout=_HANG_SECONDS),
    )


def backend_of(framework: str) -> str:
    """The backend of Keras in the programs of a framework."""
    return "tensorflow" if framework in ("keras_tensorflow", "tape") else "torch"


def _data(program: Program) -> dict[str, Any]:
    return {"data": _names_of(program.source)["table"]()} if program.reads_feed else {}


def _run_one(source: str, begin: int, end: int, state: Any, **data: Any) -> Any:
    return _names_of(source)["main"](begin, end, state, **data)


def _names_of(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "program.py", "exec"), names)
    return names


def _run_together(programs: Sequence[Program]) -> list[list[Any] | None]:
    """The weights of programs by rank, of those that came to their end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        while (done := len(list(Path(folder).iterdir()))) < len(programs):
            sources = [program.source for program in programs[done:]]
            ends = [program.steps for program in programs[done:]]
            runner = _runner(programs[0], programs[0].ranks)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    runner.run(_run_each, sources=sources, ends=ends, folder=folder, number=done)
            except Exception:
                failed = Path(folder, str(len(list(Path(folder).iterdir()))))
                if int(failed.name) < len(programs):
                    failed.write_bytes(pickle.dumps(None))
        return [
            pickle.loads(Path(folder, str(number)).read_bytes()) for number in range(len(programs))
        ]


def _run_each(sources: list[str], ends: list[int], folder: str, number: int) -> None:
    for source, end in zip(sources, ends, strict=True):
        weights, _ = _run_one(source, 0, end, None)
        if os.environ["RANK"] == "0":
            file = Path(folder, str(number))
            file.with_suffix(".draft").write_bytes(pickle.dumps(weights))
            file.with_suffix(".draft").rename(file)
        number += 1


def _one_process(program: Program) -> Future[Any]:
    """What one process learns: weights, or an exception."""
    return _pool(backend_of(program.framework)).submit(_train_alone, program.source, program.phases)


@cache
def _pool(backend: str) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _set_backend, (backend,))


def _set_backend(backend: str) -> None:
    os.environ["KERAS_BACKEND"] = backend
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def _train_alone(source: str, phases: list[tuple[int, int, int]]) -> Any:
    names = _names_of(source)
    weights, state = None, None
    try:
        for ranks, begin, end in phases:
            weights, state = names["train"](list(range(ranks)), False, begin, end, state)
    except Exception:
        return RuntimeError(traceback.format_exc())
    return weights
