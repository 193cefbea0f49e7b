"""What control groups leave to this process, read from files as Linux shows them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from horovod_runner.host import limits


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which the kernel seems to say what this process's groups may use."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    monkeypatch.setattr(limits, "_ROOT", folder)
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "membership")
    return folder


def write(root: Path, membership: str, files: dict[str, str]) -> None:
    (root.parent / "membership").write_text(membership)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


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
        (
            V1,
            {
                "cpu,cpuacct/job/7/cpu.cfs_quota_us": "200000\n",
                "cpu,cpuacct/job/7/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            V1,
            {
                "cpu,cpuacct/job/7/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/job/7/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        (V1, {}, 8),
    ],
)
def test_a_containers_cpu_quota_is_respected(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    membership: str,
    files: dict[str, str],
    cores: int,
) -> None:
    write(root, membership, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert limits.available_cores() == cores


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
    root: Path, *, limit: str, used: int, files: int, is_short: bool, version: int
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
    assert limits.memory_is_short() == is_short


def test_memory_for_files_is_bounded_by_the_smallest_limit(root: Path) -> None:
    write(root, V2, {})
    assert 0 < limits.memory_for_files() <= psutil.virtual_memory().total
    files = {"memory.max": "1000\n", "memory.current": "1\n", "memory.stat": "inactive_file 0\n"}
    write(root, V2, {f"pod/42/{name}": text for name, text in files.items()})
    assert limits.memory_for_files() == 1000


def test_a_system_without_control_groups_has_the_hosts_limits(root: Path) -> None:
    assert limits.available_cores() == len(os.sched_getaffinity(0))
    assert limits.memory_for_files() <= psutil.virtual_memory().total
