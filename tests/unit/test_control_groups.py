"""What control groups leave to this process, read from files as Linux shows them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from horovod_runner.host.control_groups import ControlGroups, killed_for_memory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder in which the kernel seems to say what this process's groups may use."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    return folder


@pytest.fixture
def groups(root: Path, tmp_path: Path) -> ControlGroups:
    """Reads that folder."""
    return ControlGroups(root, tmp_path / "proc")


def write(root: Path, membership: str, files: dict[str, str], pid: str = "self") -> None:
    process = root.parent / "proc" / pid
    process.mkdir(parents=True, exist_ok=True)
    (process / "cgroup").write_text(membership)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def old_quota(folder: str, quota: int) -> dict[str, str]:
    """The files of a CPU quota in version 1, in microseconds of a tenth of a second."""
    values = {"quota": quota, "period": 100_000}
    return {f"{folder}/cpu.cfs_{name}_us": f"{value}\n" for name, value in values.items()}


V2 = "0::/pod/42\n"
V1 = "4:cpu,cpuacct:/job/7\n5:memory:/job/7\n"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        (V2, {"pod/42/cpu.max": "150000 100000\n"}, 1),
        (V2, {"pod/42/cpu.max": "300000 100000\n"}, 3),
        (V2, {"cpu.max": "200000 100000\n"}, 2),  # a container that sees its group as the root
        (V2, {"pod/42/cpu.max": "50000 100000\n"}, 1),  # never less than one
        (V2, {"pod/42/cpu.max": "max 100000\n"}, 8),
        (V2, {"pod/42/cpu.max": "max 100000\n", "pod/cpu.max": "300000 100000\n"}, 3),
        ("0::/../../pod/42\n", {"cpu.max": "200000 100000\n"}, 2),
        ("1:name=systemd:/\n" + V2, {"unified/pod/42/cpu.max": "400000 100000\n"}, 4),
        # The controllers of a mount may be in another order.
        ("3:cpuacct,cpu:/\n", old_quota("cpu", 200_000), 2),
        (V1, old_quota("cpu,cpuacct/job/7", 200_000), 2),
        (V1, old_quota("cpu,cpuacct/job/7", -1), 8),
        (V1, {}, 8),
    ],
)
def test_a_containers_cpu_quota_is_respected(
    root: Path,
    groups: ControlGroups,
    monkeypatch: pytest.MonkeyPatch,
    *,
    membership: str,
    files: dict[str, str],
    cores: int,
) -> None:
    write(root, membership, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert groups.available_cores() == cores


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        (V2, {"pod/42/pids.max": "64\n", "pod/pids.max": "max\n"}, 64),
        (V2, {"pod/42/pids.max": "500\n", "pod/pids.max": "100\n"}, 100),
        (V2, {"pod/42/pids.max": "max\n"}, None),
        ("7:pids:/job/7\n", {"pids/job/7/pids.max": "128\n"}, 128),
        (V1, {}, None),
    ],
)
def test_a_containers_limit_of_processes(
    root: Path, groups: ControlGroups, membership: str, files: dict[str, str], limit: int | None
) -> None:
    write(root, membership, files)
    assert groups.process_limit() == limit


@pytest.mark.parametrize(
    ("limit", "used", "files", "is_short"),
    [
        ("1000", 951, 0, True),
        ("1000", 949, 0, False),
        ("1000", 990, 500, False),  # the kernel drops cached files that nobody uses
        ("1000", 1000, 20, True),
        ("max", 951, 0, False),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_memory_may_be_short_where_the_hosts_is_not(
    root: Path,
    groups: ControlGroups,
    *,
    limit: str,
    used: int,
    files: int,
    is_short: bool,
    version: int,
) -> None:
    folder, maximum, current = (
        ("pod/42", "max", "current")
        if version == 2
        else ("memory/job/7", "limit_in_bytes", "usage_in_bytes")
    )
    counters = f"anon 5\ninactive_file {files}\n"
    names = {maximum: f"{limit}\n", current: f"{used}\n", "stat": counters}
    written = {f"{folder}/memory.{name}": text for name, text in names.items()}
    write(root, V2 if version == 2 else V1, written)
    assert groups.memory_is_short() == is_short


# As Linux 6.1 and 6.18 show them, without most lines.
V2_STAT = """anon 104861696
file 41390080
shmem 0
inactive_file 0
active_file 41377792
slab_reclaimable 95584
slab_unreclaimable 328
"""
V1_STAT = """cache 0
rss 0
inactive_file 0
active_file 0
hierarchical_memory_limit 314572800
total_cache 41390080
total_rss 104861696
total_inactive_file 1000000
total_active_file 40377792
"""
LIMIT, USED = 300 << 20, 150_000_000


def old_memory(folder: str) -> dict[str, object]:
    """The files of a limit of memory in version 1."""
    values = {"limit_in_bytes": LIMIT, "usage_in_bytes": USED, "stat": V1_STAT}
    return {f"{folder}/memory.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("membership", "files", "cache"),
    [
        (
            V2,
            {"pod/memory.max": LIMIT, "pod/memory.current": USED, "pod/memory.stat": V2_STAT},
            41377792 + 95584,
        ),
        (
            V1,
            {
                **old_memory("memory/job"),
                "memory/job/7/memory.limit_in_bytes": 9223372036854771712,
            },
            41377792,
        ),
        # A container that sees its group as the root, and not what is above.
        ("5:memory:/docker/0123abcd\n", old_memory("memory"), 41377792),
    ],
)
def test_a_limit_of_any_group_above_a_process_counts_and_cached_files_are_free(
    root: Path, groups: ControlGroups, membership: str, files: dict[str, object], cache: int
) -> None:
    write(root, membership, {name: f"{value}\n" for name, value in files.items()}, pid="123")
    assert groups.memory(123) == (LIMIT, LIMIT - USED + cache, True)
    assert groups.memory().limit == psutil.virtual_memory().total  # of a process outside


def test_what_a_quota_has_stopped_is_read_from_the_group_that_has_it(
    root: Path, groups: ControlGroups
) -> None:
    stopped = "usage_usec 1210000\nnr_periods 41\nnr_throttled 40\nthrottled_usec 2790000\n"
    inner = "usage_usec 1210000\nuser_usec 1200000\nsystem_usec 10000\n"
    write(root, V2, {"pod/cpu.stat": stopped, "pod/42/cpu.stat": inner})
    assert groups.cpu_time() == pytest.approx((1.21, 2.79))
    assert groups.cpu_quota() is None
    old = "nr_periods 41\nnr_throttled 35\nthrottled_time 1224381156\nnr_bursts 0\nburst_time 0\n"
    write(root, V1, {"cpu,cpuacct/job/7/cpu.stat": old})
    assert groups.cpu_time() == pytest.approx((0.0, 1.224381156))
    write(root, V1, {"cpu,cpuacct/job/7/cpuacct.usage": "1200000000\n"})
    assert groups.cpu_time() == pytest.approx((1.2, 1.224381156))


def test_killed_processes_are_those_of_the_container_or_else_of_the_host(
    root: Path, groups: ControlGroups
) -> None:
    write(root, V2, {"../proc/vmstat": "nr_free_pages 9\noom_kill 7\n"})
    assert killed_for_memory(groups.kill_counter()) == 7
    events = "low 0\nhigh 0\nmax 81\noom 1\noom_kill 2\noom_group_kill 0\n"
    write(root, V2, {"pod/42/memory.events": events})
    assert killed_for_memory(groups.kill_counter()) == 2
    old = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    write(root, V1, {"memory/job/7/memory.oom_control": old})
    counter = groups.kill_counter()
    assert killed_for_memory(counter) == 3
    counter.unlink()
    assert killed_for_memory(counter) is None


def test_memory_for_files_is_bounded_by_the_smallest_limit(
    root: Path, groups: ControlGroups
) -> None:
    write(root, V2, {})
    assert 0 < groups.memory_for_files() <= psutil.virtual_memory().total
    files = {"memory.max": "1000\n", "memory.current": "1\n", "memory.stat": "inactive_file 0\n"}
    write(root, V2, {f"pod/42/{name}": text for name, text in files.items()})
    assert groups.memory_for_files() == 1000


def test_a_system_without_control_groups_has_the_hosts_limits(
    root: Path, groups: ControlGroups
) -> None:
    assert groups.available_cores() == len(os.sched_getaffinity(0))
    assert groups.memory_for_files() <= psutil.virtual_memory().total
