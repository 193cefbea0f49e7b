"""What sinks get of the measurements of all ranks: few numbers, however many ranks there are."""

from __future__ import annotations

import csv
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from horovod_runner.results.run import Run
from horovod_runner.sinks.sink import Sink
from horovod_runner.sinks.summary import Summary, write_files
from horovod_runner.wire.events import Began, Event, Output, Report
from horovod_runner.wire.measurements import Lines, Machine, Profile
from tests.events import telling_threads


def profile(rank: int, **spent: float) -> Profile:
    return Profile(rank, 100.0, 1.0, {"optimizer": 10, "batches": 11}, spent)


def machine(rank: int, host_rank: int = -1, **fields: float) -> Machine:
    known = {"host_cores": 8, "memory_limit": 1000, "free_memory": 250, "host_rank": host_rank}
    return structs.replace(Machine(rank, 100.0, 5.0), **{**known, **fields})


def test_one_rank_has_its_own_numbers() -> None:
    summary = Summary()
    for _ in range(2):
        summary.add_profile(profile(0, data=0.2, waiting=0.1))
    assert summary.steps == 20
    assert summary.take() == {
        "profile/rank0/step_ms": 100.0,
        "profile/rank0/data_ms": pytest.approx(20.0),
        "profile/rank0/waiting_ms": pytest.approx(10.0),
        "profile/rank0/compute_ms": pytest.approx(70.0),
        "profile/rank0/steps_per_second": 10.0,
    }
    assert summary.take() == {}
    summary.add_profile(Profile(0, 101.0, 1.0))  # a second without a step
    assert summary.take() == {}


def test_other_ranks_are_in_the_least_the_median_and_the_largest_number() -> None:
    summary = Summary()
    for rank in range(5):
        summary.add_profile(profile(rank, data=rank / 10))
    numbers = summary.take()
    found = [numbers[f"profile/{which}/data_ms"] for which in ("rank0", "min", "median", "max")]
    assert found == pytest.approx([0.0, 0.0, 20.0, 40.0])


def test_the_machine_has_the_names_of_mlflows_system_metrics() -> None:
    summary = Summary()
    for _ in range(2):
        summary.add_machine(machine(0, 0, cores=4.0, network=5_000_000, received=3_000_000))
    summary.add_machine(machine(1, 0, throttled=2.0, gpus=1, gpu_busy=0.7))
    numbers = summary.take()
    assert numbers["system/rank0/cpu_utilization_percentage"] == 50.0
    # As MLflow counts them: from the begin of the run.
    assert numbers["system/rank0/network_receive_megabytes"] == 6.0
    assert numbers["system/rank0/network_transmit_megabytes"] == 4.0
    # Those of the host count once, those of a rank for each.
    assert numbers["system/min/cpu_utilization_percentage"] == 50.0
    assert numbers["system/min/cpu_throttled_percentage"] == 0.0
    assert numbers["system/max/cpu_throttled_percentage"] == 40.0
    assert numbers["system/max/gpu_utilization_percentage"] == pytest.approx(70.0)
    assert "system/rank0/gpu_utilization_percentage" not in numbers


def test_each_number_of_a_machine_has_its_unit() -> None:
    summary = Summary()
    seen = machine(
        *(0, 0),
        cores=2.0,
        own_cores=1.5,
        throttled=0.5,
        memory=3_000_000,
        memory_limit=8_000_000,
        free_memory=6_000_000,
        disk=20_000_000,
        swapped=5_000_000,
        network=9_000_000,
        received=2_000_000,
        gpus=2,
        gpu_busy=0.25,
        gpu_memory=4_000_000,
        gpu_memory_limit=16_000_000,
    )
    summary.add_machine(seen)
    numbers = {
        "process_memory_megabytes": 3.0,
        "process_cpu_cores": 1.5,
        "cpu_throttled_percentage": 10.0,
        "system_memory_usage_megabytes": 2.0,
        "system_memory_usage_percentage": 25.0,
        "gpu_utilization_percentage": 25.0,
        "gpu_memory_usage_megabytes": 4.0,
        "gpu_memory_usage_percentage": 25.0,
        "disk_megabytes_per_second": 4.0,
        "swap_megabytes_per_second": 1.0,
        "cpu_utilization_percentage": 25.0,
        "network_receive_megabytes": 2.0,
        "network_transmit_megabytes": 7.0,
    }
    assert summary.take() == {f"system/rank0/{name}": value for name, value in numbers.items()}
    # A value that is not known has no number; only the first rank of a host reports for the host.
    unknown = structs.replace(
        seen, memory_limit=0, gpus=0, gpu_memory_limit=0, host_cores=0, seconds=0.0, throttled=0.0
    )
    summary.add_machine(unknown)
    absent = ("cpu_utilization", "system_memory", "gpu_")
    assert set(summary.take()) == {
        f"system/rank0/{name}" for name in numbers if not name.startswith(absent)
    }
    summary.add_machine(structs.replace(seen, host_rank=1))
    of_host = ("cpu_utilization", "disk_", "swap_", "network_")
    assert set(summary.take()) == {
        f"system/rank0/{name}" for name in numbers if not name.startswith(of_host)
    }


def test_what_is_blocked_counts_as_waiting_and_no_time_is_negative() -> None:
    summary = Summary()
    summary.add_profile(profile(0, waiting=0.1, blocked=0.3, moving=0.7))
    numbers = summary.take()
    assert numbers["profile/rank0/waiting_ms"] == pytest.approx(40.0)
    assert "profile/rank0/blocked_ms" not in numbers
    assert numbers["profile/rank0/compute_ms"] == 0.0


def test_a_thousand_ranks_need_no_more_numbers_than_two() -> None:
    counts = []
    for size in (2, 1000):
        summary = Summary()
        for rank in range(size):
            summary.add_profile(profile(rank, data=0.1, waiting=0.1, moving=0.1))
            summary.add_machine(machine(rank, gpus=1, gpu_memory=1, gpu_memory_limit=2))
        counts.append(len(summary.take()))
    assert counts[0] == counts[1] < 100


def test_the_files_hold_tables_diagnosis_and_flame_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    run = Run("1a2b", 2)
    run.profile.begin(["a", "a"])
    for rank in (0, 1):
        run.profile.add(profile(rank, data=0.3), 100.0)
        run.profile.add_machine(machine(rank))
    run.profile.add_lines(Lines(0, 10, ["/a.py\0main\x001"], [[0]], [10]))
    write_files(run, tmp_path)
    names = ["diagnosis.txt", "flame_rank0.svg", "machines.parquet", "steps.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "diagnosis.txt").read_text() == f"{run.diagnose()}\n"
    assert parquet.read_table(tmp_path / "steps.parquet") == run.profile.table()
    assert parquet.read_table(tmp_path / "machines.parquet") == run.profile.machine_table()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_files(run, tmp_path)
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["data"]) for row in rows] == [("0", "0.3"), ("1", "0.3")]


@pytest.mark.parametrize(
    ("event", "given", "most"),
    [
        (Output(0, "stdout", "x" * (1 << 20)), 200, 64),
        (Output(0, "stdout", ""), 150_000, 100_000),
        (Report(0, {f"m{number}": 0.5 for number in range(1000)}), 1000, 672),  # of 100 kB each
        (Profile(0, 0.0, 1.0, arrivals=[(0, 0, 0)] * 10_000), 100, 34),  # of 2 MB each
        (Lines(0, 10, ["a"] * 5000, [[0]] * 5000, [1] * 5000), 100, 68),  # of 1 MB each
    ],
    ids=["lines", "short lines", "reports", "profiles", "stacks"],
)
def test_what_waits_for_a_slow_sink_has_a_limit(event: Event, given: int, most: int) -> None:
    notices: list[str] = []
    called, go_on = threading.Event(), threading.Event()
    heard: list[object] = []

    def wait(rank: int) -> None:
        called.set()
        go_on.wait()

    def hear(*arguments: object) -> None:
        heard.append(arguments[0])

    names = ("output", "report", "profile", "lines", "notice")
    slow: Any = SimpleNamespace(began=wait, **dict.fromkeys(names, hear))
    fan_out = telling_threads(slow, notice=notices.append)
    fan_out.tell(Began(0))
    called.wait()
    if isinstance(event, Report):
        fan_out.reports([event] * given)
    else:
        for _ in range(given):
            fan_out.tell(event)
    fan_out.notice("comes all the same")
    go_on.set()
    fan_out.close()
    assert len(heard) == most + 1
    assert heard[-1] == "comes all the same"
    assert len(notices) == 1
    assert f"was too slow: {given - most} reports and lines were dropped" in notices[0]


def test_a_sink_without_a_method_for_measurements_is_idle_between_reports() -> None:
    heard: list[str] = []

    class Plain(Sink):
        def idle(self) -> None:
            heard.append("idle")

    class Measuring(Plain):
        def profile(self, profile: Profile) -> None:
            heard.append("profile")

    for sink, events in ((Plain(), []), (Measuring(), ["profile"] * 3)):
        heard.clear()
        fan_out = telling_threads(sink, notice=heard.append)
        for _ in range(3):
            fan_out.tell(profile(0))
            fan_out.tell(machine(0))
        fan_out.close()
        assert heard == events
