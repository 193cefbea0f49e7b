"""The driver's end of a pool: the other ends of its channel are in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing
from typing import TypeVar

import msgspec
import pytest

from horovod_runner.common.limits import Limits
from horovod_runner.common.options import ClusterConfig, Options
from horovod_runner.driver.elastic.launch import PooledLaunch
from horovod_runner.driver.elastic.pool import Pool
from horovod_runner.driver.elastic.scaling import ScalingPolicy
from horovod_runner.driver.launcher import (
    JobCancelledError,
    LaunchRequest,
    MemberTasks,
    PoolRequest,
    TaskLostError,
)
from horovod_runner.errors import LaunchError
from horovod_runner.launchers.local import LocalLauncher
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.link import Link
from horovod_runner.wire.messages import Stop, Taken
from horovod_runner.wire.pool import Done, Joined, Work

pytestmark = pytest.mark.usefixtures("nothing_left")

Kind = TypeVar("Kind")
JOB = Job("test", 2, Options(np=(-1, -2)), b"", attempt=1)


class Tasks(LocalLauncher, MemberTasks):
    """A launcher whose tasks are this process, and nobody has to end them.

    Attributes:
        ended: tells the pool that the task of a seat has gone.
        address: of the pool's channel.
        not_settled: called when the pool asks whether there are ends that it does not know of.
    """

    ended: Callable[[int, LaunchError], None]
    address: ChannelAddress
    not_settled: Callable[[], None] | None = None

    def launch_members(self, request: PoolRequest) -> Tasks:  # type: ignore[override]
        self.address, self.ended = request.address, request.ended
        return self

    def settled(self) -> bool:
        if self.not_settled is None:
            return True
        self.not_settled()
        return False

    def close(self, served: Collection[int], seconds: float) -> None:
        return


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
def pool(tasks: Tasks) -> Iterator[Pool]:
    with Pool(tasks, JOB, ScalingPolicy(1, 2), print, threading.Event()) as pool:
        yield pool


@pytest.fixture
def links(pool: Pool) -> Iterator[list[Link]]:
    """The ends of the tasks in both seats."""
    links = [Link(pool._channel.address, seat) for seat in range(2)]
    yield links
    for link in links:
        link.close()


def next_of(link: Link, kind: type[Kind]) -> Kind:
    """Wait for a message of a kind."""
    while True:
        for message in link.wait(5):
            if isinstance(message, kind):
                return message


def join(pool: Pool, links: list[Link]) -> None:
    """Let all tasks say that they wait for work, until the pool knows it."""
    for link in links:
        link.put(Joined(1))
        link.flush()
    until(pool, lambda: pool.ready() == len(links))


def until(pool: Pool, done: Callable[[], bool]) -> None:
    """Wait until something is so, which changes with the members of the pool."""
    with pool.changed:
        assert pool.changed.wait_for(done, timeout=20)


def begin(pool: Pool, links: list[Link]) -> tuple[PooledLaunch, list[Outcome]]:
    """Begin an attempt; returns it, and how its tasks end."""
    join(pool, links)
    launch = pool.launch(LaunchRequest(JOB, pool._channel.address, lambda: None))
    return launch, [Outcome(next_of(link, Work).task, exit_code=0) for link in links]


def deliver(link: Link, outcome: Outcome) -> None:
    """Let a task end."""
    link.put(Done(1, msgspec.msgpack.encode(outcome), -1))
    next_of(link, Taken)


def test_members_that_have_ended_stay_when_those_that_have_not_are_given_up(
    pool: Pool, links: list[Link]
) -> None:
    launch, ended = begin(pool, links)
    deliver(links[0], ended[0])
    assert not launch.finished
    launch.cancel()
    assert launch.finished
    assert launch.lost == [ended[1].task]
    with pool.changed:
        assert pool.ready() == 1  # the member that has ended
    with pytest.raises(TaskLostError, match="ended") as caught:
        launch.outcomes()
    assert caught.value.task == ended[1].task
    # Both take part again: one that has ended, and one that ends later.
    deliver(links[1], ended[1])
    join(pool, links)


def test_a_task_that_goes_after_it_has_delivered_its_outcome_is_not_lost(
    pool: Pool, tasks: Tasks, links: list[Link]
) -> None:
    launch, ended = begin(pool, links)
    deliver(links[0], ended[0])
    tasks.ended(0, LaunchError("its executor was removed"))
    assert not launch.finished  # the other one still works
    deliver(links[1], ended[1])
    assert launch.finished
    assert not launch.lost
    assert launch.outcomes() == ended


def test_the_process_of_a_task_that_has_ended_is_no_member_again(
    pool: Pool, tasks: Tasks, links: list[Link]
) -> None:
    join(pool, links)
    tasks.ended(0, LaunchError("its Spark job was cancelled"))
    links[0].put(Joined(1))
    assert isinstance(next_of(links[0], Stop), Stop)
    with pool.changed:
        assert pool.ready() == 1
    links[0].put(Joined(2))  # the task that Spark starts instead
    links[0].flush()
    until(pool, lambda: pool.ready() == 2)


def test_the_rank_of_a_task_whose_spark_job_was_cancelled_is_waited_for(
    pool: Pool, tasks: Tasks, links: list[Link]
) -> None:
    launch, ended = begin(pool, links)
    tasks.ended(0, JobCancelledError("its Spark job was cancelled"))
    assert "its Spark job was cancelled" in str(launch.problem)  # so all ranks are told to end
    for link, outcome in zip(links, ended, strict=True):
        assert not launch.finished
        deliver(link, outcome)
    assert launch.finished
    assert not launch.lost
    assert launch.outcomes() == ended
    links[0].put(Joined(1))
    next_of(links[0], Stop)
    with pool.changed:
        assert pool.ready() == 1


def test_no_attempt_begins_before_all_jobs_that_were_cancelled_together_are_known(
    tasks: Tasks,
) -> None:
    """The launcher still has the end of the second one to tell."""

    def tell() -> None:
        tasks.not_settled = None
        tasks.ended(1, JobCancelledError("cancelled, too"))

    limits = Limits(cancelled_tasks=0.001)
    options = Options(np=(-2, -3), cluster_config=ClusterConfig(limits=limits))
    job = Job("test", 3, options, b"")
    with ExitStack() as stack:
        pool = stack.enter_context(Pool(tasks, job, ScalingPolicy(2, 3), print, threading.Event()))
        for seat in range(3):
            link = stack.enter_context(closing(Link(tasks.address, seat)))
            link.put(Joined(1))
            link.flush()
        assert pool.slots(3) == 3
        tasks.ended(0, JobCancelledError("cancelled"))
        tasks.not_settled = lambda: threading.Thread(target=tell).start()
        with pytest.raises(JobCancelledError, match="cancelled, too"):
            pool.slots(3)
