"""Ranks that save and load checkpoints, without tasks and a driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from horovod_runner.checkpoints import checkpoint, loader
from horovod_runner.checkpoints.commits import Commit, Commits
from horovod_runner.checkpoints.saver import Saver
from horovod_runner.host.folders.folder import Folder
from horovod_runner.wire import messages
from horovod_runner.wire.job_file import CheckpointPlan


@contextmanager
def saving(plan: CheckpointPlan) -> Iterator[tuple[Saver, list[messages.FromRank]]]:
    """A rank's saver, and a list of what it has told the driver: filled at the end of the block."""
    read, write = os.pipe()
    saver, told = Saver(plan, write), list[messages.FromRank]()
    try:
        yield saver, told
    finally:
        saver.close()
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told += messages.decode_batch(pipe.read())


@contextmanager
def saving_to(folder: Folder) -> Iterator[Saver]:
    """A saver of the run "run1", whose driver sees the folder."""
    checkpoint.write_probe(folder, "run1")
    with saving(CheckpointPlan(folder.url, "run1")) as (saver, _):
        yield saver


def by_commit(state: Any, folder: Path) -> tuple[Any, int]:
    """Keep a state in a further commit; returns what is read, and the bytes that it takes."""
    commits = Commits(str(folder))
    latest = commits.latest()
    commits.write(state, Commit(1, 1 if latest is None else latest.number + 1, 10, 1))
    with Commits(str(folder)).hold() as held:
        assert held is not None
        return held.read(), held.commit.size


class Together:
    """Ranks in threads, with collectives between them.

    Attributes:
        sent: how often each rank has broadcast something.
        warned: what they said when they last loaded.
    """

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._values: list[Any] = [None] * size
        self.sent = [0] * size
        self.warned: list[str] = []
        self._rank = threading.local()
        self.size = size

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self._rank.number] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def broadcast(self, data: bytes, count: int, root: int = 0) -> bytes:
        self.sent[root] += self._rank.number == root
        received = self._exchange(data)[root]
        assert len(received) == count
        return bytes(received)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(each) for each in self._exchange(numbers)]

    def load(
        self, plan: CheckpointPlan, hosts: Sequence[Path] = ()
    ) -> list[loader.LoadedCheckpoint | None]:
        """What each rank loads; ``hosts`` are the ranks' folders for commits, if there are some."""
        loaded: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            self._rank.number = rank
            loaded[rank] = loader.load(
                plan,
                rank,
                self.size,
                self.warned.append,
                commits=Commits(str(hosts[rank])) if hosts else None,
                keeps=bool(hosts) and hosts.index(hosts[rank]) == rank,
                connect=lambda: self,
            )

        self.warned = []
        threads = [threading.Thread(target=run, args=[rank]) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return loaded
