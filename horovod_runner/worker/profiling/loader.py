"""Measures what ranks wait for torch's DataLoader, and looks at the lines of its processes.

The classes of DataLoader are changed where they are defined, so this works for all code that uses
them. A process of a DataLoader looks at its own lines, and appends them to a file in memory that
it shares with its rank.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from horovod_runner.common.descriptors import free_front
from horovod_runner.common.threads import start_thread
from horovod_runner.wire.framing import complete, frame, unframe
from horovod_runner.worker.imports.patches import instead_of
from horovod_runner.worker.profiling.clock import cells, clock
from horovod_runner.worker.profiling.sampler import Pace, Sampler, Stack, add

_SEND_SECONDS: Final = 15.0
_PACE_SECONDS: Final = 1.0
_MOST_STACKS: Final = 100


class _SeenLines(msgspec.Struct, array_like=True):
    """What a process has seen since it wrote the last time, in microseconds."""

    total: int
    stacks: list[tuple[list[tuple[str, str, int]], int]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_SeenLines).decode


class LoaderWatch:
    """Watches the DataLoaders of this process.

    Attributes:
        cells: numbers in the first part of these batches.
        total: microseconds for which processes of DataLoaders were looked at.
        stacks: microseconds for which each stack was seen.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.batches = 0
        self.cells = 0
        self.total = 0
        self.stacks: Counter[Stack] = Counter()
        self._measures = False
        self._file = -1
        self._position = 0

    def begin(self) -> None:
        """Measure from now on; processes that start later look at their lines, for :meth:`read`."""
        self._measures = True
        if self._file < 0 and hasattr(os, "memfd_create"):
            self._file = os.memfd_create("horovod_runner-lines")
            fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)

    def watch(self, module: Any) -> None:
        """Time the calls that wait: for the first batch, which starts processes, and the next.

        Called with ``torch.utils.data.dataloader`` when that is imported.
        """

        @instead_of(module.DataLoader, "__iter__")
        def begin(plain: Any, loader: Any) -> Any:
            if not self._measures:
                return plain(loader)
            with clock.timing("data"):
                return plain(loader)

        @instead_of(module._BaseDataLoaderIter, "__next__")
        def following(plain: Any, iterator: Any) -> Any:
            if not self._measures:
                return plain(iterator)
            with clock.timing("data"):
                batch = plain(iterator)
            self.batches += 1
            self.cells += cells(batch)
            return batch

        worker = module._utils.worker
        worker._worker_loop = _LookingLoop(worker._worker_loop, self._look_at_lines)

    def _look_at_lines(self) -> _OwnLines | None:
        return None if self._file < 0 else _OwnLines(self._file, self._monotonic)

    def read(self) -> None:
        """Add what the processes have written."""
        if self._file < 0:
            return
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, size - self._position, self._position)
        data = data[: complete(data)]
        self._position += len(data)
        free_front(self._file, self._position)  # this memory counts as the rank's
        for message in unframe(data):
            seen = _decode(message)
            self.total += seen.total
            for stack, count in seen.stacks:
                add(self.stacks, tuple(stack), count)


class _LookingLoop:
    """Torch's function of a DataLoader process, with a thread that looks at its lines.

    Where processes are started anew and not forked, the file is not theirs, and nobody looks.
    """

    def __init__(self, loop: Any, look: Callable[[], _OwnLines | None]) -> None:
        self._loop = loop
        self._look = look

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        lines = self._look()
        try:
            self._loop(*args, **kwargs)
        finally:
            if lines is not None:
                lines.finish()

    def __reduce__(self) -> Any:
        return _torch_loop, ()


def _torch_loop() -> Any:
    from torch.utils.data._utils import worker

    return worker._worker_loop


class _OwnLines:
    """Looks at the main thread of this process, in a thread of its own, until :meth:`finish`."""

    def __init__(self, file: int, monotonic: Callable[[], float]) -> None:
        self._file = file
        self._monotonic = monotonic
        self._ended = threading.Event()
        self._sampler = Sampler(clock=monotonic)
        self._thread = start_thread("lines", self._run)

    def finish(self) -> None:
        """Write the rest."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pace = Pace(self._monotonic)
        now = self._monotonic()
        adjust, write = now + _PACE_SECONDS, now + _SEND_SECONDS
        while not self._ended.wait(pace.seconds):
            self._sampler.look()
            now = self._monotonic()
            if now >= adjust:
                adjust = now + _PACE_SECONDS
                pace.adjust()
            if now >= write:
                write = now + _SEND_SECONDS
                self._write()
        self._write()

    def _write(self) -> None:
        """Append in one call: the kernel puts what processes append one after the other."""
        stacks = Counter(self._sampler.stacks()).most_common(_MOST_STACKS)
        seen = _SeenLines(self._sampler.total, [(list(stack), count) for stack, count in stacks])
        os.write(self._file, frame(_encode(seen)))
        self._sampler = Sampler(clock=self._monotonic)


loaders: Final = LoaderWatch()
