"""Supervises one run: opens the channel, launches, listens, and turns the end into a result.

Everything happens in the thread that called ``run``: output lands in the right notebook cell, and
Ctrl-C is heard at once.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Callable, Iterable
from threading import Event
from typing import Any, cast

from horovod_runner import failure, messages, software, topology
from horovod_runner.archive import Archive
from horovod_runner.channel import Channel
from horovod_runner.errors import (
    CancelledError,
    HorovodRunnerError,
    LaunchError,
    SerializationError,
    SyncError,
)
from horovod_runner.job import Job, Outcome, Record
from horovod_runner.launchers import Launch, Launcher, LaunchLostError, TaskLostError
from horovod_runner.liveness import Liveness
from horovod_runner.pmi import process_mapping
from horovod_runner.sinks import Sink
from horovod_runner.sync import SyncCheck
from horovod_runner.watchdog import Watchdog

_GATHER_SECONDS = 120.0  # between the first task's hello and the last one's
_CAUSE_SECONDS = 2.0  # survivors may report before the rank that caused their errors
_TOGETHER_SECONDS = 0.2  # for ranks that fail in the same way, to name them together
_STOP_SECONDS = 10.0
_TICK_SECONDS = 1.0
_CANCEL_SECONDS = 10.0  # for Spark to end a job that it was asked to

_UNCOMPARED = (
    "check_sync: the ranks' weights were never compared. The callbacks of horovod_runner.keras and "
    "horovod_runner.lightning do it at the end of each epoch; in a loop of your own call "
    "horovod_runner.check_sync(model, epoch) there, on every rank."
)


class Driver:
    """One run of a job.

    Args:
        job: what to run.
        launcher: where.
        sink: takes what comes back.
        cancelled: set, with a call of :meth:`wake` after it, to end the run.
        archive: takes the checkpoints; None where there is no place for them.
    """

    def __init__(
        self,
        job: Job,
        launcher: Launcher,
        sink: Sink,
        cancelled: Event,
        archive: Archive | None = None,
    ) -> None:
        self._archive = archive
        self._job = job
        self._launcher = launcher
        self._sink = sink
        self._cancelled = cancelled
        self._wake: Callable[[], None] = lambda: None
        self._liveness = Liveness()
        self._tick_at = 0.0
        self._watchdog = Watchdog(job, sink, lambda: self._send_all(messages.ShowStacks()))
        self._sync = SyncCheck(job.size)
        self._stacks_wanted = Event()
        self._hellos: dict[int, messages.Hello] = {}
        self._slots: list[topology.Slot] = []
        self._ranks: dict[int, int] = {}  # of the tasks
        self._pids: dict[int, int] = {}
        self._fenced: set[int] = set()
        self._values: dict[str, str] = {}  # of the ranks' MPI
        self._lost: set[int] = set()
        self._ended = 0
        self._strange = 0
        self._give_up_at: float | None = None
        # The ranks that failed, by task, in the order of their reports.
        self._failed: dict[int, int] = {}
        self._felt: dict[int, int] = {}
        self._stopped = False
        self._apart = False
        self._why = ""  # the controller
        self._cold: dict[int, str] = {}  # why ranks did not start warm
        self._said_unreached = False
        self._problem: HorovodRunnerError | None = None
        self._deadline: float | None = None
        self._launched_at = time.monotonic()

    def run(self) -> Any:
        """Run the job to its end; returns rank 0's value.

        Raises:
            Exception: the user's own, from the first rank that failed.
            RankFailedError: a rank died without an exception.
            LaunchError: the ranks could not be started, or Spark ended them.
            HangError: the ranks made no progress for too long.
            CancelledError: another thread asked for it.
            GpuError: a host has too few GPUs.
            SerializationError: rank 0's value cannot be loaded here.
        """
        with Channel(self._launcher.channel_host, self._job.size) as channel:
            self._channel = channel
            self._wake = channel.wake
            launch = self._launcher.launch(self._job, channel.address, channel.wake)
            try:
                self._listen(launch)
                self._settle(launch)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self._sink.notice("interrupted: ending all ranks")
                self._call_off(launch)
                raise
            outcomes = self._outcomes(launch)
        return self._result(outcomes)

    def wake(self) -> None:
        """Make the run look at ``cancelled``; for other threads."""
        self._wake()

    def show_stacks(self) -> None:
        """Print all ranks' Python stacks; for other threads."""
        self._stacks_wanted.set()
        self._wake()

    def _listen(self, launch: Launch, until: float | None = None) -> None:
        """Handle messages until the launch has finished, or ``until``."""
        while not launch.finished and (until is None or time.monotonic() < until):
            if self._cancelled.is_set() and not self._stopped:
                raise CancelledError(f"run {self._job.run_id} was cancelled: all ranks are gone")
            if self._stacks_wanted.is_set():
                self._stacks_wanted.clear()
                if self._said_unreached:
                    self._sink.notice("the ranks cannot be asked for their stacks from here")
                else:
                    self._watchdog.show_stacks()
            self._listen_once(launch, until)

    def _listen_once(self, launch: Launch, until: float | None) -> None:
        tick = self._tick_at if self._hellos else None
        expected = self._expected(launch)
        moments = [each for each in (self._deadline, until, tick, expected) if each is not None]
        timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
        for task, batch in self._channel.batches(timeout):
            self._take_in(task, batch)
        self._sink.idle()
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            self._deadline = None
            self._on_deadline(launch)
        elif expected is not None and now > expected:
            self._on_silence(launch)
        if tick is not None and now >= tick:
            self._tick_at = now + _TICK_SECONDS
            self._tick(launch)

    def _expected(self, launch: Launch) -> float | None:
        """The moment by which some task should have said hello."""
        unneeded = self._hellos or self._apart or self._stopped or self._said_unreached
        return None if unneeded else launch.expected

    def _tick(self, launch: Launch) -> None:
        """Once a second: is everybody still there, and does it go on?"""
        # A task that ends closes its connection; any other end of one is strange.
        if self._channel.broken - self._ended > self._strange:
            self._strange = self._channel.broken - self._ended
            self._liveness.suspect()
        lost = self._liveness.tick()
        if lost:
            self._on_lost(lost)
        if self._lost and not self._liveness.present and self._give_up_at is None:
            # Spark waits two minutes for an executor that went away without a word.
            self._give_up_at = time.monotonic() + _CANCEL_SECONDS
            launch.cancel()
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            raise self._problem or LaunchError("Spark does not end the job that it was asked to")
        if not self._stopped and (hang := self._watchdog.tick()):
            self._problem = hang
            self._stop("no progress")

    def _on_lost(self, lost: Iterable[int]) -> None:
        self._lost |= set(lost)
        if self._stopped:
            return
        self._problem = failure.lost_error(sorted(self._lost), self._slots, self._pids)
        self._stop("a rank was lost")

    def _take_in(self, task: int, batch: list[messages.FromRank]) -> None:
        if set(map(type, batch)) == {messages.Report}:  # there may be very many
            self._on_reports(task, cast("list[messages.Report]", batch))
            return
        for message in batch:
            self._handle(task, message)

    def _handle(self, task: int, message: messages.FromRank) -> None:
        if isinstance(message, messages.Report):
            self._on_reports(task, [message])
            return
        if isinstance(message, messages.Hello) and task in self._hellos:
            self._on_rerun(task)
            return
        if self._apart and not isinstance(message, messages.Hello):
            return  # the last words to this driver
        self._liveness.heard(task)
        match message:
            case messages.Hello():
                self._on_hello(task, message)
            case messages.Ended():
                self._on_ended(task, message)
            case messages.Failed(rank=-1):  # before it was given a rank
                self._on_failed(task, message)
            case messages.Alive() | messages.Stalled() | messages.Stacks():
                if task in self._ranks:
                    self._watchdog.handle(self._ranks[task], message)
            case _ if message.rank != self._ranks.get(task):
                self._channel.dropped += 1  # no task speaks for another's rank
            case _:
                self._handle_own(task, message)

    def _handle_own(self, task: int, message: messages.FromRank) -> None:
        """Take in what a rank says of itself."""
        match message:
            case messages.Started():
                self._on_started(message)
            case messages.Output():
                self._sink.output(message.rank, message.stream, message.text)
            case messages.Log():
                self._sink.log(message.rank, message.text)
            case messages.Began():
                self._sink.began(message.rank)
            case messages.FilePart() | messages.Saved() | messages.Unsaved() | messages.Fetch():
                if message.rank == 0:
                    self._on_file(task, message)
                else:
                    self._channel.dropped += 1  # rank 0 alone saves and loads
            case messages.Weights():
                self._on_weights(message)
            case messages.Fence():
                self._on_fence(message)
            case messages.Lookup():
                self._channel.send(task, messages.Found(self._values))
            case messages.Failed():
                self._on_failed(task, message)

    def _on_reports(self, task: int, reports: list[messages.Report]) -> None:
        if self._apart:
            return
        self._liveness.heard(task)
        rank = self._ranks.get(task)
        own = [report for report in reports if report.rank == rank]
        self._channel.dropped += len(reports) - len(own)
        if own:
            self._sink.reports(own)

    def _on_file(
        self,
        task: int,
        message: messages.FilePart | messages.Saved | messages.Unsaved | messages.Fetch,
    ) -> None:
        """Checkpoints, and the timeline: what is wrong with them ends no training."""
        if isinstance(message, messages.Fetch):
            self._channel.send(task, self._fetched(message))
            return
        try:
            match message:
                case messages.FilePart() if self._archive is not None:
                    timeline = self._archive.part(message)
                    if timeline is not None:
                        self._sink.notice(f"Horovod's timeline: {timeline}")
                case messages.Saved() if self._archive is not None:
                    saved = self._archive.saved(message.marker)
                    if saved is not None:
                        self._sink.checkpoint(saved)
                        warning = self._archive.unranked(message.marker)
                        if warning:
                            self._sink.notice(warning)
                case messages.Unsaved():
                    self._unsaved(f"the checkpoint of step {message.step}", message.reason)
        except ValueError:
            self._channel.dropped += 1
        except OSError as error:
            what = message.name if isinstance(message, messages.FilePart) else "a checkpoint"
            if what == "timeline":
                self._sink.notice(f"Horovod's timeline could not be written: {error}")
            else:
                self._unsaved(what, str(error))

    def _on_weights(self, message: messages.Weights) -> None:
        if self._stopped:
            return
        if not self._job.check_sync:
            self._channel.dropped += 1  # nobody asked
            return
        try:
            self._sync.take(message)
        except SyncError as error:
            self._problem = error
            self._stop("the ranks' weights differ")

    def _on_fence(self, message: messages.Fence) -> None:
        self._values |= message.values
        self._fenced.add(message.rank)
        if len(self._fenced) == self._job.size:
            self._fenced.clear()
            self._send_all(messages.Fenced())

    def _unsaved(self, what: str, why: str) -> None:
        latest = None if self._archive is None else self._archive.latest
        there = "there is no earlier one" if latest is None else f"that of step {latest.step} stays"
        self._sink.notice(
            f"{what} could not be written: {why}. The training goes on; {there}. Free space, or "
            "set checkpoint_dir to another place."
        )

    def _fetched(self, message: messages.Fetch) -> messages.Fetched:
        if self._archive is None:
            problem = (
                "the ranks reach neither the driver nor its folder of checkpoints: set "
                "checkpoint_dir to a store that driver and executors share."
            )
            return messages.Fetched(message.name, message.offset, problem=problem)
        return self._archive.fetch(message)

    def _on_hello(self, task: int, hello: messages.Hello) -> None:
        if hello.offer.task != task:
            self._channel.dropped += 1
            return
        if self._stopped:
            self._channel.send(task, messages.Stop("this run is over"))
            return
        if self._apart:
            self._channel.send(task, messages.Apart())
            return
        self._hellos[task] = hello
        self._channel.send(task, messages.Welcome())
        if len(self._hellos) < self._job.size:
            # Those that take rows in before may take longer.
            waited = time.monotonic() - self._launched_at if hello.pieces else 0.0
            self._deadline = self._deadline or time.monotonic() + _GATHER_SECONDS + 4 * waited
            return
        self._deadline = None
        try:
            controller = self._compare_software()
            offers = [hello.offer for hello in self._hellos.values()]
            self._place(topology.assign(offers, self._job.gpus_per_rank))
        except HorovodRunnerError as error:
            self._problem = error
            self._stop("the ranks cannot be placed")
            return
        if controller == "gloo":
            for warning in topology.short_of_ports(self._slots, offers):
                self._sink.notice(warning)
        first = self._hellos[0]
        pieces = {
            name: [self._hellos[slot.task].pieces[name] for slot in self._slots]
            for name in first.pieces
        }
        space, mapping = secrets.token_hex(8), process_mapping(self._slots)
        hosts = {host: at for at, host in enumerate(dict.fromkeys(s.host for s in self._slots))}
        for slot in self._slots:
            assignment = messages.Assignment(
                slot,
                first.rendezvous,
                first.offer.address,
                first.master_port,
                pieces,
                controller,
                space,
                mapping,
                hosts[slot.host],
            )
            self._channel.send(slot.task, assignment)

    def _place(self, slots: list[topology.Slot]) -> None:
        self._slots = slots
        self._ranks = {slot.task: slot.rank for slot in slots}

    def _compare_software(self) -> messages.Controller:
        hosts = {hello.offer.hostname: hello.software for hello in self._hellos.values()}
        for warning in software.compare(self._job.software, hosts, self._job.main):
            self._sink.notice(warning)
        controller, self._why = software.choose_controller(self._job.controller, hosts)
        self._sink.controller(controller)
        return controller

    def _on_rerun(self, task: int) -> None:
        """Spark lost an executor and runs the stage again by itself: never train twice unseen."""
        self._channel.send(task, messages.Stop("this run has already started"))
        if not self._stopped:
            self._on_lost(self._liveness.most_silent() or [task])

    def _on_started(self, message: messages.Started) -> None:
        if message.rank in self._pids:
            return
        self._pids[message.rank] = message.pid
        if message.cold:
            self._cold[message.rank] = message.cold
        self._watchdog.started(message.rank)
        if len(self._pids) == self._job.size:
            self._sink.ranks(self._described({}))
            if self._job.size > 1:
                self._sink.notice(f"{topology.describe(self._slots, self._pids)}\n{self._why}")
            if self._job.warm:
                self._sink.notice(self._start())

    def _start(self) -> str:
        if not self._cold:
            return "start: warm"
        reasons = "; ".join(sorted(set(self._cold.values())))
        return f"start: cold on {topology.ranks_text(sorted(self._cold))} ({reasons})"

    def _described(self, exit_codes: dict[int, int | None]) -> list[topology.RankInfo]:
        return [
            topology.RankInfo(
                slot.rank,
                slot.hostname,
                self._pids.get(slot.rank),
                tuple(slot.gpus),
                exit_codes.get(slot.rank),
            )
            for slot in self._slots
        ]

    def _on_failed(self, task: int, message: messages.Failed) -> None:
        if self._stopped or task in self._failed:
            return
        if message.secondary:
            self._felt[task] = message.rank
            self._deadline = self._deadline or time.monotonic() + _CAUSE_SECONDS
            return
        self._failed[task] = message.rank
        self._deadline = time.monotonic() + _TOGETHER_SECONDS
        if len(self._failed) == self._job.size:
            self._stop("all ranks failed")

    def _on_deadline(self, launch: Launch) -> None:
        if self._felt and not self._failed and self._liveness.suspicious:
            # They may feel the end of a rank that is lost, of which nobody tells.
            self._deadline = time.monotonic() + _TICK_SECONDS
            return
        if self._failed or self._felt:
            ranks = topology.ranks_text(list((self._failed or self._felt).values()))
            self._stop(f"{ranks} failed")
            return
        if launch.running:
            self._say_unreached()
            self._apart = True
            self._send_all(messages.Apart())
            self._hellos.clear()
            self._liveness = Liveness()
            return
        missing = sorted(set(range(self._job.size)) - set(self._hellos))
        self._problem = LaunchError(
            f"{len(missing)} of {self._job.size} tasks did not report within "
            f"{_GATHER_SECONDS:.0f} s of the first (tasks {missing[:10]}): their executors cannot "
            f"reach the driver at {self._channel.address.host}, or start very slowly."
        )
        self._stop("some tasks did not report")
        launch.cancel()

    def _on_silence(self, launch: Launch) -> None:
        if launch.running:
            self._say_unreached()
            return
        self._problem = launch.late
        self._stop("no task started in time")  # for those that yet come
        launch.cancel()

    def _say_unreached(self) -> None:
        if self._said_unreached:
            return
        self._said_unreached = True
        address = self._channel.address
        self._sink.notice(
            f"executors cannot reach this process at {address.host}:{address.port}. The ranks do "
            "without: what they print comes at the end of the run, and until then is in the "
            "executors' logs. For live output set HOROVOD_RUNNER_DRIVER_HOST to an address of this "
            "machine that executors reach, and let TCP connections through."
        )

    def _replay(self, record: Record) -> None:
        """Take in what the deputy heard and saw."""
        self._say_unreached()
        self._apart = False
        self._place(record.slots)
        if record.controller is not None:
            self._sink.controller(record.controller)
        if record.problem:
            # Over the launcher's connection.
            self._problem = self._problem or pickle.loads(record.problem)  # noqa: S301
        for task, message in record.said:
            if isinstance(message, str):
                self._sink.notice(message)
            else:
                self._handle(task, message)
        if record.cut:
            self._sink.notice(
                f"{record.cut} characters of what the ranks printed were too many to keep: the "
                "first ones are missing above, and are in the executors' logs"
            )

    def _on_ended(self, task: int, message: messages.Ended) -> None:
        lost = message.sent - self._channel.received(task) + 1
        if lost > 0:
            self._sink.notice(f"{lost} batches of messages from task {task} were lost on the way")
        self._channel.send(task, messages.Taken())
        self._ended += 1
        self._liveness.leave(task)
        if task in self._ranks:
            self._watchdog.ended(self._ranks[task])

    def _stop(self, reason: str) -> None:
        self._stopped = True
        self._send_all(messages.Stop(reason))

    def _send_all(self, message: messages.FromDriver) -> None:
        self._channel.send_all(self._hellos, message)

    def _settle(self, launch: Launch) -> None:
        """Wait for tasks that outlive their launch: Spark does not wait for those it cancels."""
        for task, batch in self._channel.batches(0):
            self._take_in(task, batch)
        try:
            launch.outcomes()
        except TaskLostError as error:
            self._liveness.leave(error.task)  # it will not be heard of any more
        except LaunchError:
            pass
        until = time.monotonic() + _STOP_SECONDS
        if self._liveness.present and not self._stopped:
            self._stop("the launch has ended")
        while self._liveness.present and time.monotonic() < until:
            self._listen_once(launch, until)

    def _call_off(self, launch: Launch) -> None:
        """End a run that the caller gave up; all ranks are gone when this returns."""
        self._stop("the driver gave the run up")
        self._deadline = None
        if not self._hellos:
            launch.cancel()  # there is nobody to hear the above
        self._listen(launch, until=time.monotonic() + _STOP_SECONDS)
        if not launch.finished:
            launch.cancel()
            self._listen(launch, until=time.monotonic() + _STOP_SECONDS)

    def _outcomes(self, launch: Launch) -> list[Outcome]:
        try:
            outcomes = launch.outcomes()
        except LaunchError as error:
            if isinstance(error, LaunchLostError):
                raise LaunchError(str(error)) from None
            if self._problem is not None:
                raise self._problem from None
            if isinstance(error, TaskLostError):
                told = failure.lost_error([error.task], self._slots, self._pids, str(error))
                raise told from None
            raise
        for outcome in outcomes:
            if outcome.record is not None:
                self._replay(outcome.record)
        self._sink.ranks(self._described({each.rank: each.exit_code for each in outcomes}))
        return outcomes

    def _result(self, outcomes: list[Outcome]) -> Any:
        if self._problem is not None:
            raise self._problem
        for outcome in outcomes:
            if outcome.lost and outcome.rank >= 0:  # else its problem says it all
                self._sink.notice(
                    f"the driver lost touch with rank {outcome.rank}: its last {outcome.lost} "
                    "batches of messages are missing here"
                )
        if not all(outcome.ok for outcome in outcomes):
            raise failure.run_error(outcomes, list(self._failed.values()))
        elsewhere = any(outcome.record for outcome in outcomes)
        if self._job.check_sync and self._job.size > 1 and not (self._sync.compared or elsewhere):
            self._sink.notice(_UNCOMPARED)
        if len(outcomes) < self._job.size:
            raise LaunchError(f"Spark ran {len(outcomes)} tasks instead of {self._job.size}")
        first = next(outcome for outcome in outcomes if outcome.rank == 0)
        assert first.worker is not None  # noqa: S101 - it is ok
        try:
            return pickle.loads(first.worker.value)  # noqa: S301 - over the launcher's connection
        except Exception as error:
            raise SerializationError(
                f"main returned a value that cannot be loaded on the driver: {error}. A package "
                "that the ranks have is missing or older here; return plain values or arrays."
            ) from error
