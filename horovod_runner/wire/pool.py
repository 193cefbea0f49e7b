"""The messages between the driver and the tasks of a pool: see launchers/member.py."""

from __future__ import annotations

from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.events import Message
from horovod_runner.wire.job_file import CheckpointPlan


class Joined(Message, frozen=True):
    """A task waits for work. Repeated until it gets some.

    Attributes:
        began: when the task began, in nanoseconds: tells it from an earlier one in the same seat.
    """

    began: int


class Done(Message, frozen=True):
    """A task has done its work. Repeated until the answer, Taken, arrives.

    Attributes:
        attempt: in which it took part.
        outcome: an :class:`~horovod_runner.wire.job.Outcome`, encoded. It holds a pickle, the only
            one that comes over a channel.
        committed: the step of the latest commit on the task's host; -1 if there is none.
    """

    attempt: int
    outcome: bytes
    committed: int


class Work(Message, frozen=True):
    """From the driver: what a task does in an attempt.

    Attributes:
        task: the task's number in the attempt.
        attempt: 1-based number of the launch within the run.
        address: the attempt's channel.
    """

    task: int
    size: int
    attempt: int
    checkpoints: CheckpointPlan
    address: ChannelAddress


class Change(Message, frozen=True):
    """From the driver: the ranks of an attempt are to leave at their next commit."""

    attempt: int
