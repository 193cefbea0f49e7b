"""The task beside a worker, when the driver cannot be reached."""

from __future__ import annotations

import math
import socket

import pytest
import zmq

from horovod_runner.options import Options
from horovod_runner.task import meeting, task
from horovod_runner.wire.job import Job
from horovod_runner.wire.transport import ChannelAddress


def test_a_task_that_never_reaches_the_driver_does_not_wait_for_it_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "REACH_SECONDS", 0.1)
    monkeypatch.setattr(task, "_DRAIN_SECONDS", math.inf)
    job = Job("test", 2, Options(np=2, gpus_per_rank=0), b"")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        address = ChannelAddress("127.0.0.1", port, zmq.curve_keypair()[0], *zmq.curve_keypair())
        outcome = task.run_rank(job, address, task.TaskSetup(1, [], {}))
    assert outcome.exit_code is None
    assert f"the driver did not answer at 127.0.0.1:{port} within 0 s" in outcome.problem
