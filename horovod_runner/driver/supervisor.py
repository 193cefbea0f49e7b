"""Supervises one attempt: answers the tasks, watches over the ranks, and ends them together.

Used by the driver, and by its stand-in on an executor. The states of an attempt are in `phases`,
its tasks and ranks in `roster`. Long because each message of a task is answered here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, assert_never, cast

from horovod_runner.common.text import ranks_text
from horovod_runner.driver.checks import Checks
from horovod_runner.driver.intake import Content, Observer, OwnMessage
from horovod_runner.driver.launcher import Launch, TaskLostError
from horovod_runner.driver.liveness import Presence
from horovod_runner.driver.phases import Phase, State, Trigger
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.roster import Roster
from horovod_runner.driver.sync_check import NoteCheck
from horovod_runner.driver.watchdog import Watchdog
from horovod_runner.errors import (
    CancelledError,
    HorovodRunnerError,
    LaunchError,
    RanksChangedError,
    SyncError,
)
from horovod_runner.wire import events, measurements, messages, pool
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.events import ControllerChosen, Notice, RanksPlaced
from horovod_runner.wire.job import Job
from horovod_runner.wire.measurements import MemoryShort, Waits

_TICK_SECONDS: Final = 1.0
_RANKS_CHANGED: Final = f"{RanksChangedError.__module__}.{RanksChangedError.__qualname__}"


class Supervisor:
    """One attempt, from the launch of its tasks to the last message of the last one.

    Attributes:
        notes: the comparison of what the ranks' code does.
        weights: the comparison of their weights; None if the run does not check them.
        problem: why the attempt cannot succeed, where that is no rank's failure.
        failed: the ranks that failed by themselves, by task, in the order of their reports.
    """

    def __init__(
        self,
        job: Job,
        channel: Channel,
        launch: Launch,
        observer: Observer,
        requests: Requests,
        *,
        checks: Checks,
    ) -> None:
        self._job = job
        self._limits = job.limits
        self._channel = channel
        self._launch = launch
        self._observer = observer
        self._requests = requests
        self.phase = Phase(job.limits)
        self.roster = Roster(job, self._notice)
        self.weights = checks.weights
        self.notes = NoteCheck(job.size, self.roster.host_of, self._notice, limits=job.limits)
        self.problem: HorovodRunnerError | None = None
        self.failed: dict[int, int] = {}
        self._secondary: dict[int, int] = {}  # ranks that noticed another one's end, by task
        self._presence = Presence(channel, launch, job.limits)
        self._watchdog = Watchdog(
            job, checks, self._notice, lambda: self._send_all(messages.ShowStacks())
        )
        self._launched_at = time.monotonic()
        self._tick_at = 0.0

    def _notice(self, text: str) -> None:
        self._observer.take(Notice(text))

    def run(self) -> None:
        """Supervise until all tasks have ended and their last messages have arrived.

        Raises:
            CancelledError: another thread asked for it.
            KeyboardInterrupt: Ctrl-C was pressed.
            HorovodRunnerError: all tasks were lost, and the launcher does not end.
        """
        while not self._launch.finished and self.phase.state is not State.OVER:
            if self._requests.interrupted.is_set():
                raise KeyboardInterrupt  # the one that Ctrl-C raised got lost
            if self._requests.cancelled.is_set() and self.phase.can_be_called_off:
                self.call_off()
                raise CancelledError(self._called_off()) from self.problem
            self._step()
        if not self._launch.finished:
            raise self.problem or LaunchError("Spark did not stop the job within the time limit")
        self._settle()

    def _called_off(self) -> str:
        text = f"run {self._job.run_id} was cancelled"
        forced = self._presence.lost or self._presence.present
        if self._launch.finished and not forced:
            return f"{text}: all ranks are gone"
        return (
            f"{text}, and some of its tasks did not end by themselves within "
            f"{self._limits.ranks_end:g} s: ranks may still run. horovod-runner ps lists those of "
            "this machine"
        )

    def call_off(self) -> None:
        """End an attempt that the caller gave up: all ranks, as far as the time limits allow."""
        self._end(
            Trigger.CALL_OFF if self.roster.hellos else Trigger.UNHEARD,
            "the driver gave the run up",
        )
        while not self._launch.finished and self.phase.state is not State.OVER:
            self._step()
        if self._launch.finished:  # PySpark cancels the job by itself on Ctrl-C
            self._settle()

    def wake(self) -> None:
        """Look at the requests now; for other threads."""
        self._channel.wake()

    def _step(self) -> None:
        if self._requests.take_stacks():
            if self.phase.state in (State.SILENT, State.DETACHED):
                self._notice("the ranks cannot be asked for their stacks from here")
            else:
                self._watchdog.show_stacks()
        tick = self._tick_at if self.roster.hellos else None
        until = self._launch.expected if self.phase.state is State.STARTING else self.phase.until
        abandoned = self.phase.state is State.ABANDONED
        again = time.monotonic() + _TICK_SECONDS if abandoned else None
        moments = [moment for moment in (until, tick, again) if moment is not None]
        timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
        state = self.phase.state
        for task, batch in self._channel.batches(timeout):
            self._take_in(task, batch)
        self._observer.idle()
        if told := self._presence.told():
            self._on_lost(told)
        if self._launch.problem is not None and not self.phase.ending:
            self.fail(self._launch.problem, "the launcher failed")
        now = time.monotonic()
        if until is not None and now > until and self.phase.state is state:
            self._on_timeout(now)
        if tick is not None and now >= tick:
            self._tick_at = now + _TICK_SECONDS
            self._tick()
        if abandoned and not self._launch.finished:
            # Again: Spark may not have known the job yet when it was asked to cancel it.
            self._launch.cancel()

    def _on_timeout(self, now: float) -> None:
        if self.phase.until is not None and now <= self.phase.until:
            return  # it began anew with the last messages
        match self.phase.state:
            case State.STARTING if self._launch.running:
                self.phase.on(Trigger.UNREACHABLE)
                self._follow()
            case State.SILENT:
                self._observer.say_detached()
                self.phase.on(Trigger.TIMEOUT)
                self.phase.extend(None)
            case State.STARTING:
                self.problem = self._launch.late_error()
                # A task that reports later is told to stop, too.
                self._end(Trigger.TIMEOUT, "no task started in time")
                self._launch.cancel()
            case State.GATHERING if self._launch.running:
                self._detach()
            case State.GATHERING:
                missing = self.roster.missing
                self.problem = LaunchError(
                    f"{len(missing)} of {self._job.size} tasks did not report within "
                    f"{self._limits.all_tasks:g} s of the first (tasks {missing[:10]}): their "
                    f"executors cannot reach the driver at {self._channel.address.host}, or start "
                    "very slowly."
                )
                self._end(Trigger.TIMEOUT, "some tasks did not report")
                self._launch.cancel()
            case State.AWAITING_CAUSE if self._presence.suspicious:
                # The cause may be a lost rank, which sends nothing.
                self.phase.extend(_TICK_SECONDS)
            case State.AWAITING_CAUSE | State.FAILING | State.LEAVING:
                ranks = list((self.failed or self._secondary).values())
                self._end(Trigger.TIMEOUT, f"{ranks_text(ranks)} failed")
            case _:
                self._end(Trigger.TIMEOUT, "")

    def _tick(self) -> None:
        """Once a second: is every task still there, and do the ranks make progress?"""
        if lost := self._presence.tick():
            self._on_lost(lost)
        if self._presence.lost and not self._presence.present:
            # Spark waits two minutes for an executor that went away without a word.
            self._end(Trigger.ALL_LOST, "")
        if not self.phase.ending and (hang := self._watchdog.tick()):
            self.fail(hang, "no progress")

    def _on_lost(self, lost: Iterable[int]) -> None:
        self._presence.lose(lost)
        if not self.phase.ending:
            self.fail(self.roster.lost_error(sorted(self._presence.lost)), "a rank was lost")

    def fail(self, problem: HorovodRunnerError, reason: str = "") -> None:
        """End the attempt for a reason that is no rank's failure."""
        self.problem = problem
        self._end(Trigger.PROBLEM, reason)

    def _end(self, trigger: Trigger, reason: str) -> None:
        was_ending = self.phase.ending
        if not self.phase.on(trigger):
            return
        if trigger is Trigger.CALL_OFF:
            self._send_all(messages.Stop(reason, self._limits.saving_cancelled))
        elif not was_ending:
            self._send_all(messages.Stop(reason, self._limits.saving))
        if self.phase.state is State.ABANDONED:
            self._launch.cancel()

    def _settle(self) -> None:
        """Wait for tasks that outlive their launch: Spark does not wait for those it cancels."""
        for task, batch in self._channel.batches(0):
            self._take_in(task, batch)
        try:
            self._launch.outcomes()
        except TaskLostError as error:
            self._presence.lose([error.task])
        except LaunchError:
            pass
        if self._presence.present:
            self._end(Trigger.LAUNCH_ENDED, "the launch has ended")
        else:
            self.phase.on(Trigger.LAUNCH_ENDED)
        while self._presence.present and self.phase.state is State.SETTLING:
            self._step()
        self.phase.on(Trigger.ALL_LEFT)

    def _take_in(self, task: int, batch: list[messages.FromRank]) -> None:
        if set(map(type, batch)) == {events.Report}:  # there may be very many
            self._on_reports(task, cast("list[events.Report]", batch))
            return
        for message in batch:
            self._handle(task, message)

    def _handle(self, task: int, message: messages.FromRank) -> None:
        if isinstance(message, events.Report):
            self._on_reports(task, [message])
            return
        if isinstance(message, messages.Hello) and task in self.roster.hellos:
            self._on_rerun(task)
            return
        if self.phase.state is State.DETACHED and not isinstance(message, messages.Hello):
            return  # sent before the task detached
        self._presence.heard(task)
        match message:
            case messages.Hello():
                self._on_hello(task, message)
            case messages.Ended():
                self._on_ended(task, message)
            case pool.Joined() | pool.Done():
                self._channel.dropped += 1  # they belong to another channel
            case messages.Failed(rank=-1):  # before it was given a rank
                self._on_failed(task, message)
            case (
                messages.Alive()
                | messages.Stalled()
                | Waits()
                | messages.Stacks()
                | MemoryShort()
                | messages.Unshown()
            ):
                if task in self.roster.ranks:
                    self._watchdog.handle(self.roster.ranks[task], message)
            case _ if message.rank != self.roster.ranks.get(task):
                self._channel.dropped += 1  # no task speaks for another's rank
            case _:
                self._handle_own(task, message)

    def _handle_own(self, task: int, message: OwnMessage) -> None:
        match message:
            case messages.Started():
                self._on_started(message)
            case messages.Weights() | measurements.Note():
                self._compare(message)
            case messages.Fence():
                if self.roster.fence(message):
                    self._send_all(messages.Fenced())
            case messages.Lookup():
                self._channel.send(task, messages.MpiValues(self.roster.mpi_values))
            case messages.Failed():
                self._on_failed(task, message)
            case messages.FilePart() | events.Saved() | events.Unsaved() | messages.Fetch():
                if message.rank == 0 or messages.is_trace(message):
                    self._observe(task, message)
                else:
                    self._channel.dropped += 1  # only rank 0 saves and loads
            case events.Event():
                self._observe(task, message)
            case _:
                assert_never(message)

    def _on_reports(self, task: int, reports: list[events.Report]) -> None:
        if self.phase.state is State.DETACHED:
            return
        self._presence.heard(task)
        rank = self.roster.ranks.get(task)
        valid = [report for report in reports if report.rank == rank]
        self._channel.dropped += len(reports) - len(valid)
        if valid:
            self._observer.reports(valid)

    def _observe(self, task: int, message: Content) -> None:
        if isinstance(message, measurements.Machine):
            self.roster.machines[message.rank] = message
        answer = None
        try:
            answer = self._observer.take(message)
        except ValueError:
            self._channel.dropped += 1
        except HorovodRunnerError as error:
            if self.problem is None and not self.failed:
                self.fail(error, "a checkpoint that is required could not be written")
        if answer is not None:
            self._channel.send(task, answer)

    def _on_hello(self, task: int, hello: messages.Hello) -> None:
        if hello.offer.task != task:
            self._channel.dropped += 1
        elif self.phase.ending:
            self._channel.send(task, messages.Stop("this run is over"))
        elif self.phase.state is State.DETACHED:
            self._channel.send(task, messages.Detach())
        else:
            self.roster.hellos[task] = hello
            self._channel.send(task, messages.Welcome())
            # Tasks that first write rows to disk may take longer.
            waited = time.monotonic() - self._launched_at if hello.pieces else 0.0
            self.phase.on(Trigger.HELLO, self._limits.all_tasks + 4 * waited)
            if self.roster.complete and self.phase.state is State.GATHERING:
                self._place()

    def _place(self) -> None:
        try:
            controller = self.roster.choose_controller()
            self._observer.take(ControllerChosen(controller))
            assignments = list(self.roster.place(controller))
        except HorovodRunnerError as error:
            self.fail(error, "the ranks cannot be placed")
            return
        for assignment in assignments:
            self._channel.send(assignment.slot.task, assignment)
        self.phase.on(Trigger.PLACED)

    def _on_rerun(self, task: int) -> None:
        """Spark lost an executor and runs the stage again: never train twice without saying so."""
        self._channel.send(task, messages.Stop("this run has already started"))
        if not self.phase.ending:
            self._on_lost(self._presence.most_silent() or [task])

    def _on_started(self, message: messages.Started) -> None:
        if not self.roster.started(message):
            return
        self._watchdog.started(message.rank)
        if self.roster.all_started:
            self._observer.take(RanksPlaced(self.roster.infos({})))
            if self._job.size > 1:
                self._notice(self.roster.describe())
            if self._job.options.cluster_config.preload_frameworks:
                self._notice(self.roster.describe_start())

    def _compare(self, message: messages.Weights | measurements.Note) -> None:
        try:
            if isinstance(message, measurements.Note):
                self.notes.take(message)
            elif self.weights is not None:
                self.weights.take(message)
            else:
                self._channel.dropped += 1  # nobody asked
        except SyncError as error:
            if not self.phase.ending:
                self.fail(error, "the ranks' weights differ")

    def _on_failed(self, task: int, message: messages.Failed) -> None:
        if self.phase.ending or task in self.failed:
            return
        self._watchdog.show_shortages()  # they may be the cause
        if message.secondary:
            self._secondary[task] = message.rank
            self.phase.on(Trigger.SECONDARY)
        else:
            self.failed[task] = message.rank
            changes = message.error_type == _RANKS_CHANGED
            self.phase.on(Trigger.CHANGE if changes else Trigger.FAILURE)
        ended = len(self.failed)
        if self.phase.state is State.LEAVING:
            ended += len(self._secondary)
        if ended == self._job.size:
            self._end(Trigger.TIMEOUT, "all ranks failed")  # there is nobody to wait for

    def _on_ended(self, task: int, message: messages.Ended) -> None:
        missing = message.sent - self._channel.received[task] + 1
        if missing > 0:
            self._notice(f"{missing} batches of messages from task {task} were lost on the way")
        self._channel.send(task, messages.Taken())
        self._presence.ended(task)
        if task in self.roster.ranks:
            self._watchdog.ended(self.roster.ranks[task])

    def _follow(self) -> None:
        """Let the observer look for a stand-in."""
        channel = self._channel
        self._observer.detached(channel.address, channel.wake, self._launch.task_0)

    def _detach(self) -> None:
        """Some tasks cannot reach this process: all do without it."""
        self.phase.on(Trigger.UNREACHABLE)
        self._follow()
        self._send_all(messages.Detach())
        self.roster.hellos.clear()
        self._presence = Presence(self._channel, self._launch, self._limits)

    def _send_all(self, message: messages.FromDriver) -> None:
        self._channel.send_all(self.roster.hellos, message)
