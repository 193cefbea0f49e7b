"""Limits that the kernel sets for real, by a control group; root may make one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


def memory_limit(limit: int) -> AbstractContextManager[Path]:
    """A group of so many bytes; yields the file that takes its members' process ids."""
    return _group("memory", {"memory.limit_in_bytes": str(limit)}, {"memory.max": str(limit)})


def cpu_quota(cores: float) -> AbstractContextManager[Path]:
    """A group of so many cores; yields the file that takes its members' process ids."""
    quota = str(int(cores * 100_000))
    return _group("cpu", {"cpu.cfs_quota_us": quota}, {"cpu.max": f"{quota} 100000"})


@contextmanager
def _group(controller: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Path]:
    """A group with limits, as versions 1 and 2 of control groups name them."""
    is_old = (_ROOT / controller).is_dir()
    name = f"horovod_runner-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    group = _ROOT / (controller if is_old else "") / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no limit can be set here: {error}")
    try:
        for file, value in (old if is_old else new).items():
            try:
                (group / file).write_text(value)
            except OSError as error:
                pytest.skip(f"no limit can be set here: {error}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()
