"""The driver among tasks that say what they like: the test speaks for them."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from horovod_runner.common.limits import DEFAULTS
from horovod_runner.common.options import Options
from horovod_runner.common.slots import Offer
from horovod_runner.driver.attempt import AttemptRunner
from horovod_runner.driver.launcher import Launch, Launcher, LaunchRequest
from horovod_runner.driver.phases import State
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.supervisor import Supervisor
from horovod_runner.errors import RankFailedError, RanksChangedError
from horovod_runner.sinks import Sink
from horovod_runner.wire import events, messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.job_file import WorkerOutcome
from horovod_runner.wire.link import Link
from horovod_runner.worker.main import _failed
from tests.events import telling

_SECONDS = 120.0


class Launched(Launch, Launcher):
    """A launcher that starts nothing, and the launch. Over when it is told so."""

    channel_host = "127.0.0.1"

    def __init__(self) -> None:
        self.address: SimpleQueue[ChannelAddress] = SimpleQueue()
        self.lost_batches = 0  # of each task

    def slots(self, size: int, patience: float = 0.0) -> int:
        return size

    def launch(self, request: LaunchRequest) -> Launched:
        self._wake = request.wake
        self.address.put(request.address)
        return self

    def end(self) -> None:
        self.finished = True
        self._wake()

    def outcomes(self) -> list[Outcome]:
        done = WorkerOutcome(True, 0, pickle.dumps("done"))
        return [Outcome(task, task, worker=done, lost=self.lost_batches) for task in range(2)]


class Heard(Sink):
    """A sink that remembers."""

    def __init__(self) -> None:
        self.shown: list[tuple[Any, ...]] = []

    def output(self, rank: int, stream: str, text: str) -> None:
        self.shown.append((rank, stream, text))

    def log(self, rank: int, text: str) -> None:
        self.shown.append((rank, text))

    def notice(self, text: str) -> None:
        self.shown.append((text,))


class Run:
    """A run of two tasks, whose ends of the channel are the test's."""

    def __init__(self, links: contextlib.ExitStack) -> None:
        launched, self._heard = Launched(), Heard()
        self._requests = Requests()
        self._attempt = AttemptRunner(
            Job("test", 2, Options(np=2), b""), launched, telling(self._heard), self._requests
        )
        self.result: SimpleQueue[object] = SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        self._launched = launched
        address = launched.address.get(timeout=_SECONDS)
        self.links = [
            links.enter_context(contextlib.closing(Link(address, task))) for task in range(2)
        ]

    @property
    def supervisor(self) -> Supervisor:
        assert self._requests.supervisor is not None
        return self._requests.supervisor

    def _work(self) -> None:
        try:
            self.result.put(self._attempt.run())
        except Exception as error:
            self.result.put(error)

    def say(self, task: int, *said: messages.Message) -> list[messages.FromDriver]:
        """Send; returns all that the driver has answered when it has taken it."""
        link = self.links[task]
        for message in said:
            link.put(message)
        link.put(messages.Ended(task, 0))
        answers: list[messages.FromDriver] = []
        while messages.Taken() not in answers:
            answers += link.wait(_SECONDS)
        return answers

    def gather(self) -> None:
        """Both tasks say hello, and have their ranks."""
        for task in range(2):
            self.say(task, hello(task))
        assert [slot.task for slot in self.supervisor.roster.slots] == [0, 1]

    def end(self) -> list[tuple[Any, ...]]:
        """End the run well; returns what it showed."""
        self._launched.end()
        self._thread.join(_SECONDS)
        assert self.result.get(timeout=_SECONDS) == "done"
        return self._heard.shown


def hello(task: int) -> messages.Hello:
    return messages.Hello(Offer(task, "h", "h", "127.0.0.1", "lo"), "127.0.0.1:1/token", 1)


@pytest.fixture
def run() -> Iterator[Run]:
    with contextlib.ExitStack() as links:
        opened = Run(links)
        yield opened
        opened._launched.end()
        opened._thread.join(_SECONDS)


@pytest.mark.parametrize("rank", [0, 2, -1, 10**9, 2**64 - 1])
@pytest.mark.parametrize(
    "claim",
    [
        lambda rank: messages.Started(rank, 4711),
        lambda rank: events.Output(rank, "stdout", "not mine"),
        lambda rank: events.Log(rank, "not mine"),
    ],
    ids=["Started", "Output", "Log"],
)
def test_what_a_task_says_of_another_rank_is_dropped_and_counted(
    run: Run, claim: Callable[[int], messages.Message], rank: int
) -> None:
    run.gather()
    run.say(1, claim(rank), events.Log(1, "mine"))
    assert run.supervisor._channel.dropped == 1
    assert run.supervisor.roster.pids == {}
    assert run.end() == [(1, "mine")]


def test_a_host_without_ports_enough_for_gloo_is_told_of_before_ranks_connect(run: Run) -> None:
    for task in range(2):
        few = Offer(task, "h", "small", "127.0.0.1", "lo", ports=11)
        run.say(task, messages.Hello(few, "127.0.0.1:1/token", 1))
    ((told,),) = run.end()
    assert "host small has 11 ephemeral ports" in told
    assert "2 ranks take up to 12" in told


def test_no_rank_fails_by_another_ones_word(run: Run) -> None:
    run.gather()
    answers = run.say(1, messages.Failed(0, 1), messages.Failed(10**9, 1, secondary=True))
    assert answers == [messages.Taken()]
    assert run.supervisor.failed == run.supervisor._secondary == {}
    assert run.supervisor._channel.dropped == 2
    run.end()


def test_a_rank_fails_once_and_cannot_put_the_end_off(run: Run) -> None:
    run.gather()
    run.say(1, messages.Failed(1, 1))
    deadline = run.supervisor.phase.until
    answers = run.say(1, *[messages.Failed(1, 1)] * 100)
    assert run.supervisor.failed == {1: 1}
    assert run.supervisor.phase.until in (deadline, None)  # None: it has come
    while not any(isinstance(answer, messages.Stop) for answer in answers):
        answers = run.links[0].wait(_SECONDS)
    run.end()


def test_before_it_has_a_rank_a_task_can_only_fail(run: Run) -> None:
    run.say(1, events.Log(1, "too early"), messages.Started(1, 4711))
    assert run.supervisor._channel.dropped == 2
    run.say(1, messages.Failed(-1, 1))
    assert run.supervisor.failed == {1: -1}
    assert run.end() == []


def test_no_task_says_hello_for_another(run: Run) -> None:
    assert run.say(1, hello(0), hello(10**9)) == [messages.Taken()]
    assert run.supervisor._channel.dropped == 2
    run.gather()
    run.end()


def test_a_task_that_runs_again_is_called_off_and_ends_the_run(run: Run) -> None:
    run.gather()
    again = run.say(1, hello(1))
    assert messages.Stop("this run has already started") in again
    assert messages.Stop("a rank was lost", DEFAULTS.saving) in run.say(0)
    run._launched.end()
    error = run.result.get(timeout=_SECONDS)
    assert isinstance(error, RankFailedError)
    assert "rank 1 of 2 on h" in str(error)


def test_a_rank_that_leaves_at_a_commit_gives_the_others_time_for_theirs(run: Run) -> None:
    run.gather()
    left = _failed(RanksChangedError("leaves"), 1)
    run.say(1, messages.Failed(1, 1, left.error_type))
    assert run.supervisor.phase.state is State.LEAVING


def test_the_table_of_ranks_is_shown_once(run: Run) -> None:
    run.gather()
    for _ in range(3):
        for task in range(2):
            run.say(task, messages.Started(task, 4711 + task))
    assert len(run.end()) == 1


def test_messages_that_many_ranks_have_lost_are_one_notice(run: Run) -> None:
    run.gather()
    run._launched.lost_batches = 3
    assert run.end() == [
        ("the driver lost touch with ranks 0-1: the last 6 batches of messages are missing here",)
    ]
