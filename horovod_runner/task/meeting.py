"""Before training: the task offers its host to the driver, and is assigned a slot."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from horovod_runner.common.slots import Offer
from horovod_runner.errors import LaunchError
from horovod_runner.host import counters, gpus, network
from horovod_runner.task.orders import CalledOffError, DetachError, receive
from horovod_runner.wire import messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job
from horovod_runner.wire.link import Link
from horovod_runner.wire.messages import Assignment


@contextmanager
def meeting_points(job: Job, task: int, address: str) -> Iterator[tuple[str, int]]:
    """Open on task 0, which runs rank 0, where the ranks find each other.

    Yields:
        ``host:port/token`` of Horovod's rendezvous server, empty with a single rank; and a port
        that is held free for torch.distributed's TCPStore. Both empty on all other tasks.
    """
    if task != 0:
        yield "", 0
        return
    with ExitStack() as stack:
        rendezvous = ""
        if job.size > 1:
            from horovod_runner.worker.startup import rendezvous as servers  # it needs asyncio

            server = servers.Rendezvous(address, job.size, limits=job.limits)
            rendezvous = stack.enter_context(server).address
        held = stack.enter_context(network.hold_port())
        yield rendezvous, held.getsockname()[1]


def make_offer(
    job: Job,
    address: ChannelAddress,
    task: int,
    task_gpus: tuple[str, ...] = (),
    interface: str = "",
) -> Offer:
    """Describe this task's host to the driver; without an interface, by the one towards the driver.

    Raises:
        LaunchError: this host has no such interface, or no way to the driver.
    """
    own_address = network.address_of(interface) if interface else _address_towards(address.host)
    look_for_gpus = not task_gpus and job.options.gpus_per_rank != 0
    return Offer(
        task=task,
        host=network.host_id(),
        hostname=socket.gethostname(),
        address=own_address,
        interface=network.interface_of(own_address),
        task_gpus=task_gpus,
        host_gpus=gpus.visible_gpus(job.limits.nvidia_smi) if look_for_gpus else (),
        ports=network.port_count(),
        shared_memory=counters.free_shared_memory(),
    )


def _address_towards(driver: str) -> str:
    try:
        return network.address_towards(driver)
    except OSError as error:
        raise LaunchError(
            f"host {socket.gethostname()} finds no way to the driver at {driver}: {error}. Set "
            "spark.driver.host to an IPv4 address of the driver that all hosts reach, or name the "
            'interface by which the hosts reach each other, env={"HOROVOD_GLOO_IFACE": ...}.'
        ) from error


def await_assignment(link: Link, address: ChannelAddress, patience: float) -> Assignment:
    """Wait until the driver has heard all tasks and assigns this one a slot.

    The driver has to answer at all within ``patience`` seconds.

    Raises:
        CalledOffError: the driver stopped the rank, or cannot be reached.
        DetachError: the driver orders all tasks into detached mode.
    """
    deadline = time.monotonic() + patience
    reached = False
    while True:
        for message in receive(link, 0.5):
            reached = True
            if isinstance(message, Assignment):
                return message
            if isinstance(message, messages.Detach):
                raise DetachError
        if not reached and time.monotonic() > deadline:
            link.mark_lost()
            raise CalledOffError(
                f"the driver did not answer at {address.host}:{address.port} within "
                f"{patience:g} s. The likely cause is a firewall between executors and "
                "driver, or a wrong spark.driver.host (in detached mode, where task 0 supervises "
                "the ranks: a firewall between the executors). Open all TCP ports between them, or "
                "correct spark.driver.host."
            )
