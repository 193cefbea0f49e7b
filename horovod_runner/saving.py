"""A rank's checkpoints: written beside the training, read at its start.

    save_checkpoint --copy--> Saver's thread --file--> checkpoint_dir, where this host sees it
                                             `-pieces-> pipe, channel, the driver's disk, else

The training waits for the copy out of the model, and for the former checkpoint where that is still
being written: there is one copy at a time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_runner import checkpoint, messages, states, stores
from horovod_runner.errors import CheckpointError
from horovod_runner.folder import VARIABLE, RunFolder
from horovod_runner.frames import frame
from horovod_runner.handover import CheckpointPlan
from horovod_runner.marker import Marker, file_name, surplus
from horovod_runner.reports import named, whole

_PIECE_BYTES = 1 << 20
_BROADCAST_BYTES = 64 << 20


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a training goes on from.

    Attributes:
        state: as it was given to ``save_checkpoint``; tensors are on the CPU, a folder is the path
            of a temporary one.
        step: as given to ``save_checkpoint``.
        metrics: as given to ``save_checkpoint``.
    """

    state: Any = field(repr=False)
    step: int
    metrics: Mapping[str, float | int]


class Saver:
    """Rank 0's.

    Args:
        plan: where the checkpoints go.
        descriptor: of a pipe to the driver's machine.
    """

    def __init__(self, plan: CheckpointPlan, descriptor: int) -> None:
        self._plan = plan
        self._descriptor = descriptor
        self._copier = states.Copier()
        self._number = plan.next_number
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._folder = stores.open_folder(plan.folder)
        self._direct = checkpoint.is_seen(self._folder, plan.token)
        self._kept = ExitStack()
        self._scratch: Path | None = None

    def save(self, state: Any, step: Any, metrics: Mapping[str, Any] | None) -> None:
        """Copy the state and have it written.

        Raises:
            TypeError: the state holds something that cannot be stored, or a metric is no number.
            ValueError: the step is below 0.
        """
        step = whole("step", step)
        if step < 0:
            raise ValueError(f"step counts what has been done and cannot be {step}")
        numbers = {} if metrics is None else named(metrics)
        with self._lock:
            self.finish()
            snapshot = self._copier.copy(state)
            self._thread = threading.Thread(
                target=self._write,
                args=(snapshot, step, numbers, self._number),
                name="horovod_runner-saver",
                daemon=True,
            )
            self._number += 1
            self._thread.start()

    def finish(self) -> None:
        """Wait until all is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait until all is written, and leave nothing on this host."""
        self.finish()
        self._kept.close()

    def _write(
        self, snapshot: states.Snapshot, step: int, metrics: dict[str, float | int], count: int
    ) -> None:
        name = file_name(count, step, self._plan.token, snapshot.kind)
        local = self._folder.local(name) if self._direct else None
        part = None
        try:
            part = (local.parent if local else self._own_folder()) / f"{stores.PART}{name}"
            snapshot.write(part)
            marker = Marker(
                name=name,
                number=count,
                step=step,
                kind=snapshot.kind,
                size=part.stat().st_size,
                sha256=checkpoint.digest(part),
                run_id=self._plan.token,
                attempt=self._plan.attempt,
                saved_at=time.time(),
                metrics=metrics,
            )
            if self._direct:
                checkpoint.publish(self._folder, part, marker)
            else:
                self._stream(part, marker)
            self._send(messages.Saved(0, marker))
            if self._direct:
                with suppress(Exception):  # what is kept too long goes with the next one
                    self._prune()
        except Exception as error:
            told = str(error) or type(error).__name__
            with suppress(OSError):
                self._send(messages.Unsaved(0, step, told))
        finally:
            if part is not None:
                with suppress(OSError):
                    part.unlink(missing_ok=True)

    def _own_folder(self) -> Path:
        """Where a file waits to be sent: on this host, and gone with the run."""
        if self._scratch is None:
            self._scratch = self._kept.enter_context(RunFolder(self._plan.token)).path
        return self._scratch

    def _prune(self) -> None:
        plan = self._plan
        found = checkpoint.complete(self._folder)
        ours = [each for each in found if plan.lineage or each.run_id == plan.token]
        for marker in surplus(ours, plan.keep, plan.best, plan.mode):
            checkpoint.remove(self._folder, marker)

    def _stream(self, path: Path, marker: Marker) -> None:
        with path.open("rb", buffering=0) as file:
            offset = 0
            while data := file.read(_PIECE_BYTES):
                self._send(messages.FilePart(0, marker.name, offset, data))
                offset += len(data)

    def _send(self, message: messages.Message) -> None:
        data = memoryview(frame(messages.encode(message)))
        while data:
            data = data[os.write(self._descriptor, data) :]


def _scratch() -> Path:
    """The run's folder on this host, in a rank that has something to go on from."""
    return Path(os.environ.get(VARIABLE) or tempfile.gettempdir())


def load(
    plan: CheckpointPlan, rank: int, size: int, warn: Callable[[str], None]
) -> LoadedCheckpoint | None:
    """What to go on from: rank 0 reads it, the others get it from there.

    Args:
        plan: the run's.
        rank: this one.
        size: how many ranks call this.
        warn: takes a line for the user.

    Raises:
        CheckpointError: none of the checkpoints is whole.
        RuntimeError: the ranks cannot reach one another yet.
    """
    # On a first start too: a main that calls this too early is not to find out at a restart.
    broadcast = None if size == 1 else _broadcast()
    if not plan.resume:
        return None
    with ExitStack() as kept:
        if rank == 0:
            path, marker = _first_whole(plan, kept, warn)
            if broadcast is not None:
                broadcast(plan.resume.index(marker).to_bytes(8, "little"), 8)
                _send_file(path, broadcast)
        else:
            assert broadcast is not None  # noqa: S101 - there is another rank
            marker = plan.resume[int.from_bytes(broadcast(b"", 8), "little")]
            path = _receive_file(marker, broadcast, kept)
        state = states.read(marker.kind, path)
    return LoadedCheckpoint(state, marker.step, dict(marker.metrics))


def _first_whole(
    plan: CheckpointPlan, kept: ExitStack, warn: Callable[[str], None]
) -> tuple[Path, Marker]:
    """The latest checkpoint that is what was written."""
    if plan.fetched:  # whole, or it would not be here
        path = Path(plan.fetched)
        return path, next(marker for marker in plan.resume if marker.name == path.name)
    folder = stores.open_folder(plan.folder)
    for marker in plan.resume:
        try:
            opened = checkpoint.whole_file(folder, marker, _scratch())
            return kept.enter_context(opened), marker
        except CheckpointError as error:
            warn(f"HorovodRunner: {error} The one before is taken.")
    raise CheckpointError(
        f"none of the {len(plan.resume)} checkpoints in {plan.folder} is whole: remove them to "
        "start anew"
    )


def _send_file(path: Path, broadcast: Callable[[bytes, int], bytes]) -> None:
    left = path.stat().st_size
    with path.open("rb") as file:
        while left:
            data = file.read(min(left, _BROADCAST_BYTES))
            broadcast(data, len(data))
            left -= len(data)


def _receive_file(
    marker: Marker, broadcast: Callable[[bytes, int], bytes], kept: ExitStack
) -> Path:
    folder = tempfile.TemporaryDirectory(prefix="checkpoint-", dir=_scratch())
    path = Path(kept.enter_context(folder)) / marker.name
    left = marker.size
    with path.open("xb") as file:
        while left:
            count = min(left, _BROADCAST_BYTES)
            file.write(broadcast(b"", count))
            left -= count
    return path


def _broadcast() -> Callable[[bytes, int], bytes]:
    """Hands bytes of rank 0 to all, by what ``main`` has initialised.

    Of its two arguments only rank 0 needs the bytes, all the number of them.
    """
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            return _by_torch(horovod) if name == "horovod.torch" else _by_tensorflow(horovod)
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        distributed = torch.distributed
        if distributed.is_initialized():
            return _by_torch_distributed(torch)
    raise RuntimeError(
        "load_checkpoint hands what rank 0 reads to the other ranks, and they cannot reach one "
        "another yet: call hvd.init() before it"
    )


def _by_torch(horovod: Any) -> Callable[[bytes, int], bytes]:
    import torch

    def broadcast(data: bytes, count: int) -> bytes:
        own = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8)
        horovod.broadcast_(own, 0, name="horovod_runner.checkpoint")
        return bytes(own.numpy().tobytes())

    return broadcast


def _by_tensorflow(horovod: Any) -> Callable[[bytes, int], bytes]:
    import numpy
    import tensorflow

    def broadcast(data: bytes, count: int) -> bytes:
        own = numpy.frombuffer(data or bytes(count), numpy.uint8)
        with tensorflow.device("/cpu:0"):
            got = horovod.broadcast(tensorflow.constant(own), 0, name="horovod_runner.checkpoint")
        return bytes(got.numpy().tobytes())

    return broadcast


def _by_torch_distributed(torch: Any) -> Callable[[bytes, int], bytes]:
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"

    def broadcast(data: bytes, count: int) -> bytes:
        own = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8).to(device)
        torch.distributed.broadcast(own, 0)
        return bytes(own.cpu().numpy().tobytes())

    return broadcast
