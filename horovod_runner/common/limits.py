"""The time limits of a run: how long it waits for each thing. One value, which travels in the job.

A limit of the cores or the memory of a machine is something else: see `host.control_groups`. The
length of a poll, and how often something is shown, are no limits: they stand where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from horovod_runner.common.arguments import suggest_fields

# A poll with a millisecond clock can wait for these.
_LEAST, _MOST = 0.001, 7 * 86_400.0


@suggest_fields()
@dataclass(frozen=True, kw_only=True, repr=False)
class Limits:
    """How long a run waits for each thing, in seconds: ``ClusterConfig(limits=Limits(...))``.

    The defaults suit runs of one to a thousand ranks. Raise a limit where the network or the
    machines are slower than that. ``slot_timeout`` and ``hang_timeout`` are options of their own.

    Args:
        executors: the driver waits for executors to register, counted from its own registration.
            Then too few slots are an error. ``slot_timeout`` replaces this limit.
        granted_executors: the driver waits for executors that YARN or Kubernetes was asked for.
            Then too few slots are an error. ``slot_timeout`` replaces this limit.
        slot_notice: the driver waits for missing slots. Then it tells the user, and again, after as
            long, when something has changed.
        returning_slots: between two attempts the driver waits for the slots of a lost executor or
            host. Then no attempt follows.
        connect_task: on Spark Connect the driver waits for the first task. Then the run ends. A
            longer ``slot_timeout`` replaces this limit.
        slurm_task: under Slurm the driver waits for the first task. Then the run ends. A longer
            ``slot_timeout`` replaces this limit.
        connect_server: the driver tries again to reach a Spark Connect server whose port refuses
            connections. Then the run ends.
        first_report: the driver waits for a task to report after Spark has started all tasks. Then
            it looks for signs of detached mode.
        detached_sign: the driver waits for a sign of detached mode. Then it tells the user that the
            tasks cannot reach it.
        all_tasks: the driver waits for all tasks after the first has reported. Then all tasks
            switch to detached mode if Spark has started them, and otherwise the run ends.
        driver_reached: a task waits for its connection to the driver. Then all tasks switch to
            detached mode.
        driver_answer: a task waits for the driver's first answer. Then it fails.
        nvidia_smi: a task waits for nvidia-smi to list the GPUs of its host. Then it assumes none.
        gloo: a rank waits for the other ranks to connect over Gloo. Then Horovod fails. The
            variable ``HOROVOD_GLOO_TIMEOUT_SECONDS`` replaces this limit.
        rendezvous_key: the rendezvous server waits for a rank to publish an address that another
            rank asks for. Then it answers that there is none, and the rank asks again.
        rendezvous_request: the rendezvous server waits for a client to complete its request. Then
            it closes the connection.
        silent_task: the driver waits for the next message of a task, which sends one every second.
            Then the task is lost. The driver's own pauses do not count.
        reconnect_task: after a connection has broken off the driver waits for the next message of
            the task. Then the task is lost.
        reconnect_driver: a task waits for a broken connection to the driver to come back. Then it
            ends its rank.
        heartbeat: each end of a connection waits for the answer to a heartbeat, and sends three in
            this time. Then the connection counts as broken. Local ranks have no such limit.
        stacks_begin: a task waits for its worker to begin writing stacks, and a tenth of this time
            for more of them. Then it sends what has come.
        stacks_shown: the driver waits for all ranks' stacks when the user asks for them. Then it
            shows those that have come.
        stacks_of_hang: the driver waits for all ranks' stacks before it warns of a hang. Then it
            warns without the others.
        idle_rank: the driver waits for an idle rank to compute something. Then it suspects a hang.
            Half of a shorter ``hang_timeout`` replaces this limit.
        same_warning: the driver waits for other ranks to send the same warning. Then it shows one
            warning for all of them.
        late_feed: the driver waits for all ranks to read a feed that one of them reads. Then it
            warns.
        cause: the driver waits for the rank whose end other ranks have noticed. Then the first of
            those counts as failed.
        other_failures: the driver waits for other ranks to fail in the same way. Then it ends all
            ranks.
        leaving: the driver waits for all ranks to leave at their commits. Then it ends the others.
        saving: after a failure a task waits for its rank to complete a checkpoint. Then it ends the
            rank.
        saving_cancelled: after Ctrl-C or ``cancel`` a task waits for its rank to complete a
            checkpoint. Then it ends the rank.
        saving_alone: after the driver is lost a task waits for its rank to complete a checkpoint.
            Then it ends the rank.
        worker_end: a task waits for its worker to end after SIGTERM. Then it sends SIGKILL.
        killed_end: a worker's guard waits for the worker's processes to end after SIGKILL. Then it
            leaves them behind.
        guard_end: a task waits for the worker's guard to end after it was told to kill the worker,
            or after the worker has ended. Then it kills the guard.
        ranks_end: after Ctrl-C or ``cancel`` the driver waits for all ranks to end. Then the
            launcher ends the tasks by force.
        launch_end: the driver waits for Spark or Slurm to end the tasks by force. Then the run ends
            without them.
        last_messages: the driver waits for the last messages of tasks that outlive their launch.
            Then the run ends without them.
        messages_taken: at its end a task waits for the driver to take one more message. Then it
            drops the rest.
        last_orders: at its end the driver waits for its last messages to be sent. Then it drops
            them.
        mlflow_run: before the first launch the driver waits for MLflowSink's MLflow run. Then the
            ranks start without it, and what they log to MLflow goes to separate runs.
        sinks: after the run the driver waits for the sinks to handle all events. Then it drops
            reports and lines.
        sink_rest: after reports and lines were dropped the driver waits for a sink to handle its
            other events. Then the run ends without it.
        detached_tasks: in detached mode the tasks wait for each other. Then the run ends.
        journal_begin: the driver waits for the journal of a run in detached mode. Then it stops
            looking for one.
        journal_answer: the driver waits for the stand-in to send a file of the journal. Then it
            asks again.
        journal_rest: at the end the driver waits for the last files of the journal. Then it does
            without them.
        journal_write: at the end the stand-in waits until its last file is written. Then the file's
            content returns with the outcome.
        pool_tasks: the driver waits for the tasks of an elastic run for which there are slots. Then
            the first attempt begins with fewer. ``slot_timeout`` replaces this limit.
        pool_slots: the driver waits for the least number of tasks of an elastic run. Then the run
            ends. ``slot_timeout`` replaces this limit.
        pool_report: the driver waits for the first task of an attempt of an elastic run. Then the
            attempt ends.
        pool_end: at the end of an elastic run the driver waits for its tasks. Then the launcher
            ends them by force.
        cancelled_tasks: after a Spark job of an elastic run was cancelled, the driver waits for
            others to be cancelled. Then an attempt begins with the tasks that are left.
        fork_server: a task waits for the answer of a fork server, which may still import. Then the
            worker starts cold.
        fork_server_imports: a fork server may take this long to import frameworks. Then it ends.
        fork_server_idle: a fork server waits for the next request. Then it ends.
        fork_server_end: at the end of an elastic run a task waits for its fork servers to end. Then
            it kills them.
        fork_request: a fork server waits for the request of a task that has connected. Then it
            closes the connection.
        checkpoint_parts: rank 0 waits for the other ranks to write their parts of a checkpoint, but
            at least twice as long as it took itself. Then it may be ended during the save.
        checkpoint_meeting: the ranks wait for each other at their first sharded checkpoint. Then
            ``save_checkpoint`` fails.
        checkpoint_piece: rank 0's task waits for a piece of the checkpoint to resume from. Then it
            tries an earlier checkpoint.

    Raises:
        TypeError: a limit is not a number.
        ValueError: a limit is below 0.001 or above 604800 (a week).
    """

    # Slots, tasks and hosts, before the ranks run.
    executors: float = 30.0
    granted_executors: float = 300.0  # a queue may be full for a while
    slot_notice: float = 5.0
    returning_slots: float = 60.0
    connect_task: float = 60.0
    slurm_task: float = 120.0  # nodes may load Python from a slow file system
    connect_server: float = 6.0
    first_report: float = 5.0  # later ones are taken, too
    detached_sign: float = 25.0  # a Python worker may start slowly
    all_tasks: float = 120.0
    driver_reached: float = 10.0
    driver_answer: float = 30.0
    nvidia_smi: float = 30.0
    gloo: float = 600.0  # for slow starts; collectives may take as long to notice a dead peer
    rendezvous_key: float = 10.0
    rendezvous_request: float = 30.0
    # While the ranks run.
    silent_task: float = 12.0  # a network can be down for that long
    reconnect_task: float = 4.0  # a live task reconnects at once
    # With these two a rank ends itself at most 13 s after the network was cut.
    reconnect_driver: float = 5.0
    heartbeat: float = 6.0
    stacks_begin: float = 2.0
    stacks_shown: float = 4.0
    stacks_of_hang: float = 3.0
    idle_rank: float = 300.0  # a download can be quiet for minutes
    same_warning: float = 1.5  # ranks look once a second
    late_feed: float = 60.0  # ranks that train together are not so far apart
    # When the ranks end.
    cause: float = 2.0  # survivors may report before the rank that caused their errors
    other_failures: float = 0.2
    leaving: float = 3.0  # those of another host may still write a commit
    saving: float = 60.0
    saving_cancelled: float = 5.0
    saving_alone: float = 5.0
    worker_end: float = 2.0
    killed_end: float = 5.0
    guard_end: float = 10.0  # longer than killed_end
    ranks_end: float = 10.0
    launch_end: float = 10.0
    last_messages: float = 10.0
    messages_taken: float = 30.0
    last_orders: float = 0.2
    mlflow_run: float = 10.0
    sinks: float = 30.0
    sink_rest: float = 5.0
    # Detached mode.
    detached_tasks: float = 300.0  # longer than all_tasks: tasks that reach the driver wait there
    journal_begin: float = 600.0  # longer than detached_tasks
    journal_answer: float = 5.0
    journal_rest: float = 30.0
    journal_write: float = 10.0
    # Elastic runs.
    pool_tasks: float = 30.0
    pool_slots: float = 120.0  # a cluster may have to start executors
    pool_report: float = 60.0
    pool_end: float = 10.0
    cancelled_tasks: float = 2.0  # Spark ends jobs that are cancelled together one after another
    # Fork servers. On a busy host a worker that starts cold would import no faster.
    fork_server: float = 300.0
    fork_server_imports: float = 300.0
    fork_server_idle: float = 600.0
    fork_server_end: float = 1.0
    fork_request: float = 5.0
    # Checkpoints.
    checkpoint_parts: float = 5.0
    checkpoint_meeting: float = 300.0
    checkpoint_piece: float = 60.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"{limit.name} is a number of seconds, and {value!r} is not a number"
                )
            if not _LEAST <= value <= _MOST:
                raise ValueError(
                    f"{limit.name} is in seconds, from {_LEAST:g} to {_MOST:.0f} (a week), and "
                    f"cannot be {value}; the default is {limit.default:g}"
                )

    def __repr__(self) -> str:
        changed = (
            f"{limit.name}={getattr(self, limit.name)!r}"
            for limit in fields(self)
            if getattr(self, limit.name) != limit.default
        )
        return f"Limits({', '.join(changed)})"


DEFAULTS: Final = Limits()
