"""Where `fit` runs its ranks: on this machine, on Spark, or in a Slurm allocation."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from horovod_runner.common.spark_session import is_on_this_machine
from horovod_runner.common.text import count_text
from horovod_runner.host.gpus import visible_gpus

Place: TypeAlias = Literal["local", "spark", "slurm"]
Ranks: TypeAlias = int | tuple[int, int]


@dataclass(frozen=True)
class Choice:
    """Where the ranks of a training run."""

    np: Ranks  # the argument of HorovodRunner
    options: dict[str, Any]  # its others
    why: str  # a sentence for the user


def choose(ranks: Ranks | None, where: Place | None, data: Any) -> Choice:
    """Choose where to train; the arguments are those of :func:`horovod_runner.fit`.

    Raises:
        TypeError: ``ranks`` is neither a whole number nor two.
        ValueError: ``where`` or ``ranks`` is out of range, or ``ranks`` is needed.
    """
    if where not in (None, *get_args(Place)):
        raise ValueError(f"where must be 'local', 'spark' or 'slurm', not {where!r}")
    _check(ranks)
    spark = _session(data)
    place, reason = _found(spark) if where is None else (where, f"where={where!r}")
    if place == "spark":
        if ranks is None:
            raise ValueError(
                f"the ranks run on Spark ({reason}): give their number, ranks=4, one for each task"
            )
        options = {} if spark is None else {"spark": spark}
        return Choice(ranks, options, f"{_text(ranks)} on Spark, one in each task: {reason}")
    if place == "slurm":
        chosen = ranks or int(os.environ.get("SLURM_NTASKS") or 1)
        text = f"{_text(chosen)} in this Slurm allocation: {reason}"
        return Choice(chosen, {"launcher": "slurm"}, text)
    gpus = len(visible_gpus())
    chosen = ranks or max(1, gpus)
    note = f"; it has {gpus} GPUs" if ranks is None and gpus else ""
    np = (-chosen[0], -chosen[1]) if isinstance(chosen, tuple) else -chosen
    return Choice(np, {}, f"{_text(chosen)} on this machine: {reason}{note}")


def _check(ranks: Ranks | None) -> None:
    if ranks is None:
        return
    numbers = ranks if isinstance(ranks, tuple) else (ranks,)
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"ranks must be a whole number, or the least and the most, not {ranks!r}")
    if min(numbers) < 1 or len(numbers) > 2:
        raise ValueError(
            f"ranks must be 1 or more, or the least and the most, (2, 8), not {ranks}. "
            "where='local' runs them on this machine"
        )


def _session(data: Any) -> Any:
    """The Spark session of the data, or the active one; None if there is none."""
    own = getattr(data, "sparkSession", None)
    if own is not None or "pyspark" not in sys.modules:
        return own
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def _found(spark: Any) -> tuple[Place, str]:
    """The place that is there, and how that was seen."""
    tasks = int(os.environ.get("SLURM_NTASKS") or 1)
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    if "SLURM_JOB_ID" in os.environ and max(tasks, nodes) > 1:
        return "slurm", f"job {os.environ['SLURM_JOB_ID']} has {tasks} tasks on {nodes} nodes"
    if spark is None:
        return "local", "there is no Spark session here, and no Slurm allocation"
    if is_on_this_machine(spark):
        return "local", "the Spark session is on this machine, too"
    return "spark", "its session is on a cluster"


def _text(ranks: Ranks) -> str:
    if isinstance(ranks, tuple):
        return f"{ranks[0]} to {ranks[1]} ranks"
    return count_text(ranks, "rank")
