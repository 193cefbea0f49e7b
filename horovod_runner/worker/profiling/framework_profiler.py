"""Runs torch's or TensorFlow's own profiler around some steps, for ``torch_profiler=True``.

torch's profiler records the thread that starts it. So the thread that trains starts it, after a
step of an optimizer; without an optimizer, with the next batch or report. TensorFlow's profiler
records all threads, and its steps run no Python code: a thread polls the number of steps.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from horovod_runner.common.text import bytes_text, sizes_text
from horovod_runner.common.threads import start_thread
from horovod_runner.wire.messages import MOST_TRACE_BYTES, TraceName
from horovod_runner.worker.profiling.clock import clock
from horovod_runner.worker.profiling.collectives import CollectiveLog
from horovod_runner.worker.profiling.steps import optimizer_steps

#: The steps that are recorded, the first one being step 1.
FIRST_STEP, LAST_STEP = 10, 20
#: The key under which this package writes the times of steps into a torch trace.
METADATA: Final = "horovod_runner"
_LOOK_SECONDS: Final = 0.02
_LITTLE_BYTES: Final = 64 << 20  # a trace may have that many before it is compressed
_Source = Literal["optimizer", "batches", "reports"]


class FrameworkProfiler:
    """Records steps 10 to 20 of this process, from its construction to :meth:`finish`.

    It never raises: the training goes on without it.

    Args:
        path: the start of the paths of its files, to which ".torch.json.gz" or ".tensorflow.zip" is
            added; the folder exists.
        fail: called with the reason if there will be no file.
    """

    def __init__(self, path: str, fail: Callable[[str], None]) -> None:
        self._path = path
        self._fail = fail
        self._is_over = False  # there is a file, or there will be none
        self._torch: Any = None  # torch's profiler while it records
        self._source: _Source = "optimizer"
        self._until = 0  # the number of steps at which the recording ends
        # The time in nanoseconds: of the start, and after each step with its number.
        self._began = 0
        self._marks: list[tuple[int, int]] = []
        self._packing: threading.Thread | None = None
        clock.after = self._after_step
        os.register_at_fork(after_in_child=self._after_fork)
        self._ended = threading.Event()
        self._thread = start_thread("framework-profile", self._attempt, self._record_tensorflow)

    def finish(self, *, ok: bool) -> None:
        """End the recording, and write the steps that were recorded.

        Too few steps are a reason to call ``fail`` only if ``main`` has returned (``ok``).
        """
        self._ended.set()
        self._thread.join()
        if self._torch is not None:
            self._attempt(self._stop_torch)
        if self._packing is not None:
            self._packing.join()
        if not self._is_over:
            self._is_over = True
            if ok:
                self._fail(
                    f"It counted {self._done()[1]} steps, and records steps {FIRST_STEP} to "
                    f"{LAST_STEP}: train for more steps. Steps of a torch optimizer, batches of a "
                    "Shard and calls of report count."
                )

    def _after_fork(self) -> None:
        self._is_over = True  # a process of a DataLoader makes no steps of the training

    def _after_step(self) -> None:
        if not self._is_over:
            self._attempt(self._advance)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call a framework's profiler; an error ends the recording, not the training."""
        try:
            action()
        except Exception as error:
            self._is_over = True
            profiler, self._torch = self._torch, None
            with suppress(Exception):
                if profiler is not None:
                    profiler.stop()
            with suppress(OSError):  # the task has ended
                self._fail(self._why(error))

    def _why(self, error: Exception) -> str:
        told = f"{type(error).__name__}: {error}"
        # torch and TensorFlow may write nothing to a full disk, and say nothing.
        folder = Path(self._path).parent
        free = shutil.disk_usage(folder).free
        if isinstance(error, OSError) and free < _LITTLE_BYTES:
            told += (
                f". {bytes_text(free)} are free in {folder}: free space there, or set TMPDIR to a "
                "folder on another disk"
            )
        return told

    def _done(self) -> tuple[_Source, int]:
        """What counts as a step, and how many of them are complete."""
        if optimizer_steps.count:
            return "optimizer", optimizer_steps.count
        if clock.batches:
            return "batches", clock.batches - 1  # the step of the latest batch begins now
        return "reports", clock.reports

    def _advance(self) -> None:
        source, count = self._done()
        if self._torch is None:
            if count >= FIRST_STEP - 1 and (source == "optimizer" or not _has_tensorflow()):
                self._count_from(source, count)
                self._start_torch(count)
            return
        if source != self._source:  # the optimizer's first step comes after many batches
            self._count_from(source, count)
        elif count == self._marks[-1][0]:
            return  # a batch or a report within a step
        self._marks.append((count, time.time_ns()))
        if count >= self._until:
            self._stop_torch()

    def _count_from(self, source: _Source, count: int) -> None:
        self._source, self._until = source, count + LAST_STEP - FIRST_STEP + 1
        self._marks.clear()

    def _start_torch(self, count: int) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        from torch.profiler import ProfilerActivity, profile

        if torch.autograd._profiler_enabled():  # a second one would take the events of the first
            raise RuntimeError(
                f"main uses torch's profiler itself at step {FIRST_STEP}. Leave out torch_profiler "
                "or the profiler in main."
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._torch = profile(activities=activities)
        self._began = time.time_ns()
        self._torch.start()
        self._marks.append((count, time.time_ns()))

    def _stop_torch(self) -> None:
        profiler = self._torch
        known = {"began": self._began, "steps": self._marks}
        profiler.add_metadata_json(METADATA, json.dumps(known))
        profiler.stop()
        self._torch = None
        self._is_over = True
        written = Path(f"{self._path}.json")
        profiler.export_chrome_trace(str(written))
        # In a thread: compressing takes longer than writing, and the training can continue.
        self._packing = start_thread(
            "framework-profile", self._attempt, partial(self._pack, written)
        )

    def _pack(self, written: Path) -> None:
        part = Path(f"{self._path}.json.part")
        with written.open("rb") as file, gzip.open(part, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(file, compressed, 1 << 20)
        written.unlink()
        self._keep(part, "torch.json.gz")

    def _keep(self, part: Path, name: TraceName) -> None:
        """Give a complete file the name by which the task finds it."""
        size = part.stat().st_size
        if size > MOST_TRACE_BYTES:
            part.unlink()
            found, most = sizes_text(size, MOST_TRACE_BYTES)
            raise ValueError(
                f"the trace has {found}, more than the {most} that a rank may send: steps "
                f"{FIRST_STEP} to {LAST_STEP} run very many operations. Use "
                "torch.profiler in main for a part of a step."
            )
        os.replace(part, f"{self._path}.{name}")

    def _record_tensorflow(self) -> None:
        collectives = CollectiveLog()
        until, folder = 0, Path(f"{self._path}.tensorflow")
        while not self._ended.wait(_LOOK_SECONDS) and not self._is_over:
            if not _has_tensorflow() or optimizer_steps.count:
                continue  # torch trains, or nothing does yet
            collectives.take(1)
            # TensorFlow fetches many batches ahead: they are the last choice.
            count = collectives.totals.most or clock.reports or clock.batches
            if not until and count >= FIRST_STEP - 1:
                sys.modules["tensorflow"].profiler.experimental.start(str(folder))
                until = count + LAST_STEP - FIRST_STEP + 1
            elif until and count >= until:
                break
        if until:
            sys.modules["tensorflow"].profiler.experimental.stop()
            for file in folder.rglob("*.xplane.pb"):  # by default named after the host
                file.rename(file.with_name(f"{Path(self._path).name}.xplane.pb"))
            self._is_over = True
            part = shutil.make_archive(f"{self._path}.part", "zip", folder)
            shutil.rmtree(folder, ignore_errors=True)
            self._keep(Path(part), "tensorflow.zip")


def _has_tensorflow() -> bool:
    """Whether TensorFlow may train this rank. Keras on torch imports it without using it."""
    return "tensorflow" in sys.modules and os.environ.get("KERAS_BACKEND") != "torch"
