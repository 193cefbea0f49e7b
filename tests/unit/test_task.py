"""The task beside a worker, when the driver cannot be reached or calls it off."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from horovod_runner.common.limits import Limits
from horovod_runner.common.options import ClusterConfig, Options
from horovod_runner.common.slots import Slot
from horovod_runner.errors import LaunchError
from horovod_runner.task import meeting, task
from horovod_runner.task.orders import CalledOffError
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job
from horovod_runner.wire.messages import Assignment, Stop


def test_a_task_that_never_reaches_the_driver_does_not_wait_for_it_twice() -> None:
    limits = Limits(driver_answer=0.1, messages_taken=3600)
    cluster = ClusterConfig(limits=limits)
    job = Job("test", 2, Options(np=2, gpus_per_rank=0, cluster_config=cluster), b"")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        address = ChannelAddress("127.0.0.1", port, zmq.curve_keypair()[0], *zmq.curve_keypair())
        outcome = task.run_rank(job, address, task.TaskSetup(1, [], {}))
    assert outcome.exit_code is None
    assert f"the driver did not answer at 127.0.0.1:{port} within 0.1 s" in outcome.problem


def test_the_interface_that_the_user_names_is_offered_and_a_wrong_one_refused() -> None:
    job = Job("test", 2, Options(np=2, gpus_per_rank=0), b"")
    nowhere = ChannelAddress("192.0.2.1", 1, b"", b"", b"")
    offer = meeting.make_offer(job, nowhere, 1, interface="lo")
    assert (offer.address, offer.interface) == ("127.0.0.1", "lo")
    with pytest.raises(LaunchError, match="HOROVOD_GLOO_IFACE=ib7:"):
        meeting.make_offer(job, nowhere, 1, interface="ib7")


def test_a_stop_that_comes_together_with_what_was_waited_for_counts() -> None:
    slot = Slot(0, 0, 1, 0, 1, 0, 1, "a", "host-a", "10.0.0.1", "eth0")
    came = [Assignment(slot, "", "", 0), Stop("over")]
    link: Any = SimpleNamespace(wait=lambda _: came, lost=False)
    nowhere = ChannelAddress("192.0.2.1", 1, b"", b"", b"")
    with pytest.raises(CalledOffError, match=r"^over$"):
        meeting.await_assignment(link, nowhere, 60)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "fd00:77::1"])
def test_a_driver_without_a_way_to_it_is_named(host: str) -> None:
    job = Job("test", 2, Options(np=2, gpus_per_rank=0), b"")
    with pytest.raises(LaunchError, match=rf" {host}: .*spark\.driver\.host .*HOROVOD_GLOO_IFACE"):
        meeting.make_offer(job, ChannelAddress(host, 1, b"", b"", b""), 1)
