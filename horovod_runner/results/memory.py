"""Says what a rank had in memory and what was left, for warnings and failures; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from horovod_runner.common.text import duration_text, memory_text
from horovod_runner.wire.measurements import Machine, MemoryShort, MemoryUse

_MUCH_LEFT: Final = 0.25  # of the limit: then memory is not what a process was killed for


def last_use(machine: Machine) -> MemoryUse:
    """What a rank's last measurement says of its memory."""
    return MemoryUse(
        machine.memory_limit,
        machine.free_memory,
        worker=machine.memory - machine.children_memory,
        children=machine.children_memory,
        grown=machine.grown,
        seconds=60.0,
        shared=machine.shared_memory,
    )


def killer(use: MemoryUse) -> str:
    """Who sent SIGKILL to a rank, as far as its memory says; a part of a sentence."""
    if use.killed:
        return "the kernel's out-of-memory killer"
    much = use.free > _MUCH_LEFT * use.limit
    if use.killed == 0:
        if much:
            return "not the out-of-memory killer: a resource manager, or another process"
        return "not the kernel's out-of-memory killer; perhaps a resource manager's"
    if much:
        return "probably not the out-of-memory killer: there was memory left"
    return "probably the out-of-memory killer"


def last_words(use: MemoryUse | None, *, was_killed: bool) -> str:
    """What was last known of the memory of a rank that failed; empty if it was not about memory.

    Args:
        use: the last measurement; None without one.
        was_killed: whether the rank's process ended by SIGKILL, or has not been heard of again.
    """
    if use is None or not (was_killed or use.killed):
        return ""
    when = f"{use.age:.1f} s before the end, " if use.age else ""
    text = f"{when}{left(use)} were left"
    if use.killed and use.free > _MUCH_LEFT * use.limit:
        text += ", and were used up within this time"
    text += f". The rank had {amount(use)}."
    if use.killed and not was_killed:
        ended = f"{use.killed} process{'es' * (use.killed > 1)}"
        text = f"The kernel has ended {ended} because memory was used up. {text}"
    if use.killed or use.free <= _MUCH_LEFT * use.limit:
        text += f" {remedy([use])}"
    return text[0].upper() + text[1:]


def left(use: MemoryUse) -> str:
    """How much is left of what: "118 MiB of the container's 8.0 GiB"."""
    whose = "container's" if use.in_container else "host's"
    return f"{memory_text(use.free)} of the {whose} {memory_text(use.limit)}"


def amount(use: MemoryUse) -> str:
    """What a rank's processes have in memory, and their growth."""
    text = f"{memory_text(use.worker + use.children)} in memory"
    if use.processes:
        text += (
            f" (its own process {memory_text(use.worker)}, {use.processes} child "
            f"process{'es' * (use.processes > 1)} {memory_text(use.children)})"
        )
    elif use.children:
        text += f" (its child processes {memory_text(use.children)})"
    if use.grown > 0:
        text += f", {memory_text(use.grown)} more than {use.seconds:.0f} s earlier"
    return text


def remedy(uses: Sequence[MemoryUse]) -> str:
    """What to change, by what uses most: a sentence."""
    worker, children = sum(use.worker for use in uses), sum(use.children for use in uses)
    shared = max(use.shared for use in uses)
    if children > worker or shared > worker:
        first = "Use fewer DataLoader workers (num_workers) or a smaller prefetch_factor"
    else:
        first = "Use smaller batches (and keep loss.item() from step to step, not loss)"
    more = "a larger limit for the container" if uses[0].in_container else "hosts with more memory"
    return f"{first}, fewer ranks on a host, or {more} (on Spark: spark.executor.memoryOverhead)."


def warning(host: str, messages: Mapping[int, MemoryShort]) -> str:
    """The text for the user when the memory of a host is nearly used up."""
    first = min(messages.values(), key=lambda message: message.use.free)
    uses = {rank: message.use for rank, message in messages.items()}
    rank = max(uses, key=lambda rank: uses[rank].grown)
    most = uses[rank]
    lasts = duration_text(max(1.0, first.seconds))
    lines = [
        f"host {host} will soon have no memory left: {left(first.use)} are free, which lasts "
        f"{lasts} at the present growth. Then the kernel ends a process."
    ]
    if most.grown > 0:
        rate = f" ({memory_text(most.grown / most.seconds * 60)} a minute)" if most.seconds else ""
        lines.append(f"Rank {rank} has grown most{rate}: it has {amount(most)}.")
    else:
        lines.append("None of the run's ranks there has grown: another process uses the memory.")
    if most.shared:
        lines[-1] += f" /dev/shm holds {memory_text(most.shared)}."
    lines.append(remedy(list(uses.values())))
    return "\n".join(lines)
