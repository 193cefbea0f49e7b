"""The rank that this process runs: what `main` and the functions that it calls know about it.

Every rank imports this at its start: import nothing heavy here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovod_runner.common.limits import DEFAULTS, Limits

if TYPE_CHECKING:
    from horovod_runner.checkpoints.commits import Commits
    from horovod_runner.checkpoints.saver import Saver
    from horovod_runner.wire.job_file import CheckpointPlan, MLflowRun
    from horovod_runner.worker.imports_watch import ImportsWatch
    from horovod_runner.worker.pipe import Pipe
    from horovod_runner.worker.reporter import Reporter


@dataclass(repr=False, eq=False)  # without these methods the class is made in half the time
class RankContext:
    """One rank.

    Attributes without a line here are those of :class:`~horovod_runner.wire.job_file.WorkerJob`.

    Attributes:
        file_parts: the descriptor of the pipe that takes checkpoints to the driver's machine.
        outcome_file: the descriptor of the outcome file; None where no task reads it.
        weight_check: whether the ranks' weights are compared after each epoch.
        start_check: whether they are compared at the first steps, and at growing intervals.
        readers: the pickled readers of the datasets, by the name of the argument; may be empty.
        imports: watches which frameworks are imported; None if nothing is to be preloaded.
        saver: writes checkpoints; None before the first one.
        host_commits: reads and writes commits; None before the first one.
        saved, committed: how often ``save_checkpoint`` and ``commit`` were called.
        notes: how often something of a kind was noted, and something of a kind and key.
    """

    rank: int
    size: int
    attempt: int
    pipe: Pipe
    reporter: Reporter
    checkpoints: CheckpointPlan
    file_parts: int
    outcome_file: int | None = None
    weight_check: bool = False
    start_check: bool = False
    readers: bytes = b""
    pieces: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    local_rank: int = 0
    commits: str = ""
    limits: Limits = DEFAULTS
    mlflow_run: MLflowRun | None = None
    imports: ImportsWatch | None = None
    saver: Saver | None = None
    host_commits: Commits | None = None
    saved: int = 0
    committed: int = 0
    resumed: bool = False
    notes: Counter[str] = field(default_factory=Counter)

    def finish(self) -> None:
        """Wait until everything that ``main`` reported and saved has been sent or written."""
        self.reporter.finish()
        if self.saver is not None:
            self.saver.close()


_current: RankContext | None = None


def enter(rank: RankContext | None) -> None:
    """Set the rank of this process; None when it has ended."""
    global _current  # noqa: PLW0603 - a process runs one rank
    _current = rank


def current() -> RankContext | None:
    """The rank of this process; None outside a rank, for instance in a test of ``main``."""
    return _current
