"""Sums up what all ranks measure, for sinks that keep a few numbers every ten seconds.

However many ranks there are, the numbers are those of rank 0, and the least, median and largest
of all ranks. Machines have the names of MLflow's system metrics, with "rank0", "min", "median" or
"max" where MLflow has the name of a node.
"""

from __future__ import annotations

import csv
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

from horovod_runner.sinks.sink import Sink, StepCounter
from horovod_runner.wire.measurements import steps_of

if TYPE_CHECKING:
    from horovod_runner.results.run import Run
    from horovod_runner.wire.measurements import Machine, Profile

_SECONDS: Final = 10.0  # between two summaries
_FLUSH_SECONDS: Final = 1.0


class MeasuringSink(Sink):
    """Base of the sinks that write reports, and every ten seconds what ranks measure."""

    def __init__(self, log_profile: bool) -> None:
        self._log_profile = log_profile

    def of_run(self, active: Any) -> Self:
        """The sink of one run: several runs at once of one runner have no common state.

        A subclass of the user's is the same for all runs: the user may read its attributes.
        ``active`` is MLflow's active run in the thread that called ``run`` or ``start``.
        """
        return copy(self) if type(self).__module__.startswith(f"{__package__}.") else self

    def begin(self, run: Run) -> None:
        """As in :class:`~horovod_runner.sinks.Sink`, like all methods below."""
        self._steps: defaultdict[int, StepCounter] = defaultdict(StepCounter)
        self._summary = Summary()
        self._flushed_at = time.monotonic()

    def profile(self, profile: Profile) -> None:
        if self._log_profile:
            self._summary.add_profile(profile)
            self._write_if_due()
        self._flush_if_due()  # ranks measure all the time: the sink is never idle

    def machine(self, machine: Machine) -> None:
        if self._log_profile:
            self._summary.add_machine(machine)
            self._write_if_due()

    def idle(self) -> None:
        self._flush()
        self._flushed_at = time.monotonic()

    def _write_if_due(self) -> None:
        if time.monotonic() - self._summary.taken_at >= _SECONDS:
            self._write_summary()

    def _flush_if_due(self) -> None:
        if time.monotonic() - self._flushed_at >= _FLUSH_SECONDS:
            self.idle()

    @abstractmethod
    def _write_summary(self) -> None:
        """Write the numbers since the last call."""

    @abstractmethod
    def _flush(self) -> None:
        """Send what was written."""


class Summary:
    """Adds up what ranks measure.

    Attributes:
        steps: the steps of rank 0 so far.
        has_any: whether a rank has measured anything.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.has_any = False
        self.taken_at = time.monotonic()
        self._profiles: dict[int, _Steps] = {}
        self._machines: dict[int, dict[str, float]] = {}
        self._received: dict[int, tuple[float, float]] = {}  # megabytes in all, and those sent

    def add_profile(self, profile: Profile) -> None:
        """Add where a rank's last second went."""
        self.has_any = True
        self._profiles.setdefault(profile.rank, _Steps()).add(profile)
        if profile.rank == 0:
            self.steps += steps_of(profile.steps)

    def add_machine(self, machine: Machine) -> None:
        """Add what a rank's host and processes did in five seconds; the last ones count."""
        self.has_any = True
        numbers = dict(_process_numbers(machine))
        if machine.host_rank in (-1, machine.rank):
            numbers |= _host_numbers(machine)
            received, sent = self._received.get(machine.rank, (0.0, 0.0))
            received += machine.received / 1e6
            sent += (machine.network - machine.received) / 1e6
            self._received[machine.rank] = received, sent
            numbers["network_receive_megabytes"] = received
            numbers["network_transmit_megabytes"] = sent
        self._machines[machine.rank] = numbers

    def take(self) -> dict[str, float]:
        """The numbers since the last call, by name; begins anew."""
        steps = {rank: each.numbers() for rank, each in self._profiles.items()}
        machines = self._machines
        self._profiles, self._machines = {}, {}
        self.taken_at = time.monotonic()
        return {**_over_ranks("profile", steps), **_over_ranks("system", machines)}


class _Steps:
    """The steps of a rank, and where their seconds went."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._steps = 0
        self._spent: dict[str, float] = {}

    def add(self, profile: Profile) -> None:
        self._seconds += profile.seconds
        self._steps += steps_of(profile.steps)
        for name, seconds in profile.spent.items():
            # Where waiting and moving cannot be told apart they count as waiting.
            part = "waiting" if name == "blocked" else name
            self._spent[part] = self._spent.get(part, 0.0) + seconds

    def numbers(self) -> dict[str, float]:
        if not self._steps or not self._seconds:
            return {}
        parts = {**self._spent, "step": self._seconds}
        parts["compute"] = max(0.0, self._seconds - sum(self._spent.values()))
        numbers = {f"{name}_ms": seconds * 1e3 / self._steps for name, seconds in parts.items()}
        return {**numbers, "steps_per_second": self._steps / self._seconds}


def _host_numbers(machine: Machine) -> dict[str, float]:
    seconds = machine.seconds or 1.0
    numbers = {
        "disk_megabytes_per_second": machine.disk / seconds / 1e6,
        "swap_megabytes_per_second": machine.swapped / seconds / 1e6,
    }
    if machine.host_cores:
        numbers["cpu_utilization_percentage"] = 100 * machine.cores / machine.host_cores
    return numbers


def _process_numbers(machine: Machine) -> Iterator[tuple[str, float]]:
    used = machine.memory_limit - machine.free_memory
    yield "process_memory_megabytes", machine.memory / 1e6
    yield "process_cpu_cores", machine.own_cores
    yield "cpu_throttled_percentage", 100 * machine.throttled / (machine.seconds or 1.0)
    if machine.memory_limit:
        yield "system_memory_usage_megabytes", used / 1e6
        yield "system_memory_usage_percentage", 100 * used / machine.memory_limit
    if machine.gpus:
        yield "gpu_utilization_percentage", 100 * machine.gpu_busy
        yield "gpu_memory_usage_megabytes", machine.gpu_memory / 1e6
    if machine.gpu_memory_limit:
        share = machine.gpu_memory / machine.gpu_memory_limit
        yield "gpu_memory_usage_percentage", 100 * share


def _over_ranks(kind: str, by_rank: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The numbers of rank 0, and of all ranks together if there are several."""
    found = {f"{kind}/rank0/{name}": value for name, value in by_rank.get(0, {}).items()}
    if set(by_rank) <= {0}:
        return found
    for name in sorted({name for numbers in by_rank.values() for name in numbers}):
        values = [numbers[name] for numbers in by_rank.values() if name in numbers]
        for what, value in (("min", min(values)), ("median", median(values)), ("max", max(values))):
            found[f"{kind}/{what}/{name}"] = value
    return found


def write_files(run: Run, folder: Path) -> None:
    """Write what a run has measured into a folder.

    The files are ``steps`` and ``machines`` (Parquet, or CSV without pyarrow), ``diagnosis.txt``,
    and a flame graph of rank 0 and of the rank that the diagnosis names.
    """
    profile, diagnosis = run.profile, run.diagnose()
    _write_table(profile.columns(), folder / "steps")
    _write_table(profile.machine_columns(), folder / "machines")
    (folder / "diagnosis.txt").write_text(f"{diagnosis}\n", encoding="utf-8")
    named = [finding.rank for finding in diagnosis.findings if finding.rank is not None]
    for rank in sorted({0, *named[:1]}):
        if profile.lines(rank):
            profile.flame(rank, folder / f"flame_rank{rank}.svg")


def _write_table(columns: Mapping[str, list[Any]], path: Path) -> None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    else:
        parquet.write_table(pa.table(columns), path.with_suffix(".parquet"))
