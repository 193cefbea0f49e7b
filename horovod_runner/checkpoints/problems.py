"""The errors of a checkpoint that is damaged, or that cannot be read at all."""

from __future__ import annotations

from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.problems import describe
from horovod_runner.wire.marker import Marker


class UnreachableError(CheckpointError):
    """The folder of a checkpoint cannot be read: that says nothing about the checkpoint."""


def unreachable(marker: Marker, error: Exception) -> UnreachableError:
    """The error of a checkpoint of which a read failed."""
    return UnreachableError(
        f"the checkpoint {marker.name} (step {marker.step}) cannot be read: {describe(error)}"
    )


def damaged(marker: Marker, how: str) -> CheckpointError:
    """The error of a checkpoint that has other bytes than were written."""
    return CheckpointError(
        f"the checkpoint {marker.name} (step {marker.step}) is damaged: {how}. The disk or the "
        "remote folder has changed it: use an earlier checkpoint."
    )
