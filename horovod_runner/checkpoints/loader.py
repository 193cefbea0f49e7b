"""Reads a checkpoint on rank 0 and broadcasts it to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_runner.checkpoints import checkpoint, folders, formats
from horovod_runner.common.connected import connected_library
from horovod_runner.errors import CheckpointError
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker

_BROADCAST_BYTES = 64 << 20


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint to resume from.

    Attributes:
        state: as it was given to ``save_checkpoint``; tensors are on the CPU, a folder is the path
            of a temporary copy.
        step: as given to ``save_checkpoint``.
        metrics: as given to ``save_checkpoint``.
    """

    state: Any = field(repr=False)
    step: int
    metrics: Mapping[str, float | int]


def load(
    plan: CheckpointPlan, rank: int, size: int, warn: Callable[[str], None]
) -> LoadedCheckpoint | None:
    """Load the checkpoint to resume from: rank 0 reads it and broadcasts it.

    Args:
        plan: the run's plan for its checkpoints.
        rank: this rank's number.
        size: the number of ranks, all of which call this.
        warn: called with a line for the user if a checkpoint is damaged.

    Returns:
        The checkpoint; None if this training is new.

    Raises:
        CheckpointError: all checkpoints are damaged.
        RuntimeError: the ranks are not connected yet.
    """
    # Also in a new training: a main that calls this too early should fail now, not at a restart.
    broadcast = None if size == 1 else _broadcast()
    if not plan.resume:
        return None
    with ExitStack() as cleanup:
        if rank == 0:
            path, marker = _latest_intact(plan, cleanup, warn)
            if broadcast is not None:
                broadcast(plan.resume.index(marker).to_bytes(8, "little"), 8)
                _send_file(path, broadcast)
        else:
            assert broadcast is not None  # noqa: S101 - rank 1 and above exist only if size > 1
            marker = plan.resume[int.from_bytes(broadcast(b"", 8), "little")]
            path = _receive_file(marker, broadcast, cleanup)
        state = formats.read(marker.kind, path)
    return LoadedCheckpoint(state, marker.step, dict(marker.metrics))


def _latest_intact(
    plan: CheckpointPlan, cleanup: ExitStack, warn: Callable[[str], None]
) -> tuple[Path, Marker]:
    """The latest checkpoint that is not damaged."""
    if plan.fetched:  # the driver has verified it
        path = Path(plan.fetched)
        return path, next(marker for marker in plan.resume if marker.name == path.name)
    folder = folders.open_folder(plan.folder)
    for marker in plan.resume:
        try:
            return cleanup.enter_context(checkpoint.intact_file(folder, marker)), marker
        except CheckpointError as error:
            warn(f"HorovodRunner: {error} The earlier one is used.")
    raise CheckpointError(
        f"all {len(plan.resume)} checkpoints in {plan.folder} are damaged or gone: remove them, or "
        "name another checkpoint_dir, to start a new training"
    )


def _send_file(path: Path, broadcast: Callable[[bytes, int], bytes]) -> None:
    left = path.stat().st_size
    with path.open("rb") as file:
        while left:
            data = file.read(min(left, _BROADCAST_BYTES))
            broadcast(data, len(data))
            left -= len(data)


def _receive_file(
    marker: Marker, broadcast: Callable[[bytes, int], bytes], cleanup: ExitStack
) -> Path:
    path = Path(cleanup.enter_context(temporary_folder("checkpoint"))) / marker.name
    left = marker.size
    with path.open("xb") as file:
        while left:
            count = min(left, _BROADCAST_BYTES)
            file.write(broadcast(b"", count))
            left -= count
    return path


def _broadcast() -> Callable[[bytes, int], bytes]:
    """A function that broadcasts bytes from rank 0, with the library that main has initialized.

    Its arguments are ``data``, which is read on rank 0 only, and ``count``, the number of bytes,
    which must be the same on all ranks.
    """
    connected = connected_library()
    if connected is not None:
        name, module = connected
        return {
            "horovod.torch": _by_torch,
            "horovod.tensorflow": _by_tensorflow,
            "torch": _by_torch_distributed,
        }[name](module)
    raise RuntimeError(
        "load_checkpoint broadcasts from rank 0, and the ranks are not connected yet: call "
        "hvd.init() before it (or torch.distributed.init_process_group())"
    )


def _by_torch(horovod: Any) -> Callable[[bytes, int], bytes]:
    import torch

    def broadcast(data: bytes, count: int) -> bytes:
        buffer = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8)
        horovod.broadcast_(buffer, 0, name="horovod_runner.checkpoint")
        return bytes(buffer.numpy().tobytes())

    return broadcast


def _by_tensorflow(horovod: Any) -> Callable[[bytes, int], bytes]:
    import numpy
    import tensorflow

    def broadcast(data: bytes, count: int) -> bytes:
        array = numpy.frombuffer(data or bytes(count), numpy.uint8)
        with tensorflow.device("/cpu:0"):
            tensor = tensorflow.constant(array)
            received = horovod.broadcast(tensor, 0, name="horovod_runner.checkpoint")
        return bytes(received.numpy().tobytes())

    return broadcast


def _by_torch_distributed(torch: Any) -> Callable[[bytes, int], bytes]:
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"

    def broadcast(data: bytes, count: int) -> bytes:
        buffer = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8).to(device)
        torch.distributed.broadcast(buffer, 0)
        return bytes(buffer.cpu().numpy().tobytes())

    return broadcast
