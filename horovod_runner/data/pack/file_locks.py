"""Divides work between the processes of a host: each file is made once, and complete or absent.

The kernel releases a lock when its process ends, so nobody waits for a process that was killed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


def make_together(paths: Sequence[Path], make: Callable[[int], None]) -> None:
    """Make files, sharing the work with all processes that call this for the same files.

    ``make`` makes one, by its index in ``paths``. A file exists once it is complete.
    """
    # A rank that is alone on its host uses two threads: one reads while the other writes. Ranks
    # that share a host overlap anyway, and would need more memory.
    is_alone = os.environ.get("HOROVOD_LOCAL_SIZE", "1") == "1"
    threads = max(1, min(2 if is_alone else 1, len(paths)))
    with ThreadPoolExecutor(threads, "horovod_runner-pack") as pool:
        for future in [pool.submit(_make_missing, paths, make) for _ in range(threads)]:
            future.result()


def _make_missing(paths: Sequence[Path], make: Callable[[int], None]) -> None:
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    # First the files that nobody is making. Then wait for the others: if their process fails, this
    # one makes them.
    for wait in (False, True):
        for number in missing:
            path = paths[number]
            with locked(path.with_suffix(".lock"), wait=wait) as is_locked:
                if is_locked and not path.exists():
                    make(number)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that exists only once it is complete: a draft is renamed into place."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(data)
    draft.rename(path)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file; yields False if another process holds it and ``wait`` is False."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
