"""A rank's life beside its worker."""

from __future__ import annotations

import math
import socket

import pytest
import zmq

from horovod_runner import rank
from horovod_runner.channel import ChannelAddress
from horovod_runner.job import Job


def test_a_rank_that_never_reaches_the_driver_does_not_wait_for_it_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "REACH_SECONDS", 0.1)
    monkeypatch.setattr(rank, "_DRAIN_SECONDS", math.inf)
    job = Job("test", 2, b"", gpus_per_rank=0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        address = ChannelAddress("127.0.0.1", port, zmq.curve_keypair()[0], *zmq.curve_keypair())
        outcome = rank.run_rank(job, address, rank.Surroundings(1, [], {}))
    assert outcome.exit_code is None
    assert f"the driver did not answer at 127.0.0.1:{port} within 0 s" in outcome.problem
