"""What the supervisor of an attempt checks, by the options of its job."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_runner.driver.hangs import HangWatch, stall_lifetime
from horovod_runner.driver.sync_check import SyncCheck
from horovod_runner.driver.waits import TorchWaits
from horovod_runner.wire.job import Job


@dataclass(frozen=True)
class Checks:
    """The policies of one attempt, which decide from what the ranks send.

    Attributes:
        hang: decides whether the run hangs.
        waits: finds which ranks a collective of torch.distributed waits for.
        weights: compares the ranks' weights; None if the run does not check them.
    """

    hang: HangWatch
    waits: TorchWaits
    weights: SyncCheck | None


def checks_of(job: Job) -> Checks:
    """The checks of an attempt: the driver's, and in detached mode its stand-in's."""
    debug = job.options.debug_config
    return Checks(
        HangWatch(debug.hang_timeout, job.stall_seconds, job.limits),
        TorchWaits(job.size, stall_lifetime(job.stall_seconds), job.limits),
        SyncCheck(job.size) if debug.weight_check == "epoch" else None,
    )
