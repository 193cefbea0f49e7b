"""A Shard in the process of the test, as a rank would have it."""

from __future__ import annotations

import pytest

from horovod_runner.data import Shard
from horovod_runner.data.sources import source_of


def shard_of(value: object) -> Shard:
    source = source_of(value)
    assert source is not None
    return Shard("train", source.prepare("train", None))


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("HOROVOD_RANK", str(rank))
    monkeypatch.setenv("HOROVOD_SIZE", str(size))
