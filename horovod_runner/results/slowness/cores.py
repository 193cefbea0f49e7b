"""Why a rank's main thread has no core, in words."""

from __future__ import annotations

from typing import Final

from horovod_runner.common.text import count_text
from horovod_runner.results.slowness.case import THROTTLED, Case

_STOLEN: Final = 0.1  # of the cores
_MORE: Final = 1.2  # times as many threads as cores


def why_no_core(case: Case, rank: int) -> tuple[str, str, str]:
    """What takes the cores of a rank: in words, what to change, and the reason."""
    throttled = case.machine(rank, "throttled")
    if throttled > THROTTLED:
        why = f"the container's CPU quota stops it for {throttled:.0%} of the time"
        return why, "raise the CPU limit of the container", "quota"
    hosts = case.profile.hosts
    here = [other for other in case.totals if hosts.get(other) == hosts.get(rank)]
    cores = case.mean(rank, "of_cores")
    if not cores:
        return (
            "what takes the cores is not known, because the machine was not measured",
            "end other processes on this host, or fewer ranks or threads (OMP_NUM_THREADS)",
            "others",
        )
    threads = sum(case.totals[other].threads for other in here)
    if threads > _MORE * cores:
        return (
            f"its host's ranks compute with {threads} threads on {cores:.0f} cores",
            "fewer threads: OMP_NUM_THREADS or torch.set_num_threads, which the runner sets to "
            "the cores of each rank, or fewer ranks",
            "threads",
        )
    ours = sum(case.totals[other].cpu / case.totals[other].seconds for other in here)
    others = case.mean(rank, "other_cores")
    stolen = case.mean(rank, "stolen")
    if stolen > _STOLEN * cores:
        return (
            f"the host is a virtual machine, and {stolen:.1f} of its {cores:.0f} cores are taken "
            "from it by the machine below",
            "another type of machine, or another host",
            "others",
        )
    return (
        f"of the {cores:.0f} cores of its host, {count_text(len(here), 'rank')} there and other "
        f"processes take {ours:.1f} and {others:.1f}",
        "end the other processes, or fewer ranks on this host"
        if others > ours / 4
        else "more cores per task, or fewer ranks on this host",
        "others",
    )
